"""Which encoding a fact is spliced from, by rank."""

from __future__ import annotations

import pytest

from sgl_stateful.encoding import parse_ladder, policies_of


def served(spec: str, ranks: int) -> list[str]:
    return [parse_ladder(spec).for_rank(rank)[0].name for rank in range(ranks)]


def test_the_bare_header_is_for_the_first_fact_alone() -> None:
    assert served("ladder:0+4", 5) == ["window:0", "anchor:4", "anchor:4", "anchor:4", "anchor:4"]


def test_rungs_begin_at_the_geometric_mean_of_their_lengths() -> None:
    # By hand: sqrt(2*4) = 2.83, sqrt(4*8) = 5.66, sqrt(8*16) = 11.3.
    names = served("ladder:0+2+4+8+16", 20)
    assert names == ["window:0"] + ["anchor:2"] * 2 + ["anchor:4"] * 3 + ["anchor:8"] * 6 + ["anchor:16"] * 8


def test_a_single_policy_serves_every_rank() -> None:
    assert set(served("window:16", 100)) == {"window:16"}


def test_the_nearest_rung_stands_in_for_one_that_lacks() -> None:
    ladder = parse_ladder("ladder:0+4+32")
    assert [p.name for p in ladder.for_rank(0)] == ["window:0", "anchor:4", "anchor:32"]
    assert [p.name for p in ladder.for_rank(5)] == ["anchor:4", "anchor:32", "window:0"]
    assert [p.name for p in ladder.for_rank(40)] == ["anchor:32", "anchor:4", "window:0"]


def test_a_first_fact_that_is_computed_needs_no_encoding() -> None:
    ladder = parse_ladder("ladder:live+4+32")
    assert [ladder.is_live(rank) for rank in (0, 1, 11, 12, 40)] == [True, False, False, False, False]
    assert ladder.for_rank(0) == []
    assert [p.name for p in ladder.for_rank(1)] == ["anchor:4", "anchor:32"]
    assert [p.name for p in ladder.for_rank(12)] == ["anchor:32", "anchor:4"]
    assert [p.name for p in ladder.policies] == ["anchor:4", "anchor:32"]


def test_policies_are_encoded_once_whoever_serves_from_them() -> None:
    ladders = [parse_ladder(spec) for spec in ("ladder:0+4", "anchor:4", "ladder:0+4+32")]
    assert [p.name for p in policies_of(ladders)] == ["window:0", "anchor:4", "anchor:32"]


@pytest.mark.parametrize(
    "spec",
    [
        "ladder:",
        "ladder:4+4",
        "ladder:8+4",
        "ladder:0+x",
        "ladder:-1",
        "ladder",
        "anchor:0",
        "ladder:live",
        "ladder:4+live",
    ],
)
def test_what_is_no_ladder_is_refused_by_name(spec: str) -> None:
    with pytest.raises(ValueError, match="unknown encoding policy"):
        parse_ladder(spec)
