"""What looking for an answer finds, and what is being worked out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from .answers import Answer, AnswerKey, Stored
from .entry import Entry
from .question import Prompt

MissCause = Literal[
    "sampling", "not_ready", "version", "facts", "weights", "retired", "fresh", "unsupported", "evicted"
]
"""Why a registered question is decoded for real.

``sampling``: with other parameters. ``not_ready``: it has no answer. ``version``: its answer is of an earlier version.
``facts``: its answer had other facts. ``weights``: they are being updated. ``retired``: it is out of service.
``fresh``: the caller wants it so. ``unsupported``: more is asked for than the answer, such as log probabilities.
``evicted``: of an entry alone: its KV has left the pool.
"""


class Hit(NamedTuple):
    """An answer that may be served.

    Attributes
    ----------
    staleness_s
        For how long its version has been out of date.
    similarity
        Of what was asked to the question, in other words; None: it was the question.
    """

    entry: Entry
    stored: Stored
    staleness_s: float
    similarity: float | None = None


class Miss(NamedTuple):
    """There is none."""

    cause: MissCause
    entry: Entry


@dataclass(slots=True, eq=False)
class Run:
    """An evaluation, or an audit of a hit.

    Attributes
    ----------
    key
        What its answer depends on.
    since
        When the data came that it is about, seconds; None: not known.
    superseded_at
        When its session went on to another version; None: it has not.
    audits
        The answer that was served; None: it is no audit.
    asked
        What it was served to, where that was not the question itself.
    is_void
        Something that it depends on has changed: its answer is not to be kept.
    """

    entry: Entry
    key: AnswerKey
    began_at: float
    since: float | None = None
    superseded_at: float | None = None
    audits: Answer | None = None
    asked: Prompt | None = None
    is_void: bool = False

    @property
    def session_id(self) -> str:
        """Of which session."""
        return self.entry.session_id
