from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from scripts.sessions_bench.corpus import Corpus
from scripts.sessions_bench.load import OursLoad, RivalLoad, Taken, rows_of_load
from scripts.sessions_bench.measure import bars_of, median_ratio, percentile, percentile_ratio, row_of
from scripts.sessions_bench.schedule import Event, schedule
from scripts.sessions_bench.shape import FULL, QUICK, Shape

TINY = replace(QUICK, pool=40, load_session=20, load_rounds=2, load_append=(3, 5), visits_per_flood=4)


@pytest.mark.parametrize("shape", [FULL, QUICK])
def test_a_schedule_follows_from_its_seed(shape: Shape) -> None:
    assert schedule(shape, 3) == schedule(shape, 3)
    assert schedule(shape, 3) != schedule(shape, 4)


def test_a_schedule_appends_to_and_asks_every_session_once_a_round() -> None:
    events = schedule(TINY, 0)
    # 3 * 40 / 20 = 6 sessions, 2 rounds of 6 appends and 6 questions, a flood after each 4.
    assert Counter(event.kind for event in events) == {"open": 6, "append": 12, "ask": 12, "flood": 6}
    assert [event.kind for event in events[6:]].index("flood") == 4
    for kind in ("append", "ask"):
        visited = [event.session for event in events if event.kind == kind]
        assert sorted(visited[:6]) == sorted(visited[6:]) == [0, 1, 2, 3, 4, 5]
    assert all(3 <= event.tokens <= 5 for event in events if event.kind == "append")
    assert [event.content for event in events] == list(range(36))


def test_questions_of_a_schedule_seldom_follow_their_own_append() -> None:
    pairs = list(pairwise(schedule(FULL, 0)))
    close = [pair for pair in pairs if [event.kind for event in pair] == ["append", "ask"]]
    assert sum(before.session == after.session for before, after in close) < len(close) / 10


@pytest.mark.parametrize("shape", [FULL, QUICK])
def test_sessions_are_three_pools_and_what_is_pinned_fits(shape: Shape) -> None:
    assert shape.load_sessions * shape.load_session == 3 * shape.pool
    growth = Counter[int]()
    for event in schedule(shape, 0):
        if event.kind in ("open", "append") and event.session < shape.load_pinned:
            growth[event.session] += event.tokens
    assert 0 < growth.total() <= shape.budget < shape.pool


def test_content_is_as_long_as_asked_and_shares_no_prefix() -> None:
    corpus = Corpus([[1, 2, 3], [4, 5]], question=[7, 8, 9])
    contents = [corpus.data(number, 50) for number in range(200)]
    assert {len(ids) for ids in contents} == {50}
    assert len({ids[0] for ids in contents}) == 200
    assert contents[3] == Corpus([[1, 2, 3], [4, 5]], question=[7, 8, 9]).data(3, 50)
    question = corpus.question(5, 10)
    assert (len(question), question[0], question[-3:]) == (10, contents[5][0], [7, 8, 9])
    assert corpus.question(5, 3) == [contents[5][0], 8, 9]
    numbers = [corpus.fresh() for _ in range(100)]
    assert len(set(numbers)) == 100
    assert min(numbers) > max(event.content for event in schedule(FULL, 0))


class Recorder:
    """Stands where a server would, and keeps the ids that it is to answer for."""

    def __init__(self) -> None:
        self.contents: dict[str, list[int]] = {}
        self.prompts: list[list[int]] = []

    def try_open(self, ids, **fields):
        name = f"s{len(self.contents)}"
        self.contents[name] = list(ids)
        return type("Opened", (), {"status": 201, "ms": 1.0, "body": {"id": name}})

    def append(self, session, ids):
        self.contents[session] += ids
        return {"client_ms": 1.0, "prefilled_tokens": len(ids)}

    def query(self, session, ids, *, answer):
        return self.ask([*self.contents[session], *ids], answer=answer)

    def ask(self, ids, *, answer):
        self.prompts.append(list(ids))
        meta = {"session": {"pin": "pinned"}}
        return type("Reply", (), {"ttft_ms": 1.0, "uncached_tokens": 1, "meta": meta})


