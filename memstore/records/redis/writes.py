"""A batch as the arguments of `apply.lua`, and its reply as facts."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import uuid_utils

from memstore.errors import (
    DuplicateFact,
    EmbedderMismatch,
    FactNotFound,
    IdempotencyConflict,
    StoreDamaged,
    VersionConflict,
)
from memstore.records.base import Applied, Batch, Draft, Insertion, Replacement, RestoredFact
from memstore.records.codec import fact_from_new, record_body, unseal
from memstore.records.redis.keys import index_entry, pack_rows
from memstore.types import Fact, FactId, OwnerId


class Present(NamedTuple):
    """A fact that is about to be removed, as it was read."""

    fact: Fact
    seal: str
    """What its record starts with as long as it is the same."""


class Request(NamedTuple):
    """A batch on its way to the server."""

    arguments: list[bytes | str | int]
    drafts: list[Fact]
    """With a seq of 0 until the server assigns one."""


def unsealed(where: str, owner: OwnerId, fact_id: str, record: bytes | str | None) -> Fact:
    """Return the fact in a stored record; raise `StoreDamaged` where it is not what was written."""
    try:
        text = record.decode() if isinstance(record, bytes) else record
        if text is None:
            raise ValueError("it is missing")
        return unseal(text, owner=owner)
    except (ValueError, TypeError, KeyError) as error:
        raise StoreDamaged(
            f"{where}: the record of fact {fact_id!r} is damaged ({error}): run `memstore verify --repair`, "
            "which sets it aside"
        ) from error


def present(where: str, owner: OwnerId, fact_id: FactId, record: bytes) -> Present:
    """Return a record that is about to be removed."""
    fact = unsealed(where, owner, fact_id, record)
    return Present(fact, record[: record.index(b":", record.index(b":") + 1) + 1].decode())


def request(owner: OwnerId, batch: Batch, removals: Mapping[FactId, Present], *, now: float) -> Request:
    """Return what `apply.lua` takes from the idempotency key on; raise `UnicodeEncodeError` on what is no text."""
    drafts = [
        dataclasses.replace(
            fact_from_new(owner, str(uuid_utils.uuid7()), draft.fact, event_at=draft.event_at, now=now),
            supersedes=draft.supersedes,
        )
        for draft in batch.drafts
    ]
    key = batch.idempotency
    arguments: list[bytes | str | int] = ["", ""] if key is None else [key.key, key.digest]
    arguments += [len(removals), len(batch.replacements), len(drafts)]
    for fact_id, (_, seal) in removals.items():
        arguments += [fact_id, seal]
    for replacement in batch.replacements:
        arguments += _replacement(replacement)
    for fact, draft in zip(drafts, batch.drafts, strict=True):
        arguments += _draft(fact, draft)
    return Request(arguments, drafts)


def _replacement(new: Replacement) -> list[bytes | str | int]:
    rows = b"" if new.vectors is None else pack_rows(new.vectors)
    expected = index_entry(new.expected)
    body = record_body(new.fact)
    return [new.fact.id, expected.version, expected.expires, *index_entry(new.fact), body, rows]


def _draft(fact: Fact, draft: Draft) -> list[bytes | str | int]:
    return [fact.id, draft.supersedes or "", *index_entry(fact), record_body(fact), pack_rows(draft.vectors), ""]


def restoration(restored: Sequence[RestoredFact]) -> Request:
    """Return what `apply.lua` takes from the idempotency key on, for facts that have their ids."""
    facts = [dataclasses.replace(one.fact, seq=0) for one in restored]
    arguments: list[bytes | str | int] = ["", "", 0, 0, len(facts)]
    for fact, (_, history, vectors) in zip(facts, restored, strict=True):
        rows = b"" if vectors is None else pack_rows(vectors)
        arguments += [fact.id, "", *index_entry(fact), record_body(fact), rows, len(history)]
        for former in history:
            arguments += [former.version, record_body(former)]
    return Request(arguments, facts)


def outcome(
    where: str,
    owner: OwnerId,
    sent: Request,
    removals: Mapping[FactId, Present],
    batch: Batch,
    embedder: str,
    reply: Any,
) -> Applied | None:
    """Return what the batch did, None where the facts to be removed have to be read again; raise what refused it."""
    verdict = reply[0].decode()
    detail = reply[1].decode() if len(reply) > 1 and verdict not in ("ok", "replayed") else ""
    if verdict == "stale":
        return None
    if verdict == "conflict":
        raise VersionConflict(f"fact {detail!r} was changed, or superseded, by another writer at the same time")
    if verdict == "duplicate":
        raise DuplicateFact(detail)
    if verdict == "embedder":
        raise EmbedderMismatch(stored=detail, offered=embedder)
    if verdict == "key-conflict":
        raise IdempotencyConflict(batch.idempotency.key if batch.idempotency else "")
    if verdict == "gone":
        raise FactNotFound(detail)
    insertions, removed = [], []
    drafts = {fact.id: fact for fact in sent.drafts}
    words = iter(reply[1:])
    for verb in words:
        if verb == b"removed":
            removed.append(removals[FactId(next(words).decode())].fact)
        elif verb == b"created":
            seq, fact_id = int(next(words)), next(words).decode()
            insertions.append(Insertion(dataclasses.replace(drafts[FactId(fact_id)], seq=seq), created=True))
        else:
            fact_id, record = next(words).decode(), next(words)
            insertions.append(Insertion(unsealed(where, owner, fact_id, record), created=False))
    return Applied(insertions, removed, replayed=verdict == "replayed")
