"""The tree of this package's errors.

LocomoError
├── ServerFailed             a server did not start, ended, or fails whatever it is asked
├── RequestRefused           a server refuses one request, such as a prompt that is too long; it may answer others
├── NothingToServe           an arm has nothing of its own to serve for a question
├── OracleError              a served prompt cannot be computed by the reference model
├── ConfigError              a run is asked for what cannot be run, or a folder holds another one
├── RunError                 a run's folder cannot be read or written
├── ReportInputError         what a report is made from cannot be read
├── VectorCacheError         vectors that were kept from an earlier run cannot be read or kept
├── ScoringError             a figure is not defined for what it was asked of
├── JudgeError               answers cannot be judged
│   ├── JudgePromptError       the prompt's file lacks a placeholder, or cannot be read
│   ├── JudgeUnanswered        one request got no answer, after every retry
│   ├── JudgeRefused           the endpoint refuses every request: key, address or model
│   └── VerdictCacheError      the verdicts' file cannot be read or written
└── DatasetError             the data cannot be used
    ├── DatasetNotFoundError   no file there
    ├── DatasetFormatError     a file, but not the schema
    └── AuditFormatError       a list of wrong golds that does not fit the data
"""


class LocomoError(Exception):
    """Base of every error that this package raises."""


class ServerFailed(LocomoError):
    """A server did not start, ended, is out of reach, or answers with an error of its own; the message repeats it."""


class RequestRefused(LocomoError):
    """A server refuses one request for what it says, such as a prompt that is too long; the message repeats why."""


class NothingToServe(LocomoError):
    """An arm has nothing of its own for one question: it would serve what its text arm does; the message says why."""


class ConfigError(LocomoError):
    """A run is asked for what cannot be run, or the folder holds another run."""


class RunError(LocomoError):
    """A run's folder cannot be read or written; what was written so far is kept."""


class OracleError(LocomoError):
    """A served prompt cannot be computed by the reference model: the message says what of it is not known or not so."""


class ReportInputError(LocomoError):
    """A score, a run's rows or a benchmark's file is absent, cut short or of another shape."""


class VectorCacheError(LocomoError):
    """Vectors of an earlier run are damaged, or none can be kept where the user said."""


class ScoringError(LocomoError):
    """A figure is not defined for what it was asked of: no question, no gold, a value that is no number."""


class JudgeError(LocomoError):
    """Answers cannot be judged."""


class JudgePromptError(JudgeError):
    """The judge's prompt cannot be read or lacks a placeholder."""


class JudgeUnanswered(JudgeError):
    """The judge's endpoint gave no answer to one request; the message says what it met."""


class JudgeRefused(JudgeError):
    """The judge's endpoint refuses every request; the message repeats its reason."""


class VerdictCacheError(JudgeError):
    """The file of verdicts is damaged, in use, or cannot be written."""


class DatasetError(LocomoError):
    """The data file cannot be used."""


class DatasetNotFoundError(DatasetError):
    """There is no data file at the path."""


class DatasetFormatError(DatasetError):
    """The file is not JSON or does not follow LoCoMo's schema."""


class AuditFormatError(DatasetError):
    """A list of wrong gold answers is not one, or names questions that the data does not have."""
