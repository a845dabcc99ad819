"""What evaluating needs of an engine, and what an engine is given; the SGLang adapter implements it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sgl_stateful.directive import Directive
from sgl_stateful.foreground import Listener
from sgl_stateful.sessions.hold import Hold


@dataclass(frozen=True, slots=True)
class EnginePrompt:
    """A whole prompt.

    Attributes
    ----------
    salt
        Its cache salt.
    hold, directive
        What the scheduler is told of its session, and of facts that are spliced.
    """

    token_ids: Sequence[int]
    salt: str
    hold: Hold | None = None
    directive: Directive | None = None


@dataclass(frozen=True, slots=True)
class Decoded:
    """What an engine has decoded.

    Attributes
    ----------
    label_logprobs
        Of the first token: log probabilities, nats, of the ids that were asked for.
    reply
        As the engine answers callers.
    ms
        From the request to its end.
    pinned_tokens
        What its hold has pinned.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    ms: float
    label_logprobs: Mapping[int, float] = field(default_factory=dict)
    reply: Mapping[str, Any] = field(default_factory=dict)
    pinned_tokens: int = 0


class FlashEngine(Protocol):
    """Decodes requests of the server's own, and knows when callers have some."""

    async def decode(
        self, prompt: EnginePrompt, sampling_params: Mapping[str, Any], *, label_ids: Sequence[int] = ()
    ) -> Decoded:
        """Run one prompt as an ordinary request. Cancelled, it is aborted in the engine.

        Raises
        ------
        RuntimeError
            The engine refuses it, or has ended it.
        """
        ...

    def foreground_requests(self) -> int:
        """Requests of callers now in flight."""
        ...

    def listen(self, listener: Listener) -> None:
        """See ``Foreground.listen``."""
        ...

    def is_closing(self) -> bool:
        """The server is shutting down: no request of its own may begin."""
        ...
