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
    InvalidFact,
    VersionConflict,
)
from memstore.records.base import Applied, Batch, Draft, Insertion, Replacement, RestoredFact
from memstore.records.codec import fact_from_new, is_same, record_body, seal, unsealed
from memstore.records.redis.keys import index_entry, pack_rows
from memstore.types import Fact, FactId, OwnerId

_NO_SEAL = "-"


class Present(NamedTuple):
    """A fact that a batch is about, as it was read."""

    fact: Fact
    seal: str
    """What its record starts with as long as it is the same."""


class Request(NamedTuple):
    """A batch on its way to the server."""

    arguments: list[bytes | str | int]
    drafts: list[Fact]
    """With a seq of 0 until the server assigns one."""


def present(where: str, owner: OwnerId, fact_id: FactId, record: bytes) -> Present:
    """Return a record as it was read."""
    return Present(unsealed(where, owner, fact_id, record), _seal_of(record.decode()))


def touched(batch: Batch) -> list[FactId]:
    """Return the facts that have to be read before `batch` can be sent."""
    replaced = [replacement.expected.id for replacement in batch.replacements]
    return list(dict.fromkeys([*(fact.id for fact in batch.present), *batch.removals, *replaced]))


def request(owner: OwnerId, batch: Batch, read: Mapping[FactId, Present], *, now: float, keys_before: float) -> Request:
    """Return what `apply.lua` takes from the idempotency key on; raise `UnicodeEncodeError` on what is no text.

    `read` is what there is of the facts that `touched` names.
    """
    drafts = [
        dataclasses.replace(
            fact_from_new(owner, str(uuid_utils.uuid7()), draft.fact, event_at=draft.event_at, now=now),
            supersedes=draft.supersedes,
        )
        for draft in batch.drafts
    ]
    key = batch.idempotency
    arguments: list[bytes | str | int] = ["", ""] if key is None else [key.key, key.digest]
    arguments.append(repr(keys_before))
    arguments.append("" if batch.expired_by is None else repr(float(batch.expired_by)))
    removals = [fact_id for fact_id in dict.fromkeys(batch.removals) if fact_id in read]
    arguments += [len(batch.present), len(removals), len(batch.replacements), len(drafts)]
    for fact in batch.present:
        arguments += [fact.id, _expected_seal(fact, read)]
    for fact_id in removals:
        arguments += [fact_id, read[fact_id].seal]
    latest = dict(read)
    for replacement in batch.replacements:
        arguments += _replacement(replacement, latest)
    for fact, draft in zip(drafts, batch.drafts, strict=True):
        arguments += _draft(fact, draft)
    return Request(arguments, drafts)


def _replacement(new: Replacement, latest: dict[FactId, Present]) -> list[bytes | str | int]:
    """Return one replacement, after which `latest` has the fact as it will be."""
    fact = new.fact
    assert (fact.id, fact.seq) == (new.expected.id, new.expected.seq), "the next state of another fact"
    rows = b"" if new.vectors is None else pack_rows(new.vectors)
    body = record_body(fact)
    expected = _expected_seal(new.expected, latest)
    latest[fact.id] = Present(fact, _seal_of(seal(fact.seq, body)))
    return [fact.id, expected, *index_entry(fact), body, rows, latest[fact.id].seal]


def _expected_seal(fact: Fact, read: Mapping[FactId, Present]) -> str:
    """Return the seal of a fact that is as expected, or what no record starts with."""
    found = read.get(fact.id)
    return found.seal if found is not None and is_same(found.fact, fact) else _NO_SEAL


def _seal_of(record: str) -> str:
    return record[: record.index(":", record.index(":") + 1) + 1]


def _draft(fact: Fact, draft: Draft) -> list[bytes | str | int]:
    return [fact.id, draft.supersedes or "", *index_entry(fact), record_body(fact), pack_rows(draft.vectors), ""]


def restoration(restored: Sequence[RestoredFact]) -> Request:
    """Return what `apply.lua` takes from the idempotency key on, for facts that have their ids."""
    facts = [dataclasses.replace(one.fact, seq=0) for one in restored]
    arguments: list[bytes | str | int] = ["", "", "", "", 0, 0, 0, len(facts)]
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
    read: Mapping[FactId, Present],
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
    if verdict == "shorter":
        raise VersionConflict(f"fact {detail!r} says the same, and does not stay as long")
    if verdict == "duplicate":
        raise DuplicateFact(detail)
    if verdict == "embedder":
        raise EmbedderMismatch(stored=detail, offered=embedder)
    if verdict == "held":
        raise InvalidFact(f"the id {detail!r} is another owner's: ids are unique over all owners")
    if verdict == "key-conflict":
        raise IdempotencyConflict(batch.idempotency.key if batch.idempotency else "")
    if verdict == "gone":
        raise FactNotFound(detail)
    insertions, removed = [], []
    drafts = {fact.id: fact for fact in sent.drafts}
    words = iter(reply[1:])
    for verb in words:
        if verb == b"removed":
            removed.append(read[FactId(next(words).decode())].fact)
        elif verb == b"created":
            seq, fact_id = int(next(words)), next(words).decode()
            insertions.append(Insertion(dataclasses.replace(drafts[FactId(fact_id)], seq=seq), created=True))
        else:
            fact_id, record = next(words).decode(), next(words)
            insertions.append(Insertion(unsealed(where, owner, fact_id, record), created=False))
    return Applied(insertions, removed, replayed=verdict == "replayed")
