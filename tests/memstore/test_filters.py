"""Filters against a plain reading of each fact, and what is refused."""

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.errors import InvalidQuery
from memstore.search.filters import AttributeIndex, parse_filter
from memstore.types import Fact, FactId, OwnerId

DAY_S = 86_400.0
MAY_8_2023 = 1_683_504_000.0


def fact(
    seq: int,
    *,
    stream: str = "",
    speaker: str | None = None,
    event_at: float | None = None,
    metadata: Mapping[str, object] | None = None,
) -> Fact:
    return Fact(
        id=FactId(str(seq)),
        owner=OwnerId("ana"),
        text="text",
        stream=stream,
        speaker=speaker,
        time=None,
        metadata=metadata or {},
        version=1,
        seq=seq,
        created_at=0.0,
        updated_at=0.0,
        event_at=event_at,
    )


def matching(index: AttributeIndex, where: Mapping[str, object]) -> list[int]:
    wanted = parse_filter(where)
    assert wanted is not None
    seqs = index.matching(wanted)
    assert seqs.dtype == np.int64
    found: list[int] = seqs.tolist()
    return found


def test_each_field_and_all_of_them() -> None:
    index = AttributeIndex()
    index.add(
        [
            fact(3, stream="a", speaker="Ana", event_at=MAY_8_2023, metadata={"rating": 5}),
            fact(1, stream="a", speaker="Bo", metadata={"rating": 4.5, "a.b": "dots"}),
            fact(2, stream="b", metadata={"rating": "5", "a": {"b": "nested"}}),
        ]
    )
    assert matching(index, {"stream": "a"}) == [1, 3]
    assert matching(index, {"speaker": "Bo"}) == [1]
    assert matching(index, {"speaker": None}) == [2]
    assert matching(index, {"speaker": {"in": ["Ana", None, "Zoe"]}}) == [2, 3]
    assert matching(index, {"stream": {"in": []}}) == []
    assert matching(index, {"metadata.rating": {"gte": 4.5, "lt": 6}}) == [1, 3]
    assert matching(index, {"metadata.rating": "5"}) == [2]
    assert matching(index, {"metadata.a.b": "dots"}) == [1], "all behind the first dot is one key"
    assert matching(index, {"stream": "a", "metadata.rating": {"gt": 4.5}, "time": "2023-05-08"}) == [3]
    assert matching(index, {"stream": "a", "speaker": None}) == []


def test_equality_is_that_of_json() -> None:
    index = AttributeIndex()
    values: list[object] = [1, True, "1", 1.0, None, 0, False, "", [1], {"x": 1}, 2**53, 2**53 + 1, -0.0]
    index.add([fact(seq, metadata={"v": value}) for seq, value in enumerate(values)] + [fact(99)])
    right: list[tuple[object, list[int]]] = [
        (1, [0, 3]),
        (1.0, [0, 3]),
        (True, [1]),
        ("1", [2]),
        (None, [4]),
        (0, [5, 12]),
        (False, [6]),
        ("", [7]),
        (2**53 + 1, [11]),
        (10**400, []),
    ]
    for operand, seqs in right:
        assert matching(index, {"metadata.v": operand}) == seqs, operand
    assert matching(index, {"metadata.v": {"in": [1, False, None]}}) == [0, 3, 4, 6]
    assert matching(index, {"metadata.v": {"gt": 2**53}}) == [11]
    assert matching(index, {"metadata.v": {"gte": 0, "lte": 1}}) == [0, 3, 5, 12], "a bool is no number"
    assert matching(index, {"metadata.v": {"gt": -(10**400), "lt": 10**400}}) == [0, 3, 5, 10, 11, 12]
    assert matching(index, {"metadata.nobody has it": None}) == []
    assert matching(index, {"metadata.nobody has it": {"gt": 0}}) == []


