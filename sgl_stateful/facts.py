"""Adding, changing and removing facts, with the KV that follows from them.

The records first: what has been stored is answered as stored, and KV that cannot be dropped now is dropped later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

from memstore import (
    Addition,
    BlobStoreError,
    ChangeKind,
    EncodingId,
    Fact,
    FactId,
    InvalidInput,
    MemStore,
    NewFact,
    PurgeReceipt,
)
from memstore.validation import validate_owner
from sgl_stateful.feed import OwnChanges, nobody_cares
from sgl_stateful.forgetting import Forgetting, Gone
from sgl_stateful.prompt import Tokenizer, render
from sgl_stateful.served_kv import ServedKV
from sgl_stateful.threads import StoreThreads

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FEW = 32  # facts that are embedded in no time


class Facts:
    """The facts of one server; to be used on its event loop.

    Parameters
    ----------
    threads
        Where the store is waited for.
    max_tokens
        A longer fact is refused.
    notify
        Lets the encoder look at an owner.
    arena
        What the scheduler has in memory.
    changed
        Told of an owner's fact that was changed or is gone, as soon as it is; None: of new ones.
    """

    def __init__(
        self,
        store: MemStore,
        *,
        threads: StoreThreads,
        tokenizer: Tokenizer,
        max_tokens: int,
        own: OwnChanges,
        forgetting: Forgetting,
        notify: Callable[[str], None],
        arena: ServedKV,
        changed: Callable[[str, str | None], None] = nobody_cares,
    ) -> None:
        self._store = store
        self._threads = threads
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._own = own
        self._forgetting = forgetting
        self._notify = notify
        self._arena = arena
        self._tell = changed

    async def add(self, owner: str, facts: Sequence[NewFact], *, idempotency_key: str | None = None) -> list[Addition]:
        """Store facts durably; their KV follows in the background.

        Raises
        ------
        InvalidInput, MemStoreError
        """

        def ingest() -> list[Addition]:
            self.check_lengths(facts)
            return self._store.ingest(owner, facts, idempotency_key=idempotency_key)

        threads = self._threads.requests if len(facts) <= _FEW else self._threads.writes
        additions = await self._in_thread(ingest, threads=threads)
        for fact, created, *_ in additions:
            if created:
                self._own.note(ChangeKind.ADDED, fact.id, fact.version)
        self._notify(owner)
        self._tell(owner, None)
        return additions

    async def update(self, owner: str, fact_id: str, fields: Mapping[str, Any]) -> Fact:
        """Give some fields of a fact other values, and make its KV anew."""
        before, served = await self._in_thread(self._look_at, owner, fact_id, fields)
        fact = await self._in_thread(partial(self._store.update, owner, fact_id, **fields))
        if fact.version - before.version in (0, 1):
            self._own.note(ChangeKind.UPDATED, fact.id, fact.version)
        if fact.version != before.version:
            await self._changed(Gone(fact.owner, fact.id, fact.version), served)
        return fact

    async def supersede(self, owner: str, fact_id: str, text: str, fields: Mapping[str, Any]) -> Fact:
        """Put a new fact in the place of another, which becomes history."""
        before, served = await self._in_thread(self._look_at, owner, fact_id, {"time": None, "text": text, **fields})
        fact = await self._in_thread(partial(self._store.supersede, owner, fact_id, text, **fields))
        self._own.note(ChangeKind.SUPERSEDED, before.id, before.version + 1)
        self._own.note(ChangeKind.ADDED, fact.id, fact.version)
        await self._changed(Gone(before.owner, before.id), served)
        return fact

    async def delete(self, owner: str, fact_id: str) -> Fact:
        """Delete a fact with its KV; facts whose encoding saw it are encoded again."""
        _, served = await self._in_thread(self._look_at, owner, fact_id, {})
        fact = await self._in_thread(self._store.delete, owner, fact_id)
        self._own.note(ChangeKind.DELETED, fact.id, fact.version)
        await self._changed(Gone(fact.owner, fact.id), served)
        return fact

    async def purge(self, owner: str) -> PurgeReceipt:
        """Remove everything of an owner from the store and the KV store; the scheduler's memory is the caller's."""

        def purge() -> PurgeReceipt:
            # Counted here: once the records are gone, the feed has the KV dropped as well, and may come first.
            encodings = self._forgetting.drop_owner(validate_owner(owner))
            receipt = self._store.purge(owner)
            return receipt._replace(encodings=encodings + receipt.encodings)

        receipt = await self._in_thread(purge, threads=self._threads.writes)
        self._notify(owner)
        return receipt

    def check_lengths(self, facts: Sequence[NewFact]) -> None:
        """Refuse facts that are too long for the model.

        Raises
        ------
        InvalidInput
            Naming the first one, its length and the limit, in tokens.
        """
        limit = self._max_tokens
        for index, fact in enumerate(facts):
            try:
                rendered = render(fact.text, speaker=fact.speaker, time=fact.time)
                if len(rendered.encode()) <= limit:  # a token is at least one byte
                    continue
            except UnicodeEncodeError:
                continue  # the store refuses it, by name
            length = len(self._tokenizer.encode(rendered, add_special_tokens=False))
            if length > limit:
                raise InvalidInput(f"fact {index} has {length} tokens; the limit of this server is {limit}: split it")

    def _look_at(self, owner: str, fact_id: str, fields: Mapping[str, Any]) -> tuple[Fact, list[EncodingId] | None]:
        """The fact as it is, and its KV's ids where they can be known; refuse ``fields`` that make it too long."""
        fact = self._store.get(owner, FactId(fact_id))
        rendered = {name: fields.get(name, getattr(fact, name)) for name in ("text", "speaker", "time")}
        if fields:
            self.check_lengths([NewFact(**rendered)])
        try:
            return fact, self._arena.of(fact)
        except BlobStoreError:
            return fact, None

    async def _changed(self, gone: Gone, served: Sequence[EncodingId] | None) -> None:
        self._notify(gone.owner)
        self._tell(gone.owner, gone.fact_id)
        others = await self._in_thread(self._forgetting.drop, [gone])
        if served is None:
            await self._arena.sweep()
        else:
            await self._arena.drop([*served, *others])

    async def _in_thread(self, call: Callable[..., T], *args: Any, threads: Executor | None = None) -> T:
        on = threads or self._threads.requests
        return await asyncio.get_running_loop().run_in_executor(on, partial(call, *args))
