import asyncio
import json
from collections import Counter, defaultdict
from pathlib import Path

import httpx
import pytest
from memory_bench.client import Timed
from memory_bench.output import Output
from memory_bench.ttft import BARS, KS, Cell, Key, bars_of, cells_of_round, intervals_of, measure, row_of, take
from scripted_server import Server, answered, report

from locomo.errors import ServerFailed

QUESTIONS = [f"question {number}" for number in range(150)]


def test_facts_are_new_in_every_round_and_arms_take_turns() -> None:
    asked: dict[int, list[str]] = defaultdict(list)
    first: Counter[tuple[int, str]] = Counter()
    places: Counter[tuple[int, int]] = Counter()
    for number in range(30):
        cells = cells_of_round(number, KS, QUESTIONS)
        assert Counter(cell.k for cell in cells) == {0: 1, 1: 2, 5: 2, 10: 2, 20: 2, 50: 2}
        assert len({cell.question for cell in cells}) == 6
        for place, k in enumerate(dict.fromkeys(cell.k for cell in cells)):
            here = [cell for cell in cells if cell.k == k]
            assert {cell.mode for cell in here} == ({"splice", "text"} if k else {"off"})
            [question] = {cell.question for cell in here}
            asked[k].append(question)
            first[k, here[0].mode] += 1
            places[k, place] += 1
    assert all(len(set(questions)) == 30 for questions in asked.values())
    assert {first[k, mode] for k in KS[1:] for mode in ("splice", "text")} == {15}
    assert {places[k, place] for k in KS for place in range(6)} == {5}


def test_every_cell_begins_with_empty_caches() -> None:
    server = Server()

    async def taken() -> list[dict[Key, Timed]]:
        async with server.client() as client:
            return [await take(client, Cell(*cell)) for cell in (("text", 5, "a"), ("splice", 5, "a"), ("off", 0, "b"))]

    text, spliced, none = asyncio.run(taken())
    assert server.questions == [
        "flush",
        ("text", 5, "a", False),
        ("text", 5, "a", False),
        "flush",
        ("splice", 5, "a", False),
        ("splice", 5, "a", False),
        ("splice", 5, "a", True),
        "flush",
        ("off", 0, "b", False),
        ("off", 0, "b", False),
    ]
    assert [key.case for key in text] == [key.case for key in none] == ["new", "repeated"]
    assert [key.case for key in spliced] == ["new", "repeated", "arena"]


def test_parts_are_means_that_add_up_to_the_mean() -> None:
    # 7 ms each by the report: 1 to retrieve, 2 to assemble, 4 to splice.
    taken = [Timed(ms, 2 * ms, forward, report("splice", 5)) for ms, forward in ((100.0, 60.0), (110, 80), (180, 130))]
    row = row_of(Key("splice", 5, "new"), taken)
    assert row["ttft_ms"] == {
        "mean": 130.0,
        "p25": 100.0,
        "p50": 110.0,
        "p75": 180.0,
        "p95": 180.0,
        "p95_of_few": True,
        "repeats": 3,
    }
    assert row["parts_ms"] == {"retrieve": 1.0, "assemble": 2.0, "splice": 4.0, "prefill": 90.0, "other": 33.0}
    assert (row["arm"], row["prefilled_tokens"], row["tiers"]) == ("splice/ladder:live+4+32/tail", 3, ["spliced"])
    # The clocks are two: what they disagree about shows as less than nothing.
    overlapping = row_of(Key("off", 0, "new"), [Timed(50.0, 60.0, 49.0, report("off", 0))])
    assert overlapping["parts_ms"]["other"] == -6.0


def row(arm: str, k: int, p50: float, *, case: str = "new", repeats: int = 30, tiers: tuple[str, ...] = ()) -> dict:
    tier = {"none": "none", "text/tail": "text"}.get(arm, "spliced")
    found = {"arm": arm, "k": k, "case": case, "tiers": list(tiers) or [tier]}
    return found | {"ttft_ms": {"repeats": repeats}, "rounds_ms": [p50 - 1, *[p50] * (repeats - 2), p50 + 1]}


SPLICE = "splice/ladder:live+4+32/tail"


def test_bars_are_ratios_of_medians_of_new_facts() -> None:
    rows = [
        row("none", 0, 100.0),
        row(SPLICE, 50, 250.0),
        row(SPLICE, 50, 200.0, case="arena"),
        row(SPLICE, 50, 120.0, case="repeated"),
        row(SPLICE, 20, 150.0),
        row("text/tail", 50, 3000.0),
        row("text/tail", 50, 130.0, case="repeated"),
    ]
    assert bars_of(rows) == {"ttft_text_over_splice_k50": 12.0, "ttft_splice_k50_over_k0": 2.5}
    # Whatever is drawn of the rounds, nearly all of it is the median.
    assert intervals_of(rows) == {"ttft_text_over_splice_k50": (12.0, 12.0), "ttft_splice_k50_over_k0": (2.5, 2.5)}


@pytest.mark.parametrize(
    "splice",
    [
        row(SPLICE, 50, 250.0, tiers=("spliced", "text")),
        row(SPLICE, 50, 250.0, tiers=("text",)),
        row(SPLICE, 50, 250.0, repeats=29),
        row(SPLICE, 20, 250.0),
    ],
)
def test_a_bar_is_of_splices_only(splice: dict) -> None:
    rows = [row("none", 0, 100.0), splice, row("text/tail", 50, 3000.0)]
    assert bars_of(rows) == {"ttft_text_over_splice_k50": None, "ttft_splice_k50_over_k0": None}
    assert intervals_of(rows) == {}


def test_a_run_that_breaks_off_keeps_its_rounds(tmp_path: Path) -> None:
    # A round of k = 0 and 5 is 7 requests: 2 without facts, 2 as text, 3 spliced. One warms up; the third is cut.
    def reply(body: dict, number: int) -> httpx.Response:
        return answered(body) if number < 4 * 7 - 1 else httpx.Response(500, text="gone")

    server, path = Server(reply), tmp_path / "out.json"
    output = Output(path, bars=BARS, meta={"model": "m"}, official=True)

    async def measured() -> None:
        async with server.client() as client:
            await measure(client, QUESTIONS, output, repeats=30, ks=(0, 5))

    with pytest.raises(ServerFailed, match="500: gone"):
        asyncio.run(measured())
    found = json.loads(path.read_text())
    assert found["bars"] == dict.fromkeys(BARS)
    assert found["meta"]["finished"] is False
    assert {(row["arm"], row["k"], row["case"]): row["ttft_ms"]["repeats"] for row in found["rows"]} == {
        ("none", 0, "new"): 2,
        ("none", 0, "repeated"): 2,
        ("text/tail", 5, "new"): 2,
        ("text/tail", 5, "repeated"): 2,
        (SPLICE, 5, "new"): 2,
        (SPLICE, 5, "repeated"): 2,
        (SPLICE, 5, "arena"): 2,
    }