@pytest.mark.parametrize(
    ("condition", "right"),
    [
        ({"lte": "2023-05-08"}, [1, 2, 3, 4]),
        ({"lt": "2023-05-08"}, [1]),
        ({"gte": "2023-05-08"}, [2, 3, 4, 5]),
        ({"gt": "2023-05-08"}, [5]),
        ("2023-05-08", [2, 3, 4]),
        ("8 May, 2023", [2, 3, 4]),
        ({"gte": "2023-05-08", "lte": "2023-05-08"}, [2, 3, 4]),
        ({"gte": "2023-05-09", "lte": "2023-05-08"}, []),
        ({"lte": "2023-05-08T13:56Z"}, [1, 2, 3]),
        ({"lt": "2023-05-08T13:56Z"}, [1, 2]),
        ({"gt": "2023-05-08T13:56Z"}, [4, 5]),
        ({"gte": "2023-05-08T13:56Z"}, [3, 4, 5]),
        ({"gt": "2023-05-08", "gte": "2023-05-01"}, [5]),
        ("1:56 pm on 8 May, 2023", [3]),
        ("2023-05-08T15:56+02:00", [3]),
        ("2023-05-08T00:00", [2]),
        ({"in": ["2023-05-07", "2023-05-08T13:56Z", "2023-05-08T13:56Z"]}, [1, 3]),
        ({"in": ["2023-05-08", "2023-05-08T13:56Z"]}, [2, 3, 4]),
        ({"in": []}, []),
    ],
)
def test_a_date_is_its_whole_day_and_a_moment_is_itself(condition: object, right: list[int]) -> None:
    index = AttributeIndex()
    offsets_s = [-1.0, 0.0, 13 * 3600 + 56 * 60, DAY_S - 0.001, DAY_S]
    index.add([fact(seq, event_at=MAY_8_2023 + offset_s) for seq, offset_s in enumerate(offsets_s, 1)] + [fact(6)])
    assert matching(index, {"time": condition}) == right


def test_added_twice_replaced_and_removed() -> None:
    index = AttributeIndex()
    index.add([fact(1, stream="a", metadata={"n": 1}), fact(2, stream="a", metadata={"n": 2})])
    assert matching(index, {"metadata.n": {"gt": 0}}) == [1, 2]
    index.add([fact(1, stream="a", metadata={"n": 9}), fact(1, stream="b", metadata={"n": 7})])
    assert len(index) == 2
    assert matching(index, {"stream": "a"}) == [2]
    assert matching(index, {"metadata.n": {"gt": 5}}) == [1]
    assert matching(index, {"metadata.n": 1}) == []
    index.remove([2, 2, 50])
    assert len(index) == 1
    assert matching(index, {"stream": "a"}) == []
    assert matching(index, {"metadata.n": {"gt": 0}}) == [1]


def test_thousands_at_once() -> None:
    index = AttributeIndex()
    for first in (0, 5000):
        index.add([fact(seq, metadata={"n": seq % 100}) for seq in range(first, first + 5000)])
        assert len(matching(index, {"metadata.n": {"gte": 90}})) == (first + 5000) // 10
    index.remove(range(0, 10_000, 2))
    assert matching(index, {"metadata.n": {"gt": 98}}) == list(range(99, 10_000, 100))


FieldValue = st.sampled_from([None, True, False, 0, 1, 1.0, 2, -3.5, "", "a", "b"])
NumberOperand = st.sampled_from([-4, -3.5, 0, 0.5, 1, 1.0, 2])
Ranges = st.dictionaries(st.sampled_from(["gt", "gte", "lt", "lte"]), NumberOperand, min_size=1)
Condition = FieldValue | st.fixed_dictionaries({"in": st.lists(FieldValue, max_size=3)}) | Ranges
Facts = st.builds(
    fact,
    st.integers(1, 30),
    stream=st.sampled_from(["", "a", "b"]),
    speaker=st.sampled_from([None, "a", "b"]),
    metadata=st.dictionaries(st.sampled_from(["x", "y.z"]), FieldValue | st.just([1])),
)
COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "gt": lambda a, b: a > b,
    "gte": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "lte": lambda a, b: a <= b,
}


