"""An `EnginePort` that remembers prompts by salt and pins by session, as the scheduler does; without a model."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sgl_stateful.directive import Directive
from sgl_stateful.engine_port import PrefillResult
from sgl_stateful.foreground import Foreground
from sgl_stateful.sessions.hold import Hold

POOL_TOKENS = 100_000


class Sent(NamedTuple):
    salt: str
    token_ids: tuple[int, ...]
    hold: Hold | None


class PinningEngine:
    """Prefills at once.

    Attributes
    ----------
    failing
        How many of the next prefills raise.
    gate
        While it is set, prefills wait for it; ``at_gate`` tells that one does.
    """

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.pins: dict[str, tuple[int, ...]] = {}
        self.weights: str | None = ""
        self.foreground = Foreground()
        self.lost: dict[str, str] = {}
        self.failing = 0
        self.gate: asyncio.Event | None = None
        self.at_gate = asyncio.Event()
        self._cached: dict[str, set[tuple[int, ...]]] = {}
        self._fences: dict[str, int] = {}
        self._pinned_at: dict[str, int] = {}

    async def prefill(
        self,
        token_ids: Sequence[int],
        *,
        salt: str,
        directive: Directive | None,
        top_logprobs: int = 0,
        hold: Hold | None = None,
    ) -> PrefillResult:
        ids = tuple(token_ids)
        self.sent.append(Sent(salt, ids, hold))
        await asyncio.sleep(0)
        if self.gate is not None:
            self.at_gate.set()
            await self.gate.wait()
        if self.failing:
            self.failing -= 1
            raise RuntimeError("the engine is out of order")
        return PrefillResult(len(ids), self.answer(ids, salt), {"session": self.held(ids, hold)})

    def answer(self, ids: tuple[int, ...], salt: str) -> int:
        """Have the tokens cached; returns how many were."""
        tree = self._cached.setdefault(salt, set())
        cached = max((n for n in range(len(ids)) if ids[:n] in tree), default=0)
        tree.update(ids[:n] for n in range(len(ids) + 1))
        return cached

    def held(self, ids: tuple[int, ...], hold: Hold | None) -> dict[str, Any] | None:
        """Pin what the request says, unless its session was pinned or unpinned by what is newer."""
        if hold is None:
            return None
        lost = None
        name = hold.pin_name
        latest = max(self._fences.get(hold.session_id, 0), self._fences.get(name, 0), self._pinned_at.get(name, 0))
        if hold.pin and hold.fence >= latest:
            lost = self.lost.pop(name, None)
            self._pinned_at[name] = hold.fence
            self.pins[name] = ids if hold.tokens is None else ids[: hold.tokens]
        return {"pinned_tokens": len(self.pins.get(name, ())), "lost": lost}

    def flush(self) -> None:
        """Lose everything."""
        self._cached.clear()
        self.lost |= dict.fromkeys(self.pins, "flushed")
        self.pins.clear()

    async def control(self, op: str, payload: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        await asyncio.sleep(0)
        body = payload or {}
        if op == "unpin":
            for name, fence in body["session_ids"].items():
                self._fences[name] = max(fence, self._fences.get(name, 0))
                for one in [one for one in self.pins if one == name or one.startswith(f"{name}/")]:
                    if self._pinned_at.get(one, 0) < fence:
                        self.pins.pop(one)
                self.lost.pop(name, None)
            return {}
        if op == "snapshot_fence":
            self.weights = body["weights"]
            return {}
        if op == "cached":
            ids, tree = tuple(body["token_ids"]), self._cached.get(body["salt"], set())
            return {"tokens": max((n for n in range(len(ids) + 1) if ids[:n] in tree), default=0)}
        assert op == "pins", op
        pinned = sum(map(len, self.pins.values()))
        return {
            "pins": {name: len(self.pins[name]) for name in body["session_ids"] if name in self.pins},
            "lost": {name: self.lost[name] for name in body["session_ids"] if name in self.lost},
            "pinned_cells": pinned,
            "evictable": 0,
            "available": POOL_TOKENS - pinned,
        }

    def is_closing(self) -> bool:
        return False

    def foreground_requests(self) -> int:
        return self.foreground.count
