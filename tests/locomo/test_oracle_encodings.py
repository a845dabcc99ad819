"""What the oracle works out of a server's KV store, against the server's own addressing and ladders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from locomo.dataset import load
from locomo.errors import OracleError
from locomo.oracle.cases import cases_of, conversations_path
from locomo.oracle.comparison import Difference
from locomo.oracle.encodings import FactVersion, Seen, StoredEncodings, check_context
from locomo.oracle.run import Row
from locomo.oracle.rungs import policies_for_rank, rungs_of
from locomo.oracle.table import failures, record_of
from memstore import Encoding, Fact, FactId, KVBlobs, OwnerId
from sgl_stateful.encoding import parse_ladder
from sgl_stateful.encoding.codec import FactCodec

_CONTEXT = [1, 2, 3]
_OWNER = "ada"


class Letters:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


class Store:
    """A KV store, filled as a server fills it."""

    def __init__(self, folder: Path) -> None:
        self.codec = FactCodec(Letters(), context=_CONTEXT, model_fingerprint="model")
        self.blobs = KVBlobs(folder)
        policies = ["ladder:0+4", "window:2"]
        self.found = StoredEncodings(self.blobs, owner=_OWNER, fingerprint=self.codec.fingerprint, policies=policies)

    def put(self, fact: Fact, policy: str, saw: Sequence[Fact] = (), *, lost: int = 0) -> None:
        """Store an encoding behind ``saw``, of which the first ``lost`` did not fit the prompt."""
        tokens = self.codec.encode_fact(fact)
        pairs = tuple((other.id, other.version) for other in saw)
        seen_ids = [i for other in saw[lost:] for i in self.codec.encode_fact(other).token_ids]
        encoding = Encoding(
            id=self.codec.encoding_id(tokens, policy=policy, saw=pairs, saw_ids=seen_ids),
            owner=OwnerId(_OWNER),
            fact_id=fact.id,
            fact_version=fact.version,
            fingerprint=self.codec.fingerprint,
            policy=policy,
            saw=pairs,
            token_ids=tokens.token_ids,
        )
        kv = torch.zeros(1, len(tokens.token_ids), 1, 2)
        assert self.blobs.put(encoding, kv, kv)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "kv")
    yield made
    made.blobs.close()


@pytest.fixture
def facts() -> list[Fact]:
    return [
        Fact(
            id=FactId(f"f{i}"),
            owner=OwnerId(_OWNER),
            seq=i,
            version=1,
            text=text,
            speaker=None,
            time=None,
            stream="",
            metadata={},
            created_at=0.0,
            updated_at=0.0,
        )
        for i, text in enumerate(["ab", "cde", "f"])
    ]


def ids(text: str) -> tuple[int, ...]:
    return tuple(ord(letter) for letter in text)


def versions(facts: Sequence[Fact]) -> list[FactVersion]:
    return [FactVersion(fact.id, fact.version) for fact in facts]


def test_each_fact_saw_the_context_and_the_facts_in_front(store: Store, facts: list[Fact]) -> None:
    for i, fact in enumerate(facts):
        store.put(fact, "window:2", facts[:i])
    served = store.found.served(versions([facts[2], facts[0]]), "window:2", context=_CONTEXT)
    assert served == [Seen(ids("f\n"), (1, 2, 3, *ids("ab\ncde\n"))), Seen(ids("ab\n"), (1, 2, 3))]
    assert store.found.served(versions(facts), "anchor:4", context=_CONTEXT) == [None, None, None]
    assert store.found.token_ids(versions(facts))[facts[1].id] == ids("cde\n")


def test_a_seen_fact_that_lost_its_encoding_has_its_tokens_from_another_policy(store: Store, facts: list[Fact]) -> None:
    store.put(facts[1], "window:2", facts[:1])
    store.put(facts[0], "window:0")
    (served,) = store.found.served(versions(facts[1:2]), "window:2", context=_CONTEXT)
    assert served == Seen(ids("cde\n"), (1, 2, 3, *ids("ab\n")))


def test_a_prefix_that_was_cut_is_found_by_the_address(store: Store, facts: list[Fact]) -> None:
    store.put(facts[0], "window:2")
    store.put(facts[1], "window:2")
    store.put(facts[2], "window:2", facts[:2], lost=1)
    (served,) = store.found.served(versions(facts[2:]), "window:2", context=_CONTEXT)
    assert served == Seen(ids("f\n"), (1, 2, 3, *ids("cde\n")))


def test_a_ladder_serves_by_rank_and_takes_the_other_rung_where_one_lacks(store: Store, facts: list[Fact]) -> None:
    for fact in facts:
        store.put(fact, "window:0")
    store.put(facts[0], "anchor:4", facts[1:2])
    store.put(facts[1], "anchor:4", facts[:1])
    served = store.found.served(versions([facts[1], facts[0], facts[2]]), "ladder:0+4", context=_CONTEXT)
    assert [None if s is None else s.seen_ids for s in served] == [(1, 2, 3), (1, 2, 3, *ids("cde\n")), (1, 2, 3)]


def test_tokens_that_the_encoding_did_not_see_are_refused(store: Store, facts: list[Fact]) -> None:
    store.put(facts[0], "window:2")
    store.put(facts[2], "window:2", facts[:1], lost=1)
    store.blobs.drop_fact(OwnerId(_OWNER), facts[0].id)
    with pytest.raises(OracleError, match="no encoding any more"):
        store.found.served(versions(facts[2:]), "window:2", context=_CONTEXT)


def test_a_seen_fact_with_other_tokens_than_then_is_refused(store: Store, facts: list[Fact]) -> None:
    store.put(facts[1], "window:2", facts[:1])
    store.put(replace(facts[0], text="ba"), "window:2")
    with pytest.raises(OracleError, match="did not see"):
        store.found.served(versions(facts[1:2]), "window:2", context=_CONTEXT)


def test_the_context_is_checked_against_the_fingerprint(store: Store) -> None:
    check_context(_CONTEXT, fingerprint=store.codec.fingerprint, model_fingerprint="model")
    for context, model in (([1, 2], "model"), (_CONTEXT, "other")):
        with pytest.raises(OracleError):
            check_context(context, fingerprint=store.codec.fingerprint, model_fingerprint=model)


@pytest.mark.parametrize(
    "name", ["ladder:0+4", "ladder:live+4+32", "ladder:0+4+32", "ladder:2+8+50", "window:5", "anchor:8"]
)
def test_ladders_are_those_of_the_server(name: str) -> None:
    ladder = parse_ladder(name)
    for rank in range(60):
        assert policies_for_rank(rungs_of(name), rank) == [policy.name for policy in ladder.for_rank(rank)]


def test_rungs_by_hand() -> None:
    # sqrt(4 * 32) = 11.3: the third rung begins at rank 12.
    assert rungs_of("ladder:0+4+32") == ((0, "window:0"), (1, "anchor:4"), (12, "anchor:32"))
    assert rungs_of("ladder:live+4+32") == ((0, None), (1, "anchor:4"), (12, "anchor:32"))


@pytest.mark.parametrize(
    "name",
    ["", "ladder:", "ladder:4+0", "ladder:0+0", "ladder:0+x", "ladder:live", "ladder:4+live", "anchor:0", "window:-1"],
)
def test_what_is_no_policy_is_refused(name: str) -> None:
    with pytest.raises(OracleError, match="no policy"):
        rungs_of(name)


def test_cases_cover_everything_with_the_same_facts_at_both_places() -> None:
    cases = cases_of(["window:0", "anchor:4"], ["system", "tail"], [1, 5], lengths=[6, 9], seed=1)
    assert len({(case.policy, case.placement, case.k) for case in cases}) == len(cases) == 8
    for case in cases:
        assert len(set(case.turns)) == case.k
        assert set(case.turns) <= set(range([6, 9][case.conversation]))
        twin = next(c for c in cases if (c.policy, c.k) == (case.policy, case.k) and c is not case)
        assert (twin.turns, twin.conversation) == (case.turns, case.conversation)
    assert cases == cases_of(["window:0", "anchor:4"], ["system", "tail"], [1, 5], lengths=[6, 9], seed=1)
    with pytest.raises(OracleError, match="7 facts"):
        cases_of(["window:0"], ["tail"], [7], lengths=[6, 9], seed=1)


def test_the_shipped_conversations_are_enough_for_twenty_facts() -> None:
    conversations = load(conversations_path())
    assert [len(conversation.turns) for conversation in conversations] == [24, 24]
    assert [bool(conversation.turns[0].date_time) for conversation in conversations] == [True, False]
    assert all(conversation.questions for conversation in conversations)


def test_a_run_fails_by_a_difference_or_by_a_control_that_agrees() -> None:
    (case,) = cases_of(["window:0"], ["tail"], [1], lengths=[3], seed=1)

    def row(difference: float, control: float | None) -> Row:
        values = [None if x is None else Difference(x, 0.0, 1.0, 1, 1) for x in (difference, control)]
        assert values[0] is not None
        return Row(case, values[0], values[1], spliced_tokens=1, seen_tokens=1, seconds=0.0)

    assert failures([row(1e-3, None), row(1e-4, 1.0)], 1e-3) == []
    for bad in (row(1.1e-3, None), row(float("inf"), 1.0), row(1e-4, 9e-3)):
        assert len(failures([row(1e-4, 1.0), bad], 1e-3)) == 1
    record = record_of([row(1e-4, 1.0), row(5e-4, None)], tolerance=1e-3, model={}, options={})
    assert record["bars"] == {"splice_oracle_max_difference": 5e-4}
    assert record["least_control_difference"] == 1.0
    assert [r["policy"] for r in record["rows"]] == ["window:0", "window:0"]
