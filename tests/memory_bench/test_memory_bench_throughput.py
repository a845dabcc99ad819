import asyncio
import json
from pathlib import Path

import pytest
from memory_bench.gate import RedGate
from memory_bench.loops import Asking, Block, Load, closed, opened
from memory_bench.output import Output
from memory_bench.throughput import BARS, bars_of, loads_of, measure, ratios_of_blocks, row_of, rows_of, seconds_of
from scripted_server import Server, answered

SPLICE, TEXT = "splice/ladder:live+4+32/tail", "text/tail"
QUESTIONS = [f"question {number}" for number in range(40)]


def block(qps: float, tier: str, *, requests: int = 32) -> tuple[Block, float]:
    return Block(requests / qps, tuple(float(n) for n in range(1, requests + 1)), frozenset({tier})), 100.0


def test_the_load_of_the_bar_has_three_blocks() -> None:
    assert loads_of((1, 16, 32), (0.5,), per_user=2, arrivals=24) == [
        Load(16, users=1),
        Load(32, users=16, blocks=3),
        Load(64, users=32),
        Load(24, rate_per_s=0.5),
    ]


def test_the_estimate_is_the_requests_one_after_another() -> None:
    # 3 x 32 requests of 2 + 0.5 s are 240 s. Of 24 arrivals in 48 s those as text take 48 s as well, spliced ones wait.
    loads = [Load(32, users=16, blocks=3), Load(24, rate_per_s=0.5)]
    assert seconds_of(loads, {"text": 2.0, "splice": 0.5}) == 240.0 + 48.0 + 48.0


def test_blocks_are_pooled_and_their_spread_is_in_the_row() -> None:
    load = Load(32, users=16, blocks=3)
    row = row_of(load, TEXT, [block(0.4, "text"), block(0.5, "text"), block(0.32, "text")], k=50, answer=8)
    assert row["requests"] == 96
    assert row["qps"] == pytest.approx(96 / (80 + 64 + 100))
    assert row["qps_of_blocks"] == pytest.approx([0.4, 0.5, 0.32])
    assert (row["qps_min"], row["qps_max"]) == pytest.approx((0.32, 0.5))
    # Of 96 samples, three of each of 1 to 32, rank 92 is a 31; 96 are enough for it.
    assert (row["ttft_ms"]["p95"], row["ttft_ms"]["p95_of_few"], row["ttft_ms"]["p50"]) == (31.0, False, 16.5)
    few = row_of(Load(24, rate_per_s=2.0), TEXT, [block(0.4, "text", requests=24)], k=50, answer=8)
    assert (few["load"], few["ttft_ms"]["p95"], few["ttft_ms"]["p95_of_few"]) == ("open", 23.0, True)


def rows(splice: list[float], text: list[float], *, tier: str = "spliced", k: int = 50, users: int = 16) -> list[dict]:
    load = Load(32, users=users, blocks=3)
    found = {SPLICE: [block(qps, tier) for qps in splice], TEXT: [block(qps, "text") for qps in text]}
    return rows_of({load: found}, k=k, answer=8)


def test_the_bar_is_the_ratio_over_all_blocks() -> None:
    measured = rows([4.0, 2.0, 4.0], [0.4, 0.5, 0.4])
    assert ratios_of_blocks(measured) == pytest.approx([10.0, 4.0, 10.0])
    # 96 requests in 8 + 16 + 8 s against 80 + 64 + 80 s
    assert bars_of(measured)["qps_ratio_16_users_k50"] == pytest.approx(7.0)


@pytest.mark.parametrize(
    "measured",
    [
        rows([4.0, 2.0], [0.4, 0.5]),
        rows([4.0, 2.0, 4.0], [0.4, 0.5]),
        rows([4.0, 2.0, 4.0], [0.4, 0.5, 0.4], tier="text"),
        rows([4.0, 2.0, 4.0], [0.4, 0.5, 0.4], k=20),
        rows([4.0, 2.0, 4.0], [0.4, 0.5, 0.4], users=4),
        [],
    ],
)
def test_there_is_no_bar_of_anything_else(measured: list[dict]) -> None:
    assert bars_of(measured) == {"qps_ratio_16_users_k50": None}


def test_arms_take_turns_with_the_same_questions_and_empty_caches(tmp_path: Path) -> None:
    server, path = Server(), tmp_path / "out.json"
    output = Output(path, bars=BARS, meta={}, official=True)
    loads = [Load(8, users=4, blocks=3), Load(8, rate_per_s=1e6)]

    async def measured() -> list[dict]:
        async with server.client() as client:
            return await measure(client, QUESTIONS, loads, output, k=5, answer=2, arena_mib=lambda: 12.5)

    found = asyncio.run(measured())
    blocks: list[list[tuple]] = []
    for entry in server.questions:
        if entry == "flush":
            blocks.append([])
        else:
            blocks[-1].append(entry)
    assert [len(asked) for asked in blocks[:4]] == [1, 1, 1, 1]  # to warm up
    modes = [[mode for mode, *_ in asked] for asked in blocks[4:]]
    order = ["splice", "text", "text", "splice", "splice", "text", "text", "splice"]
    assert modes == [[mode] * 8 for mode in order]
    questions = [sorted(question for _, _, question, _ in asked) for asked in blocks[4:]]
    for number in range(4):
        expected = sorted(QUESTIONS[8 * number : 8 * number + 8])
        assert questions[2 * number] == questions[2 * number + 1] == expected
    assert [(row["arm"], row["requests"], len(row["qps_of_blocks"])) for row in found] == [
        (SPLICE, 24, 3),
        (TEXT, 24, 3),
        (SPLICE, 8, 1),
        (TEXT, 8, 1),
    ]
    assert {row["arena_mib"] for row in found} == {12.5}
    assert json.loads(path.read_text())["rows"] == found


def test_a_failure_among_many_users_is_one_error() -> None:
    def reply(body, number):
        return answered(body, tier="text", reason="arena_full") if number == 5 else answered(body)

    async def run(loop) -> None:
        server = Server(reply)
        async with server.client() as client:
            await loop(client)

    asking = Asking("splice", 5, 2)
    for loop in (
        lambda client: closed(client, QUESTIONS, asking, users=4),
        lambda client: opened(client, QUESTIONS, asking, rate_per_s=1e6, seed=0),
    ):
        with pytest.raises(RedGate, match="arena_full"):
            asyncio.run(run(loop))


def test_a_closed_loop_has_so_many_requests_under_way() -> None:
    under_way = most = 0

    class Slow:
        async def ask(self, question: str, **asked: object) -> object:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0)
            under_way -= 1
            return type("Timed", (), {"ttft_ms": 1.0, "memory": {"tier": "text"}})

    found = asyncio.run(closed(Slow(), QUESTIONS, Asking("text", 5, 2), users=4))
    assert (most, len(found.ttft_ms)) == (4, 40)


def test_who_waits_for_the_loop_to_send_his_request_waits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[float] = []
    whole_sleep = asyncio.sleep
    # As in a loop whose clock is of milliseconds.
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: whole_sleep(seconds / 2))

    class Busy:
        async def ask(self, question: str, **asked: object) -> object:
            sent.append(asyncio.get_running_loop().time())
            return type("Timed", (), {"ttft_ms": 1000.0, "memory": {"tier": "text"}})

    found = asyncio.run(opened(Busy(), QUESTIONS[:20], Asking("text", 5, 2), rate_per_s=1000.0, seed=1))
    assert len(sent) == 20
    assert min(found.ttft_ms) >= 1000.0  # what the request took, and what passed between its arrival and its sending
    assert sum(found.ttft_ms) > 20 * 1000.0
