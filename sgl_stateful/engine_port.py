"""What the memory service needs of an engine; the SGLang adapter implements it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sgl_stateful.directive import Directive
from sgl_stateful.sessions.hold import Hold


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """What one internal request did.

    ``top_logprobs`` is the distribution of the next token, as far as it was asked for: token id to log probability.
    ``scheduler`` is what the scheduler reports about the directive and, under ``session``, about the hold.
    """

    prompt_tokens: int
    cached_tokens: int
    scheduler: Mapping[str, Any]
    top_logprobs: Mapping[int, float] = field(default_factory=dict)


class EnginePort(Protocol):
    """Runs prompts of the server's own, and control calls."""

    async def prefill(
        self,
        token_ids: Sequence[int],
        *,
        salt: str,
        directive: Directive | None,
        top_logprobs: int = 0,
        hold: Hold | None = None,
    ) -> PrefillResult:
        """Prefill ``token_ids`` under the cache salt ``salt``; with ``top_logprobs`` also look at the next token.

        ``hold`` makes it a request of a session; the result's ``scheduler`` then has a ``session``.

        Raises
        ------
        Exception
            Whatever the engine raises for a request that it cannot serve.
        """
        ...

    async def control(self, op: str, payload: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """A control call to the scheduler."""
        ...

    def is_closing(self) -> bool:
        """The server is shutting down: it waits for requests in flight, and no new ones of its own may begin."""
        ...

    def foreground_requests(self) -> int:
        """Requests of callers now in flight."""
        ...
