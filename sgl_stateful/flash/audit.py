"""Whether what is served is what decoding for real says: a sample of the hits is decoded again."""

from __future__ import annotations

from dataclasses import dataclass

from .interval import Interval, wilson

DEFAULT_EVERY = 50
DEFAULT_TARGET = 0.95


@dataclass(slots=True)
class Audit:
    """The audits of one question.

    Attributes
    ----------
    target
        Share of served answers that have to agree.
    agreed, audited
        Of hits that were decoded again.
    """

    target: float = DEFAULT_TARGET
    agreed: int = 0
    audited: int = 0

    def saw(self, *, agreed: bool) -> None:
        """A hit was decoded again."""
        self.audited += 1
        self.agreed += agreed

    @property
    def false_accepts(self) -> int:
        """Served answers that decoding for real contradicted, of those audited."""
        return self.audited - self.agreed

    def interval(self) -> Interval:
        """95 % interval of the precision."""
        return wilson(self.agreed, self.audited)

    @property
    def has_failed(self) -> bool:
        """Whether the precision is under its target, as far as chance can be ruled out at 95 %."""
        return self.audited > 0 and self.interval().high < self.target

    def false_accept_share(self) -> float | None:
        """Share of those audited that decoding for real contradicted; None of none."""
        return self.false_accepts / self.audited if self.audited else None

    def verdict(self) -> str:
        """Why the question is out of service, in words."""
        low, high = self.interval()
        return (
            f"{self.false_accepts} of {self.audited} answers that were decoded again differed: precision"
            f" {low:.2f}-{high:.2f}, target {self.target:g}"
        )


@dataclass(slots=True)
class AlikeAudit(Audit):
    """The audits of answers that were served to other words than a question's own.

    Attributes
    ----------
    hits
        Answers that were.
    retired
        Why other words are decoded for real from now on; None: they are not.
    """

    hits: int = 0
    retired: str | None = None

    def judged(self, *, agreed: bool) -> str | None:
        """One was decoded for real; why other words are out of service from now on, or None."""
        self.saw(agreed=agreed)
        if self.retired is not None or not self.has_failed:
            return None
        self.retired = self.verdict()
        return self.retired
