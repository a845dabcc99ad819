"""Stores in which bytes were flipped, cut off or moved: what they serve is what was stored, or they refuse by name."""

import random
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from bigrams import BigramEmbedder
from redis_server import RedisServer

from memstore import Fact, FactNotFound, FeedGap, MemStore, MemStoreError, NewFact, StoreError
from memstore.records.sqlite import FILE_NAME
from memstore.searchable import vectors_name

EMBEDDER = BigramEmbedder(16)
OWNERS = ("ana", "a:b")
FACTS = 12
# Of the problems that a repair leaves, the one that the next search mends.
LEFT_TO_SEARCH = "missing-vector"


def fill(location: str) -> dict[str, dict[str, Fact]]:
    """Fill a store, and return every fact by owner and id, former versions under `id:version`."""
    with MemStore(location, embedder=EMBEDDER) as store:
        for owner in OWNERS:
            facts = store.add_many(
                owner,
                [NewFact(f"locker {n} of {owner}", f"D{n % 2}", "Ana", "2023-05-08", {"n": n}) for n in range(FACTS)],
                idempotency_key="key",
            )
            store.update(owner, facts[0].id, text=f"cello of {owner}")
            store.update(owner, facts[1].id, metadata={"tag": owner}, expires_at=2.0**40)
            store.supersede(owner, facts[2].id, f"鍵 of {owner}")
            store.delete(owner, facts[3].id)
        known: dict[str, dict[str, Fact]] = {owner: {} for owner in OWNERS}
        for owner in OWNERS:
            for fact in store.list(owner, superseded=True):
                for version in store.history(owner, fact.id):
                    known[owner][f"{version.id}:{version.version}"] = version
    return known


def served(store: MemStore, owner: str, known: dict[str, Fact]) -> list[Callable[[], list[Fact]]]:
    ids = sorted({fact.id for fact in known.values()})
    return [
        lambda: store.list(owner, superseded=True),
        lambda: store.list(owner, stream="D1"),
        lambda: store.get_many(owner, ids),
        *(partial(history, store, owner, fact_id) for fact_id in ids[:4]),
        lambda: [hit.fact for hit in store.search(owner, "cello of", k=50)],
        lambda: [hit.fact for hit in store.search(owner, "locker 7", k=50, mode="hybrid", where={"speaker": "Ana"})],
        lambda: store.add_many(owner, [NewFact(f"locker 5 of {owner}", "D1", "Ana", "2023-05-08", {"n": 5})]),
    ]


def history(store: MemStore, owner: str, fact_id: str) -> list[Fact]:
    try:
        return store.history(owner, fact_id)
    except FactNotFound:
        # Set aside.
        return []


def is_exact(facts: list[Fact], known: dict[str, Fact], owner: str) -> bool:
    """Return whether each is what was stored: but for a fact that was lost and then added again."""
    return all(
        fact == known.get(f"{fact.id}:{fact.version}")
        or (fact.text == f"locker 5 of {owner}" and fact.owner == owner and fact.metadata == {"n": 5})
        for fact in facts
    )


def use(store: MemStore, known: dict[str, dict[str, Fact]]) -> int:
    """Read everything; return how often that was refused."""
    refusals = 0
    for owner in OWNERS:
        for call in served(store, owner, known[owner]):
            try:
                facts = call()
            except StoreError:
                refusals += 1
                continue
            assert is_exact(facts, known[owner], owner)
        for ask in (store.count, store.stats, store.epoch, lambda owner: store.changes(0, owner=owner)):
            try:
                ask(owner)
            except FeedGap:
                # What a repair leaves of a damaged feed.
                continue
            except StoreError:
                refusals += 1
    return refusals


def survives(location: str, known: dict[str, dict[str, Fact]]) -> str:
    """Use a damaged store, repair it, and use it again; return how it went."""
    try:
        store = MemStore(location, embedder=EMBEDDER)
    except MemStoreError:
        return "refused"
    arguments: dict[str, Any] = {"embedder": vectors_name(EMBEDDER), "dimension": EMBEDDER.dimension}
    with store:
        refusals = use(store, known)
        try:
            problems = store.records.check(**arguments, repair=True)
        except StoreError:
            return "beyond repair"
        if any(not problem.repaired and problem.kind != LEFT_TO_SEARCH for problem in problems):
            use(store, known)
            return "repaired in part"
    with MemStore(location, embedder=EMBEDDER) as mended:
        assert use(mended, known) == 0, problems
        assert mended.records.check(**arguments, repair=False) == [], problems
        for owner in OWNERS:
            new = mended.add(owner, f"new of {owner}")
            current = mended.list(owner)
            assert new in current
            hits = mended.search(owner, new.text, k=50)
            assert sorted(hit.fact.seq for hit in hits) == [fact.seq for fact in current]
            mended.delete(owner, new.id)
    return "repaired" if problems or refusals else "unharmed"


# ---- SQLite ----


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    in_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=in_memory if in_memory.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def sqlite_store(directory: Path) -> tuple[bytes, dict[str, dict[str, Fact]]]:
    known = fill(str(directory / "sound"))
    return (directory / "sound" / FILE_NAME).read_bytes(), known


