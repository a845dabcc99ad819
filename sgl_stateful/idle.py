"""Idle time: when no caller's request has been in flight for a while, and the server's own prompts that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from sgl_stateful.directive import Directive
from sgl_stateful.engine_port import EnginePort, PrefillResult

_STEP_TOKENS = 256  # of one request: a caller's own waits for one such step at most
_IDLE_S = 0.5  # without callers' requests before a step begins
_POLL_S = 0.05


class ServerClosing(Exception):
    """The server shuts down: no request of its own may begin any more."""


class Prefilled(NamedTuple):
    """What became of a prompt: the tokens that the engine computed, over all steps, and the result of the last one."""

    computed_tokens: int
    result: PrefillResult


class IdleTime:
    """Idle time as one user of it sees it; belongs to the event loop.

    Parameters
    ----------
    idle_s
        Without callers' requests for so long, the server is idle.
    """

    def __init__(self, engine: EnginePort, *, idle_s: float = _IDLE_S) -> None:
        self._engine = engine
        self._idle_s = idle_s
        self._since: float | None = None  # as far as was looked

    def interrupt(self) -> None:
        """A caller's request has been served, which may have come and gone between two looks."""
        self._since = None

    async def wait(self) -> None:
        """Wait until no caller's request has been seen in flight for a while.

        Raises
        ------
        ServerClosing
        """
        loop = asyncio.get_running_loop()
        while not self._engine.is_closing():
            if self._engine.foreground_requests():
                self._since = None
            elif self._since is None:
                self._since = loop.time()
            if self._since is not None and loop.time() - self._since >= self._idle_s:
                return
            await asyncio.sleep(min(_POLL_S, self._idle_s))
        raise ServerClosing

    async def prefill(self, token_ids: Sequence[int], *, salt: str, top_logprobs: int = 0) -> Prefilled:
        """Prefill a prompt as text in idle time, a step at a time, each behind what the radix cache has.

        Raises
        ------
        ServerClosing
        Exception
            As of ``EnginePort.prefill``.
        """
        computed = 0
        for end in range(_STEP_TOKENS, len(token_ids), _STEP_TOKENS):
            computed += (await self._step(token_ids[:end], salt=salt)).computed_tokens
        last = await self._step(token_ids, salt=salt, top_logprobs=top_logprobs)
        return Prefilled(computed + last.computed_tokens, last.result)

    async def serve(
        self, token_ids: Sequence[int], *, salt: str, directive: Directive | None, top_logprobs: int = 0
    ) -> PrefillResult:
        """Run a prompt as one request in idle time; parameters, and what is raised besides, as of `prefill`."""
        await self.wait()
        return await self._engine.prefill(list(token_ids), salt=salt, directive=directive, top_logprobs=top_logprobs)

    async def _step(self, token_ids: Sequence[int], *, salt: str, top_logprobs: int = 0) -> Prefilled:
        result = await self.serve(token_ids, salt=salt, directive=None, top_logprobs=top_logprobs)
        return Prefilled(result.prompt_tokens - result.cached_tokens, result)
