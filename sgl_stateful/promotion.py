"""Blocks of facts that come again are prefilled jointly, in idle time; from then on they are exact and cost nothing.

A block is a prompt up to the end of its facts. Spliced, it is an approximation; prefilled under its real ids it is not,
and SGLang's radix cache finds it before anything is spliced. What is worth that is what comes again: blocks are counted
when requests splice them, and the most valuable is prefilled first, by how often it came times its tokens. What is
expected, since a session's registered question has it, need not come twice.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Any

from sgl_stateful.engine_port import EnginePort
from sgl_stateful.idle import IdleTime, ServerClosing

logger = logging.getLogger(__name__)

LEAST_USES = 2  # of a block until it is worth a prefill: what came once may never come again
MOST_BLOCKS = 512  # that are remembered; the one used longest ago is forgotten


@dataclass(frozen=True, slots=True)
class FactBlock:
    """A prompt up to the end of its facts, as its request is cached.

    Attributes
    ----------
    salt
        The request's cache salt; None where the request is cached apart from others in some other way.
    """

    owner: str
    token_ids: array[int]
    salt: str | None = None

    @property
    def key(self) -> bytes:
        """Equal for equal prompts under the same salt."""
        return blake2b(self.token_ids.tobytes(), key=blake2b((self.salt or "").encode()).digest()).digest()


class Event(StrEnum):
    """What is counted: a block was promoted; a request found one whole in the radix cache, or evicted; one failed."""

    PROMOTED = "promoted"
    HIT = "hit"
    EVICTED = "evicted"
    FAILED = "failed"


@dataclass(slots=True)
class _Known:
    block: FactBlock
    uses: int = 0
    is_promoted: bool = False

    @property
    def value(self) -> int:
        return self.uses * len(self.block.token_ids)


class PromotionTable:
    """Which blocks came how often, and which of them have been prefilled; no clock and no engine.

    Parameters
    ----------
    budget_tokens
        Most tokens of promoted blocks at a time. A block that is worth more takes the place of those that are worth
        less; their cells are free for whoever needs them, as those of any prompt are. Zero promotes nothing.
    on_event
        Called for everything that is counted.
    """

    def __init__(self, budget_tokens: int, *, on_event: Callable[[Event], None]) -> None:
        self.budget_tokens = budget_tokens
        self.tokens_prefilled = 0
        self.counts: Counter[Event] = Counter()
        self._on_event = on_event
        self._known: OrderedDict[bytes, _Known] = OrderedDict()

    @property
    def promoted_tokens(self) -> int:
        """Tokens of the blocks that are promoted now."""
        return sum(len(known.block.token_ids) for known in self._known.values() if known.is_promoted)

    @property
    def promoted_blocks(self) -> int:
        """How many are promoted now."""
        return sum(known.is_promoted for known in self._known.values())

    def __len__(self) -> int:
        """Blocks that are remembered."""
        return len(self._known)

    def see(self, block: FactBlock, tier: str) -> None:
        """A request for the block has been served, in the way that its report says."""
        if block.salt is None or tier not in ("spliced", "repaired", "exact") or not self._may_fit(block):
            return
        key = block.key
        known = self._known.setdefault(key, _Known(block))
        self._known.move_to_end(key)
        known.uses += 1
        if known.is_promoted and tier == "exact":
            self._count(Event.HIT)
        elif known.is_promoted:
            known.is_promoted = False
            self._count(Event.EVICTED)
        self._drop_oldest()

    def expect(self, block: FactBlock) -> None:
        """A request for the block is to come: it is worth a prefill before it has."""
        if block.salt is None or not self._may_fit(block):
            return
        known = self._known.setdefault(block.key, _Known(block))
        self._known.move_to_end(block.key)
        known.uses = max(known.uses, LEAST_USES)
        self._drop_oldest()

    def next(self) -> FactBlock | None:
        """The most valuable block that has come often enough and fits, in place of less valuable ones."""
        waiting = [known for known in self._known.values() if not known.is_promoted and known.uses >= LEAST_USES]
        for known in sorted(waiting, key=lambda known: -known.value):
            if self._room_beside(known.value) >= len(known.block.token_ids):
                return known.block
        return None

    def promoted(self, block: FactBlock, *, tokens_prefilled: int) -> None:
        """A block has been prefilled; less valuable ones make room for it."""
        self._count(Event.PROMOTED)
        self.tokens_prefilled += tokens_prefilled
        if (known := self._known.get(block.key)) is None:
            return  # forgotten meanwhile
        known.is_promoted = True
        others = [other for other in self._known.values() if other.is_promoted and other is not known]
        for other in sorted(others, key=lambda other: other.value):
            if self.promoted_tokens <= self.budget_tokens:
                break
            other.is_promoted, other.uses = False, 0

    def give_up(self, block: FactBlock) -> None:
        """A block could not be prefilled: it has to come again as if for the first time."""
        self._count(Event.FAILED)
        self._known.pop(block.key, None)

    def forget(self, owner: str) -> None:
        """Drop everything of an owner."""
        for key in [key for key, known in self._known.items() if known.block.owner == owner]:
            del self._known[key]

    def _drop_oldest(self) -> None:
        while len(self._known) > MOST_BLOCKS:
            self._known.popitem(last=False)

    def _count(self, event: Event) -> None:
        self.counts[event] += 1
        self._on_event(event)

    def _may_fit(self, block: FactBlock) -> bool:
        return 0 < len(block.token_ids) <= self.budget_tokens

    def _room_beside(self, value: int) -> int:
        """Budget that is left beside promoted blocks worth as much or more."""
        kept = (known for known in self._known.values() if known.is_promoted and known.value >= value)
        return self.budget_tokens - sum(len(known.block.token_ids) for known in kept)


class Promoter:
    """Prefills blocks in idle time, in short steps, as ordinary requests of the server's own.

    Parameters
    ----------
    budget_tokens, on_event
        As of `PromotionTable`.
    idle
        None makes its own.
    """

    def __init__(
        self,
        engine: EnginePort,
        *,
        budget_tokens: int,
        on_event: Callable[[Event], None],
        idle: IdleTime | None = None,
    ) -> None:
        self.table = PromotionTable(budget_tokens, on_event=on_event)
        self._engine = engine
        self._idle = idle or IdleTime(engine)
        self._wake = asyncio.Event()

    def see(self, block: FactBlock | None, tier: str) -> None:
        """A request has been served; to be called on the event loop."""
        self._idle.interrupt()
        if block is not None:
            self.table.see(block, tier)
            self._wake.set()

    def expect(self, block: FactBlock) -> None:
        """A request is to come; to be called on the event loop."""
        self.table.expect(block)
        self._wake.set()

    async def run(self) -> None:
        """Promote what is worth it, until the server shuts down; cancel to stop."""
        while not self._engine.is_closing():
            if (block := self.table.next()) is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                assert block.salt is not None, "such a block is never remembered"
                prefilled = await self._idle.prefill(block.token_ids, salt=block.salt)
            except asyncio.CancelledError:
                raise
            except ServerClosing:
                return
            except Exception:
                # A block that stays spliced costs faithfulness; a loop that ends costs that of all later ones.
                logger.exception("prefilling a recurring block of %d tokens failed", len(block.token_ids))
                self.table.give_up(block)
            else:
                self.table.promoted(block, tokens_prefilled=prefilled.computed_tokens)

    def as_dict(self) -> dict[str, Any]:
        """As the status shows it."""
        return {
            "budget_tokens": self.table.budget_tokens,
            "remembered_blocks": len(self.table),
            "promoted_blocks": self.table.promoted_blocks,
            "promoted_tokens": self.table.promoted_tokens,
            "tokens_prefilled": self.table.tokens_prefilled,
            **{event.value: self.table.counts[event] for event in Event},
        }