def holds(condition: object, value: object) -> bool:
    if not isinstance(condition, Mapping):
        return isinstance(condition, bool) == isinstance(value, bool) and condition == value
    if "in" in condition:
        return any(holds(one, value) for one in condition["in"])
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return all(COMPARE[name](value, bound) for name, bound in condition.items())


def fields(of: Fact) -> dict[str, object]:
    return {"stream": of.stream, "speaker": of.speaker} | {f"metadata.{name}": v for name, v in of.metadata.items()}


@settings(max_examples=300, deadline=None)
@given(
    rounds=st.lists(st.tuples(st.lists(Facts, max_size=12), st.sets(st.integers(1, 30), max_size=8)), max_size=4),
    where=st.fixed_dictionaries(
        {},
        optional={
            "stream": st.sampled_from(["", "a", "c"]) | st.just({"in": ["a", "b"]}),
            "speaker": st.sampled_from([None, "a"]) | st.just({"in": [None, "b"]}),
            "metadata.x": Condition,
            "metadata.y.z": Condition,
        },
    ),
)
def test_equals_a_plain_reading_of_each_fact(
    rounds: list[tuple[list[Fact], set[int]]], where: dict[str, object]
) -> None:
    index = AttributeIndex()
    kept: dict[int, Fact] = {}
    wanted = parse_filter(where)
    if wanted is None:
        assert where == {}
        return
    for added, removed in rounds:
        index.add(added)
        index.remove(sorted(removed))
        kept |= {one.seq: one for one in added}
        kept = {seq: one for seq, one in kept.items() if seq not in removed}
        assert len(index) == len(kept)
        right = [
            seq
            for seq, one in sorted(kept.items())
            if all(name in fields(one) and holds(condition, fields(one)[name]) for name, condition in where.items())
        ]
        assert index.matching(wanted).tolist() == right


def test_no_filter_is_none() -> None:
    assert parse_filter(None) is None
    assert parse_filter({}) is None


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"rating": 5}, "no field 'rating'.*stream, speaker, time, metadata.KEY.*'metadata.rating'"),
        ({"metadata": {"rating": 5}}, "no field 'metadata'.*key behind the dot"),
        ({5: 5}, "no field 5"),
        ({"stream": 5}, "stream is compared with 5"),
        ({"stream": None}, "stream is compared with None"),
        ({"stream": {"in": ["a", None]}}, "stream is compared with None"),
        ({"stream": {"gt": "a"}}, "stream is text"),
        ({"speaker": True}, "speaker is compared with True"),
        ({"time": "yesterday"}, "'yesterday', which names no one day"),
        ({"time": {"gte": "03/04/2023"}}, "'03/04/2023', which names no one day"),
        ({"time": 1683504000}, "1683504000, which names no one day"),
        ({"time": None}, "None, which names no one day"),
        ({"metadata.x": [1]}, "'metadata.x' is compared with a list"),
        ({"metadata.x": {"in": [[1]]}}, "'metadata.x' is compared with a list"),
        ({"metadata.x": {"in": "abc"}}, "in of 'metadata.x' is a str"),
        ({"metadata.x": {"in": [1], "gt": 0}}, "more than its in"),
        ({"metadata.x": {"near": 1}}, "knows no 'near'.*in, or any of gt, gte, lt, lte"),
        ({"metadata.x": {}}, "is empty"),
        ({"metadata.x": {"gt": "5"}}, "gt of 'metadata.x' is '5'"),
        ({"metadata.x": {"gt": True}}, "gt of 'metadata.x' is True"),
        ({"metadata.x": {"gt": math.inf}}, "gt of 'metadata.x' is inf"),
        ({"metadata.x": math.nan}, "nan, which no JSON value equals"),
        (["stream"], "where is a list"),
        ("stream", "where is a str"),
    ],
)
def test_what_has_no_meaning_is_refused(where: Mapping[str, object], message: str) -> None:
    with pytest.raises(InvalidQuery, match=message):
        parse_filter(where)
