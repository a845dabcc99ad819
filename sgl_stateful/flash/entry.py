"""One registration, with what was learnt about it."""

from __future__ import annotations

from dataclasses import dataclass, field

from .answers import Answer, Stored
from .audit import AlikeAudit, Audit
from .gate import Gate
from .question import Question

_WEIGHT = 0.2  # of the newest value in a running mean
_FIRST_MS = 100.0


@dataclass(slots=True)
class Worth:
    """What evaluating a question is worth: how often an answer is used, and the time that saves, for what it costs.

    Attributes
    ----------
    evaluations, used
        Answers that were stored, and those of them that were served at least once.
    saved_ms, cost_ms
        Running means: of a caller's wait that a hit saves, and of an evaluation.
    """

    evaluations: int = 0
    used: int = 0
    saved_ms: float = _FIRST_MS
    cost_ms: float = _FIRST_MS

    def evaluated(self, answer: Answer) -> None:
        """An answer was stored."""
        self.evaluations += 1
        self.cost_ms += _WEIGHT * (answer.ms - self.cost_ms)
        if answer.by == "decoding":
            self.saved_ms += _WEIGHT * (answer.ms - self.saved_ms)

    def value(self) -> float:
        """Expected milliseconds saved for each that is spent."""
        hit_rate = (self.used + 1) / (self.evaluations + 2)
        return hit_rate * self.saved_ms / max(self.cost_ms, 1e-3)


@dataclass(slots=True, eq=False)
class Entry:
    """A question of a session in the table.

    Attributes
    ----------
    template_version
        New with every update.
    alike
        Of answers to other words; None: there are none.
    stored
        Its latest answer.
    retired
        Why it is out of service; None: it is not.
    error
        Why its latest evaluation failed; None: it did not.
    """

    session_id: str
    owner: str
    question: Question
    template_version: int
    created_at: float
    audit: Audit = field(init=False)
    gate: Gate | None = None
    alike: AlikeAudit | None = None
    stored: Stored | None = None
    retired: str | None = None
    error: str | None = None
    hits: int = 0
    worth: Worth = field(default_factory=Worth)

    def __post_init__(self) -> None:
        self.learn_anew()

    def learn_anew(self) -> None:
        """Forget what audits and the gate have seen: it was of another question, or of another model."""
        self.audit = Audit(self.question.audit_target)
        self.gate = None if self.question.target is None else Gate(self.question.target)
        self.alike = None if self.question.semantic is None else AlikeAudit(self.question.audit_target)

    @property
    def is_alike_served(self) -> bool:
        """Whether other words may be answered by it."""
        return self.alike is not None and self.alike.retired is None and self.question.wording is not None

    @property
    def name(self) -> str:
        """Its name in the session."""
        return self.question.name

    def confidence(self, answer: Answer) -> float | None:
        """Expected share of agreement with decoding for real; None where nothing has been observed yet."""
        if self.gate is not None and answer.gap is not None and answer.by == "gate":
            return self.gate.confidence(answer.gap)
        return (self.audit.agreed + 1) / (self.audit.audited + 2) if self.audit.audited else None
