from typing import Any

import pytest

from sgl_stateful.directive import DIRECTIVE_KEY
from sgl_stateful.errors import BadMemoryRequest, ForgedDirective
from sgl_stateful.params import parse_memory_params


def parse(**memory: Any) -> Any:
    return parse_memory_params({"memory": memory})


def test_defaults() -> None:
    params = parse(owner="ana")
    assert params.model_dump() == {
        "owner": "ana",
        "facts": None,
        "k": 10,
        "mode": "splice",
        "placement": "tail",
        "order": "relevance_last",
        "min_score": None,
        "where": None,
        "search": "hybrid",
        "query": None,
        "policy": None,
        "repair": None,
        "insert_at": 0,
    }


def test_every_field_is_read() -> None:
    given: dict[str, Any] = {
        "owner": "ana",
        "facts": ("one", "two"),
        "k": 0,
        "mode": "off",
        "placement": "system",
        "order": "chronological",
        "min_score": -1.0,
        "where": {"metadata.rating": {"gt": 3}, "speaker": {"in": ["Ana", None]}},
        "search": "hybrid",
        "query": "what?",
        "policy": "window:2",
        "repair": "first:3",
        "insert_at": 7,
    }
    assert parse(**given).model_dump() == given


@pytest.mark.parametrize("k", [0, 1, 1000])
def test_the_bounds_of_k_are_allowed(k: int) -> None:
    assert parse(owner="ana", k=k).k == k


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("k", -1),
        ("k", 1001),
        ("k", 2.5),
        ("k", True),
        ("k", "10"),
        ("k", None),
        ("mode", "kv"),
        ("search", "regex"),
        ("where", "stream = 'chat'"),
        ("where", ["stream"]),
        ("placement", "head"),
        ("order", "random"),
        ("min_score", 1.01),
        ("min_score", -1.01),
        ("min_score", float("nan")),
        ("min_score", float("inf")),
        ("min_score", "high"),
        ("insert_at", -1),
        ("insert_at", 1.5),
        ("query", 3),
        ("policy", ["window:2"]),
        ("repair", 3),
        ("repair", "first:0"),
        ("repair", "middle:2"),
        ("owner", None),
        ("owner", 12),
        ("threshold", 0.5),
    ],
)
def test_a_bad_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(BadMemoryRequest, match=rf"memory is not valid: {field}: "):
        parse(**{"owner": "ana", field: value})


def test_a_missing_owner_is_named() -> None:
    with pytest.raises(BadMemoryRequest, match="owner: Field required"):
        parse(k=3)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(BadMemoryRequest, match=r"owner: .*; k: .*; mode: "):
        parse(k=-1, mode="kv")


@pytest.mark.parametrize("memory", [5, "ana", ["ana"], True, False, 0, ""])
def test_memory_that_is_no_object_is_refused(memory: Any) -> None:
    with pytest.raises(BadMemoryRequest, match="memory: Input should be a valid dictionary"):
        parse_memory_params({"memory": memory})


@pytest.mark.parametrize("custom_params", [None, {}, {"other": 1}, {"memory": None}])
def test_requests_without_memory(custom_params: Any) -> None:
    assert parse_memory_params(custom_params) is None


@pytest.mark.parametrize("custom_params", [[], ["memory"], "memory", 3])
def test_custom_params_that_are_no_object_are_left_to_sglang(custom_params: Any) -> None:
    assert parse_memory_params(custom_params) is None


@pytest.mark.parametrize("value", [None, "", '{"op":"splice","spans":[["aa",0,1]]}', {}])
@pytest.mark.parametrize("memory", [{}, {"memory": {"owner": "ana"}}])
def test_the_servers_own_key_is_refused(value: Any, memory: dict[str, Any]) -> None:
    with pytest.raises(ForgedDirective, match=f"custom_params.{DIRECTIVE_KEY} is reserved"):
        parse_memory_params({DIRECTIVE_KEY: value, **memory})


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({}, True),
        ({"query": "kayaks"}, False),
        ({"facts": ["one"]}, False),
        ({"facts": []}, False),
        ({"k": 0}, False),
        ({"mode": "off"}, False),
        ({"mode": "text"}, True),
    ],
)
def test_a_query_is_needed_where_something_is_searched_for(fields: dict[str, Any], needed: bool) -> None:
    assert parse(owner="ana", **fields).needs_query is needed


def test_no_more_facts_are_named_than_one_may_ask_for() -> None:
    assert len(parse(owner="ana", facts=["x"] * 1000).facts) == 1000
    with pytest.raises(BadMemoryRequest, match="facts"):
        parse(owner="ana", facts=["x"] * 1001)