def test_both_sides_are_asked_the_same_ids() -> None:
    corpus = Corpus([[1, 2, 3], [4, 5]], question=[7, 8, 9])
    ours, rival = Recorder(), Recorder()
    loads = OursLoad(ours, corpus, TINY), RivalLoad(rival, corpus, TINY)  # type: ignore[arg-type]
    events = schedule(TINY, 1)
    for event in events:
        for load in loads:
            load.run(event)
    assert len(ours.prompts) == 18
    # The rival's client also sends every session once when it is opened.
    assert rival.prompts[6:] == ours.prompts
    assert [len(ids) for ids in rival.prompts[:6]] == [20] * 6


@pytest.mark.parametrize(("percent", "expected"), [(1, 1.0), (25, 25.0), (50, 50.0), (99, 99.0), (100, 100.0)])
def test_percentiles_are_nearest_ranks(percent: int, expected: float) -> None:
    assert percentile([float(i) for i in range(100, 0, -1)], percent) == expected


def test_percentiles_of_few() -> None:
    assert percentile([3.0, 1.0, 2.0], 99) == 3.0
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([4.0], 1) == 4.0
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


def test_ratios() -> None:
    assert median_ratio([10.0, 30.0, 20.0], [4.0, 6.0]) == 4.0
    assert percentile_ratio([10.0, 30.0, 20.0], [2.0, 5.0], 99) == 6.0


def test_a_row_has_the_median_and_the_spread() -> None:
    row = row_of("query", "ours", [4.0, 1.0, 2.0, 3.0, 10.0], ratio=1.23456, note="five")
    assert row.as_json() == {
        "name": "query",
        "arm": "ours",
        "unit": "ms",
        "median": 3.0,
        "n": 5,
        "p25": 2.0,
        "p75": 4.0,
        "p99": 10.0,
        "ratio": 1.2346,
        "note": "five",
        "details": {},
    }


def taken(kind, session, content, ms, *, uncached=0, pinned=False) -> Taken:
    return Taken(Event(kind, session, 16, content), ms, uncached, pinned)


def test_the_bars_of_the_load_are_of_pinned_sessions() -> None:
    ours = [
        taken("append", 0, 0, 5.0, uncached=16),
        taken("append", 1, 2, 6.0, uncached=16),
        taken("ask", 0, 1, 10.0, uncached=16, pinned=True),
        taken("ask", 1, 3, 20.0, uncached=17, pinned=True),
        taken("append", 2, 4, 90.0, uncached=16),
        taken("ask", 2, 5, 100.0, uncached=2016),
        taken("flood", -1, 6, 50.0, uncached=16),
    ]
    times = [0.0, 0.0, 80.0, 100.0, 0.0, 110.0, 50.0]
    rival = [Taken(mine.event, ms, 2000 if ms else 0) for mine, ms in zip(ours, times, strict=True)]
    rows, ratios = rows_of_load(ours, rival, TINY)
    assert ratios == {"rival_over_ours_p50": 90 / 15, "rival_over_ours_p99": 100 / 20}
    by_name = {(row.name, row.arm): row for row in rows}
    pinned = by_name["load_ask_pinned", "ours"]
    assert (pinned.median, pinned.ratio, pinned.n) == (15.0, 6.0, 2)
    assert pinned.details["uncached_total"] == 33
    assert by_name["load_ask_pinned", "rival"].details["uncached_total"] == 4000
    assert by_name["load_ask_unpinned", "ours"].ratio == pytest.approx(1.1)
    # Appends of 5 and 6 ms, and first tokens after 10 and 20 ms.
    both = by_name["load_data_to_token_pinned", "ours"]
    assert (both.median, both.ratio) == (20.5, pytest.approx(90 / 20.5))
    assert by_name["load_data_to_token_unpinned", "ours"].median == 190.0
    assert by_name["load_waited", "ours"].median == pytest.approx(0.281)


def test_both_sides_have_to_have_had_the_same_events() -> None:
    with pytest.raises(AssertionError):
        rows_of_load([taken("ask", 0, 1, 1.0)], [taken("ask", 1, 1, 1.0)], TINY)


def test_bars_have_fixed_names_and_none_for_what_was_not_measured() -> None:
    assert bars_of({"append_tokens_ratio": 1.0}) == {
        "query_ttft_6000_over_600": None,
        "rival_over_ours_p50": None,
        "rival_over_ours_p99": None,
        "append_tokens_ratio": 1.0,
        "query_overhead_ratio": None,
    }
    with pytest.raises(KeyError, match="append_ratio"):
        bars_of({"append_ratio": 1.0})
