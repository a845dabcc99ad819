"""A query or a turn that is being answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .chain import Head
from .hold import Hold
from .session import Session

Mode = Literal["query", "turn"]


@dataclass(slots=True, eq=False)
class Use:
    """What a request needs of its session, fixed when it begins.

    Attributes
    ----------
    data_version
        What it is answered on, whatever happens to the session meanwhile.
    token_ids
        What the session holds at that version; not to be changed.
    salt
        The cache salt of the request.
    hold
        What the scheduler is told.
    cancel
        Ends the request in the engine; set by who runs it.
    question_ids, is_chat
        What is asked, set once it is known; messages or not.
    """

    session: Session
    mode: Mode
    data_version: int
    head: Head
    token_ids: Sequence[int]
    salt: str
    hold: Hold
    cancel: Callable[[], None] | None = None
    question_ids: Sequence[int] = ()
    is_chat: bool = False
    is_ended: bool = False
    began: float = field(default_factory=time.perf_counter)
    first_token_ms: float | None = None

    def saw_token(self) -> None:
        """The first token has come, now or before."""
        if self.first_token_ms is None:
            self.first_token_ms = 1e3 * (time.perf_counter() - self.began)


@dataclass(frozen=True, slots=True)
class Answer:
    """How the engine answered.

    Attributes
    ----------
    stopped_by
        The token id or string that ended it; None: its length.
    aborted
        It was cut off, and does not count.
    scheduler
        What the scheduler says about the session, if anything.
    """

    token_ids: Sequence[int]
    text: str
    stopped_by: int | str | None
    aborted: bool
    prompt_tokens: int
    cached_tokens: int
    scheduler: dict[str, Any] | None
