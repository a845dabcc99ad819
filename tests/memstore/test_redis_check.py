"""Damage in a Redis record store: found, named, and mended without losing anything else."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import redis
from redis_facts import ANA, BO, EMBEDDER, add, drafts, opened, texts_of, vector
from redis_server import RedisServer

from memstore.errors import StoreDamaged
from memstore.records import Batch, Problem, Replacement
from memstore.records.codec import record_body, seal
from memstore.records.redis import RedisRecords
from memstore.types import ChangeKind, Fact, FactState

OWN = "memstore:o:YW5h:"


@pytest.fixture
def records(redis_url: str) -> Iterator[RedisRecords]:
    store = opened(redis_url)
    yield store
    store.close()


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with redis_server.client() as opened_client:
        yield opened_client


@pytest.fixture
def facts(records: RedisRecords) -> list[Fact]:
    """Three current facts, of which the second has a former version, and a superseded one."""
    one, two, three, old = add(records, ANA, "one", "two", "three", "old", stream="s")
    records.apply(ANA, Batch(drafts=drafts("soon", expires_at=9000.0)), embedder=EMBEDDER)
    changed = replace(two, text="two and a half", version=2)
    gone = replace(old, state=FactState.SUPERSEDED, version=2)
    batch = Batch(replacements=[Replacement(changed, two, vector("2")), Replacement(gone, old)])
    records.apply(ANA, batch, embedder=EMBEDDER)
    add(records, BO, "theirs")
    return [one, changed, three, gone]


def check(records: RedisRecords, *, repair: bool = False) -> list[Problem]:
    return records.check(embedder=EMBEDDER, dimension=4, repair=repair)


def test_a_sound_store_has_no_problems(records: RedisRecords, facts: list[Fact]) -> None:
    assert check(records) == []
    assert check(records, repair=True) == []


def test_ids_are_those_of_the_facts_that_there_are(
    records: RedisRecords, client: redis.Redis, facts: list[Fact]
) -> None:
    one, two, three, _ = facts
    assert client.hlen("memstore:ids") == 6
    client.hdel("memstore:ids", one.id)
    client.hset("memstore:ids", two.id, "Ym8")
    client.hset("memstore:ids", "stray", "YW5h")
    client.hset("memstore:ids", "of-nobody", "Y2Fy")
    client.hset("memstore:ids", "no-owner", b"\xff")
    expected = {one.id: ANA, two.id: ANA, "stray": ANA, "of-nobody": "car", "no-owner": None}
    found = check(records)
    assert {problem.kind for problem in found} == {"wrong-index"}
    # What is kept for another owner is wrong from both sides.
    assert {(problem.fact_id, problem.owner) for problem in found} == {*expected.items(), (two.id, BO)}
    assert not any(problem.repaired for problem in found)
    mended = check(records, repair=True)
    assert {problem.fact_id: problem.owner for problem in mended} == expected
    assert all(problem.repaired for problem in mended)
    assert check(records) == []
    assert records.held_by_others(BO, [one.id, two.id, three.id]) == [one.id, two.id, three.id]
    client.delete("memstore:ids")
    check(records, repair=True)
    assert client.hlen("memstore:ids") == 6
    assert texts_of(records, ANA) == ["one", "two and a half", "three", "soon"]


@pytest.mark.parametrize("cut", [-1, 50, 3])
def test_a_damaged_record_is_named_and_set_aside(
    records: RedisRecords, client: redis.Redis, facts: list[Fact], cut: int
) -> None:
    one = facts[0]
    damaged = bytearray(client.hget(f"{OWN}records", one.id) or b"")
    damaged = damaged[:cut] if cut > 0 else damaged.replace(b'"one"', b'"two"')
    client.hset(f"{OWN}records", one.id, bytes(damaged))
    for read in (
        lambda: records.get_many(ANA, [one.id]),
        lambda: records.get_by_seqs(ANA, [one.seq]),
        lambda: records.page(ANA, stream="s", limit=9, after_seq=0),
        lambda: records.apply(ANA, Batch(removals=[one.id]), embedder=EMBEDDER),
        lambda: records.apply(ANA, Batch(drafts=[*drafts("new"), *drafts("one", stream="s")]), embedder=EMBEDDER),
    ):
        with pytest.raises(StoreDamaged, match=one.id):
            read()
    assert "new" not in {fact.text for fact in records.page(ANA, stream="", limit=9, after_seq=0)}
    expected = ("damaged-record", ANA, one.id)
    assert [(p[:3], p.repaired) for p in check(records)] == [(expected, False)]
    position = records.last_position()
    assert [(p[:3], p.repaired) for p in check(records, repair=True)] == [(expected, True)]
    assert check(records) == []
    assert client.hget(f"{OWN}damaged", one.id) == damaged
    assert texts_of(records, ANA) == ["two and a half", "three", "soon"]
    [change] = records.changes(position)
    assert (change.kind, change.fact_id, change.seq) == (ChangeKind.DELETED, one.id, one.seq)
    assert records.vectors_of(ANA, [one.seq], embedder=EMBEDDER, dimension=4).seqs.tolist() == []
    [again] = add(records, ANA, "one", stream="s")
    assert again.seq > one.seq
    assert records.purge(ANA).facts == 6


Damage = Callable[[redis.Redis, list[Fact]], object]
DAMAGES: dict[str, Damage] = {
    "index lost": lambda client, facts: client.hdel(f"{OWN}index", facts[1].id),
    "index garbled": lambda client, facts: client.hset(f"{OWN}index", facts[1].id, "garbage"),
    "index of an older version": lambda client, facts: client.hset(
        f"{OWN}index", facts[1].id, (client.hget(f"{OWN}index", facts[0].id) or b"")
    ),
    "not listed": lambda client, facts: client.zrem(f"{OWN}current", facts[0].id),
    "listed twice": lambda client, facts: client.zadd(f"{OWN}superseded", {facts[0].id: facts[0].seq}),
    "wrong state": lambda client, facts: client.zadd(f"{OWN}current", {facts[3].id: facts[3].seq}),
    "wrong seq": lambda client, facts: client.zadd(f"{OWN}current", {facts[0].id: 77}),
    "wrong expiry": lambda client, facts: client.zadd(f"{OWN}expiry", {facts[0].id: 1.0}),
    "expiry lost": lambda client, facts: client.delete(f"{OWN}expiry"),
    "streams lost": lambda client, facts: client.delete(f"{OWN}streams"),
    "stray in streams": lambda client, facts: client.zadd(
        f"{OWN}streams", {f"c:{'0' * 32}:{facts[0].seq:016d}:{facts[0].id}": 0}
    ),
    "digests lost": lambda client, facts: client.delete(f"{OWN}digests"),
    "stray digest": lambda client, facts: client.hset(f"{OWN}digests", "00ff", facts[0].id),
    "digest of nobody": lambda client, facts: client.hset(f"{OWN}digests", "00ff", "nobody"),
    "orphan": lambda client, facts: client.zadd(f"{OWN}current", {"nobody": 5}),
    "owner not listed": lambda client, facts: client.zrem("memstore:owners", "ana"),
    "owner without facts": lambda client, facts: client.zadd("memstore:owners", {"nobody": 0}),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_what_leads_to_a_fact_is_made_anew_from_its_record(
    records: RedisRecords, client: redis.Redis, facts: list[Fact], damage: Damage
) -> None:
    names = [f"{OWN}{name}" for name in ("current", "superseded", "streams", "expiry")]
    sound = [sorted(client.zrange(name, 0, -1, withscores=True)) for name in names]
    hashes = [client.hgetall(f"{OWN}{name}") for name in ("records", "index", "digests", "history")]
    owners = records.owners()
    damage(client, facts)
    problems = check(records)
    assert "wrong-index" in {p.kind for p in problems}
    assert not any(p.repaired for p in problems)
    # What else there was followed from it.
    assert {(p.kind, p.repaired) for p in check(records, repair=True)} == {("wrong-index", True)}
    assert check(records) == []
    assert [sorted(client.zrange(name, 0, -1, withscores=True)) for name in names] == sound
    assert [client.hgetall(f"{OWN}{name}") for name in ("records", "index", "digests", "history")] == hashes
    assert records.owners() == owners


def test_vectors_that_are_not_right_are_removed_to_be_made_anew(
    records: RedisRecords, client: redis.Redis, facts: list[Fact]
) -> None:
    one, two, three, _ = facts
    [key] = client.keys(f"{OWN}vectors:*")
    sound = client.hgetall(key)
    client.hset(key, str(one.seq), (sound[b"%d" % one.seq])[:-1] + b"\0")
    client.hset(key, str(two.seq), sound[b"%d" % three.seq])
    client.hdel(key, str(three.seq))
    client.hset(key, "4711", sound[b"%d" % one.seq])
    stored = records.vectors(ANA, embedder=EMBEDDER, dimension=4)
    assert stored.damaged == [one.seq, two.seq, 4711]
    found = {(p.kind, p.fact_id, p.repaired) for p in check(records)}
    assert found == {
        ("damaged-vector", one.id, False),
        ("damaged-vector", two.id, False),
        ("missing-vector", three.id, False),
        ("orphan-vector", None, False),
    }
    check(records, repair=True)
    assert {(p.kind, p.fact_id) for p in check(records)} == {("missing-vector", f.id) for f in (one, two, three)}
    assert records.unindexed(ANA, embedder=EMBEDDER, limit=9) == [one, two, three]


def test_a_damaged_former_version_is_dropped(records: RedisRecords, client: redis.Redis, facts: list[Fact]) -> None:
    two = facts[1]
    client.hset(f"{OWN}history", f"{two.id}:1", "garbage")
    with pytest.raises(StoreDamaged, match=two.id):
        records.history(ANA, two.id)
    assert [p[:3] for p in check(records, repair=True)] == [("damaged-history", ANA, two.id)]
    assert records.history(ANA, two.id) == []
    assert check(records) == []


def test_of_two_records_with_the_same_content_neither_is_lost(
    records: RedisRecords, client: redis.Redis, facts: list[Fact]
) -> None:
    one, _, three, _ = facts
    client.hset(f"{OWN}records", one.id, seal(one.seq, record_body(replace(one, text="three"))))
    for repair in (False, True):
        problems = check(records, repair=repair)
        assert [(p.kind, p.fact_id, p.repaired) for p in problems] == [("wrong-index", one.id, False)]
    assert [fact.text for fact in records.get_many(ANA, [one.id, three.id])] == ["three", "three"]


@pytest.mark.parametrize("value", [None, "1", "x"])
@pytest.mark.parametrize("name", ["seq", "position"])
def test_a_counter_never_goes_back(
    records: RedisRecords, client: redis.Redis, facts: list[Fact], name: str, value: str | None
) -> None:
    last = records.changes(0)[-1].position
    largest = max(int(score) for _, score in client.zrange("memstore:o:Ym8:current", 0, -1, withscores=True))
    if value is None:
        client.delete(f"memstore:{name}")
    else:
        client.set(f"memstore:{name}", value)
    assert [p.kind for p in check(records)] == ["wrong-counter"]
    check(records, repair=True)
    assert check(records) == []
    [fact] = add(records, ANA, "next")
    assert fact.seq == largest + 1
    assert records.last_position() == last + 1


def test_a_feed_that_is_ahead_stops_a_write_before_it_begins(
    records: RedisRecords, client: redis.Redis, facts: list[Fact]
) -> None:
    client.set("memstore:position", 1)
    before = client.hgetall(f"{OWN}records")
    with pytest.raises(StoreDamaged, match="repair"):
        add(records, ANA, "next")
    assert client.hgetall(f"{OWN}records") == before
    check(records, repair=True)
    add(records, ANA, "next")
    assert check(records) == []


def test_keys_of_another_program_are_told_and_left(
    records: RedisRecords, client: redis.Redis, facts: list[Fact]
) -> None:
    client.set("memstore:something", "x")
    client.set("memstore:o:!:records", "x")
    client.rpush("memstore:o:Y2FybA:records", "x")
    problems = check(records, repair=True)
    assert [(p.kind, p.owner, p.repaired) for p in problems] == [
        ("foreign-key", None, False),
        ("foreign-key", "carl", False),
        ("foreign-key", None, False),
    ]
    assert client.exists("memstore:something", "memstore:o:!:records", "memstore:o:Y2FybA:records") == 3