def damaged(data: bytes, chance: random.Random) -> tuple[str, bytes]:
    page, pages = 4096, len(data) // 4096
    mutable = bytearray(data)
    kind = chance.choice(["flip", "flip", "flip", "digit", "zeros", "cut", "copy"])
    if kind == "flip":
        for _ in range(chance.choice([1, 1, 2, 8])):
            mutable[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif kind == "digit":
        # In text that reads the same way: seqs, versions, checksums, ids.
        places = [place for place, byte in enumerate(data) if chr(byte).isalnum() and byte < 128]
        place = chance.choice(places)
        mutable[place] = ord(chance.choice("0123456789abcdef"))
    elif kind == "zeros":
        start = chance.randrange(len(data))
        mutable[start : start + chance.choice([4, 64, page])] = bytes(
            len(mutable[start : start + chance.choice([4, 64, page])])
        )
    elif kind == "cut":
        del mutable[chance.choice([chance.randrange(len(data)), chance.randrange(pages) * page]) :]
    else:
        source, target = (chance.randrange(pages) * page for _ in range(2))
        mutable[target : target + page] = data[source : source + page]
    return kind, bytes(mutable)


@pytest.mark.parametrize("part", range(8))
def test_a_damaged_file_serves_nothing_but_what_was_stored(
    part: int, directory: Path, sqlite_store: tuple[bytes, dict[str, dict[str, Fact]]]
) -> None:
    data, known = sqlite_store
    outcomes, wrong = [], []
    for number in range(50 * part, 50 * part + 50):
        kind, mutated = damaged(data, random.Random(number))
        place = directory / str(number)
        place.mkdir()
        (place / FILE_NAME).write_bytes(mutated)
        try:
            outcomes.append(survives(str(place), known))
        except Exception as error:
            wrong.append(f"{number} ({kind}): {type(error).__name__}: {error}"[:600])
    assert not wrong, "\n".join(wrong)
    assert len(set(outcomes)) > 1, outcomes


# ---- Redis ----


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with redis_server.client() as opened:
        yield opened


def flipped(value: bytes, chance: random.Random) -> bytes:
    mutable = bytearray(value or b"x")
    kind = chance.choice(["flip", "digit", "cut", "grow"])
    place = chance.randrange(len(mutable))
    if kind == "flip":
        mutable[place] ^= 1 << chance.randrange(8)
    elif kind == "digit":
        mutable[place] = ord(chance.choice("0123456789abcdef"))
    elif kind == "cut":
        del mutable[place:]
    else:
        mutable += b"7"
    return bytes(mutable)


def damage(client: redis.Redis, chance: random.Random) -> str:
    """Change one value under the prefix; return what was done."""
    key = chance.choice(sorted(name for name in client.keys("*") if b":request:" not in name))
    kind = client.type(key).decode()
    what = chance.choice(["change", "change", "change", "drop", "delete", "type"])
    if what == "delete":
        client.delete(key)
    elif what == "type":
        client.delete(key)
        client.rpush(key, "x") if chance.random() < 0.5 else client.set(key, "x")
    elif kind == "hash":
        field = chance.choice(sorted(client.hkeys(key)))
        if what == "drop":
            client.hdel(key, field)
        elif chance.random() < 0.2:
            value = client.hget(key, field)
            client.hdel(key, field)
            client.hset(key, flipped(field, chance), value)
        elif chance.random() < 0.2:
            client.hset(key, field, client.hget(key, chance.choice(sorted(client.hkeys(key)))))
        else:
            client.hset(key, field, flipped(client.hget(key, field), chance))
    elif kind == "zset":
        member, score = chance.choice(client.zrange(key, 0, -1, withscores=True))
        if what == "drop":
            client.zrem(key, member)
        elif chance.random() < 0.4:
            client.zadd(key, {flipped(member, chance): score})
        else:
            client.zadd(key, {member: chance.choice([score + 1, score - 1, 0, -5, 0.5, 1e300])})
    elif kind == "string":
        client.set(key, flipped(client.get(key), chance))
    else:
        position, entry = chance.choice(client.xrange(key))
        client.xdel(key, position)
        if what == "change":
            field = chance.choice(sorted(entry))
            client.delete(key)
            client.xadd(key, {**entry, field: flipped(entry[field], chance)}, id=position)
    return f"{what} of {key.decode()}, a {kind}"


@pytest.mark.parametrize("part", range(4))
def test_damaged_values_serve_nothing_but_what_was_stored(part: int, redis_url: str, client: redis.Redis) -> None:
    known = fill(redis_url)
    sound = {key: client.dump(key) for key in client.keys("*")}
    outcomes, wrong = [], []
    for number in range(50 * part, 50 * part + 50):
        client.flushall()
        for key, dumped in sound.items():
            client.restore(key, 0, dumped)
        done = damage(client, random.Random(number))
        try:
            outcomes.append(survives(redis_url, known))
        except Exception as error:
            wrong.append(f"{number} ({done}): {type(error).__name__}: {error}"[:600])
    assert not wrong, "\n".join(wrong)
    assert len(set(outcomes)) > 1, outcomes
