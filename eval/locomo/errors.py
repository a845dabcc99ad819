"""The tree of this package's errors.

LocomoError
├── ServerFailed             a server did not start, ended, or answered with an error
├── ReportInputError         what a report is made from cannot be read
└── DatasetError             the data cannot be used
    ├── DatasetNotFoundError   no file there
    └── DatasetFormatError     a file, but not the schema
"""


class LocomoError(Exception):
    """Base of every error that this package raises."""


class ServerFailed(LocomoError):
    """A server did not start, ended, or answered with an error; the message repeats it."""


class ReportInputError(LocomoError):
    """A score, a run's rows or a benchmark's file is absent, cut short or of another shape."""


class DatasetError(LocomoError):
    """The data file cannot be used."""


class DatasetNotFoundError(DatasetError):
    """There is no data file at the path."""


class DatasetFormatError(DatasetError):
    """The file is not JSON or does not follow LoCoMo's schema."""
