from dataclasses import replace
from itertools import islice, pairwise
from math import inf

import pytest
from sessions_bench.clients import Reply

from scripts.streaming_bench.__main__ import as_json
from scripts.streaming_bench.beside import idle_s
from scripts.streaming_bench.clients import Sample, sample_of
from scripts.streaming_bench.figures import BARS, at, interval_of_ratio, ratio
from scripts.streaming_bench.gates import Gates, Judged, pooled
from scripts.streaming_bench.interleavings import Outcome
from scripts.streaming_bench.market import SYMBOLS, Candle, Event, line, price, records
from scripts.streaming_bench.plot import draw
from scripts.streaming_bench.questions import closed_above, highest, is_halted, is_up, last_close, questions
from scripts.streaming_bench.rows import Report, of_foreground, of_gates, of_interleavings, of_sweep
from scripts.streaming_bench.shape import FULL, QUICK, Shape
from scripts.streaming_bench.sweep import EVICTED, SWEEP, Sweep
from scripts.streaming_bench.tape import Tape

CONTEXT_LIMIT = 8_192  # of SmolLM2-135M
RECORDS = [
    Candle(570, "ORVA", 10_000, 10_150, 9_980, 10_120, 300),
    Candle(570, "KELT", 2_000, 2_010, 1_990, 1_995, 100),
    Event(571, "KELT", "halted"),
    Candle(571, "ORVA", 10_120, 10_130, 9_900, 9_905, 700),
    Event(572, "ORVA", "guidance cut"),
]


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_a_stream_follows_from_its_seed() -> None:
    first = list(islice(records(4), 500))
    assert first == list(islice(records(4), 500))
    assert first != list(islice(records(5), 500))


@pytest.mark.parametrize("seed", range(5))
def test_candles_are_candles_and_none_comes_while_a_symbol_is_halted(seed: int) -> None:
    halted: set[str] = set()
    candles: dict[str, list[Candle]] = {symbol: [] for symbol in SYMBOLS}
    kinds = set()
    for record in islice(records(seed), 4000):
        if isinstance(record, Candle):
            assert record.symbol not in halted
            assert 0 < record.low <= min(record.open, record.close) <= max(record.open, record.close) <= record.high
            candles[record.symbol].append(record)
            continue
        kinds.add(record.kind)
        if record.kind == "halted":
            assert record.symbol not in halted
            halted.add(record.symbol)
        elif record.kind == "resumed":
            halted.remove(record.symbol)
    assert len(kinds) == 5
    for of_symbol in candles.values():
        assert all(before.close == after.open for before, after in pairwise(of_symbol))
        assert all(before.minute < after.minute for before, after in pairwise(of_symbol))


def test_records_read_as_lines() -> None:
    assert line(RECORDS[0]) == "09:30 ORVA open 100.00 high 101.50 low 99.80 close 101.20 volume 300\n"
    assert line(RECORDS[2]) == "09:31 KELT news: halted\n"
    assert (price(5), price(10_050)) == ("0.05", "100.50")


@pytest.mark.parametrize(
    ("question", "right"),
    [
        (last_close("ORVA"), "99.05"),
        (last_close("KELT"), "19.95"),
        (last_close("MIRU"), None),
        (highest("ORVA"), "101.50"),
        (closed_above("ORVA"), " No"),
        (closed_above("KELT"), " No"),
        (is_halted("KELT"), " Yes"),
        (is_halted("ORVA"), " No"),
        (is_up("ORVA"), " No"),
        (is_up("TSOL"), None),
    ],
)
def test_answers_follow_from_the_data(question, right) -> None:
    assert question.answer(RECORDS) == right


def test_after_a_halt_a_symbol_may_resume() -> None:
    assert is_halted("KELT").answer([*RECORDS, Event(580, "KELT", "resumed")]) == " No"
    assert closed_above("ORVA").answer(RECORDS[:1]) == is_up("ORVA").answer(RECORDS[:1]) == " Yes"


def test_an_answer_is_judged_by_its_first_word() -> None:
    question = is_halted("KELT")
    assert [question.is_right(said, RECORDS) for said in (" Yes", "yes, it is", "No", "", "It is")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert last_close("ORVA").is_right(" $99.05.\n", RECORDS)
    assert last_close("MIRU").is_right(" 1.00", RECORDS) is None


def test_questions_have_names_and_texts_of_their_own() -> None:
    asked = questions()
    assert len(asked) == len({one.name for one in asked}) == len({one.text for one in asked}) == 20
    assert sum(bool(one.choices) for one in asked) == 12
    assert FULL.registered <= len(asked)


def test_a_tape_is_what_was_sent_record_by_record() -> None:
    tape = Tape(3, encode)
    header = len(tape.ids)
    sent = tape.grow(header + 200)
    assert len(tape.ids) >= header + 200
    assert len(tape.ids) - len(line(tape.records[-1])) < header + 200
    assert tape.ids[header:] == sent == encode("".join(map(line, tape.records)))
    assert tape.step() == encode(line(tape.records[-1]))
    assert tape.grow(10) == []
    assert tape.question("Why?") == encode("Why?")
    assert len({tuple(tape.question("Why?", number=number)) for number in range(3)}) == 3
    assert [tape.entry("Why?\nAnswer:", number) for number in (1, 2)] == [
        (encode("Why"), encode(f" (request {number})?\nAnswer:")) for number in (1, 2)
    ]


@pytest.mark.parametrize("shape", [FULL, QUICK])
def test_what_is_timed_fits_the_context_and_the_budget(shape: Shape) -> None:
    longest_record, question_and_answer = 64, 64
    for context in shape.contexts:
        assert context + longest_record * (1 + shape.warm + shape.rounds) + question_and_answer < CONTEXT_LIMIT
    assert shape.contexts[0] + longest_record * (1 + shape.block) + question_and_answer < shape.budget
    assert shape.gate_context + longest_record * (1 + shape.gate_versions) + question_and_answer < CONTEXT_LIMIT
    assert shape.longest <= shape.budget < shape.pool
    assert list(shape.contexts) == sorted(shape.contexts)
    assert shape.blocks % 2 == shape.busy_blocks % 2 == 0
    # Twelve questions of which all agree: a gate fires from 18 on.
    assert shape.gate_versions // 2 >= 18


def test_ratios_are_of_all_samples_of_a_side() -> None:
    above, below = [[10.0, 30.0], [20.0]], [[2.0], [5.0, 4.0]]
    assert ratio(above, below, at(50)) == 5.0
    assert ratio(above, below, at(99)) == 6.0
    assert at(50)([1.0, 2.0]) == 1.5


def test_an_interval_draws_blocks_whole() -> None:
    # One block of the two is ten times the other: a draw has either, or both, and never half of one.
    low, high = interval_of_ratio([[1.0, 1.0], [10.0, 10.0]], [[1.0]], lambda samples: sum(samples) / len(samples))
    assert (low, high) == (1.0, 10.0)
    assert interval_of_ratio([[6.0, 6.0]], [[3.0], [3.0]], at(95)) == (2.0, 2.0)


def test_the_interval_of_a_median_is_about_that_of_its_order_statistics() -> None:
    # Of 30 samples the 10th and the 21st hold the median in 95.7 % of the cases, by the binomial distribution.
    low, high = interval_of_ratio([[float(n)] for n in range(1, 31)], [[1.0]], at(50))
    assert 9 <= low <= 11
    assert 20 <= high <= 22


@pytest.mark.parametrize(
    ("spans", "idle"),
    [
        ([], 10.0),
        ([(-1.0, 11.0)], 0.0),
        ([(-1.0, 4.0), (5.0, 20.0)], 1.0),
        ([(1.0, 3.0), (2.0, 9.0)], 2.0),
        ([(5.0, 20.0), (-3.0, -2.0)], 5.0),
    ],
)
def test_when_nobody_was_served(spans, idle: float) -> None:
    assert idle_s(spans, 0.0, 10.0) == idle


def judged(question: str, gap: float, agreed: bool, by: str = "decoding", right: bool | None = True) -> Judged:
    return Judged(question, 0, gap, agreed, by, right)


def test_precision_and_coverage_are_of_what_a_gate_answered() -> None:
    found = Gates([judged("a", 2.0, True, "gate"), judged("a", 3.0, False, "gate"), judged("b", 1.0, False)])
    assert found.coverage() == pytest.approx(2 / 3)
    precision, interval = found.precision()
    # By the formula of Wilson's interval for 1 of 2.
    assert (precision, interval.low, interval.high) == (
        0.5,
        pytest.approx(0.0945, abs=1e-4),
        pytest.approx(0.9055, abs=1e-4),
    )
    assert Gates([judged("b", 1.0, True)]).precision() == (None, (0.0, 1.0))


def test_one_gate_for_all_is_judged_by_other_questions_than_it_learnt_from() -> None:
    # Of "a" 40 that agree at 2 nats and more; of "b" three fire, one wrongly, and one is too close.
    learnt = [judged("a", 2.0 + n, True) for n in range(40)] + [judged("a", 0.1, False) for _ in range(40)]
    rest = [judged("b", 2.0, True), judged("b", 5.0, True), judged("b", 9.0, False), judged("b", 0.1, True)]
    assert pooled(learnt + rest) == (2, 3, 4)


def sample(arm: str, ms: float, *, part: str = SWEEP, context: int = 7000, server: float | None = None) -> Sample:
    return Sample(part, arm, context, ms, ms if server is None else server, 90, 100)


def swept() -> Sweep:
    times = {
        (SWEEP, "stock", 500): 100.0,
        (SWEEP, "query", 500): 80.0,
        (SWEEP, "radix", 500): 60.0,
        (SWEEP, "flash", 500): 4.0,
        (SWEEP, "stock", 7000): 300.0,
        (SWEEP, "query", 7000): 120.0,
        (SWEEP, "radix", 7000): 100.0,
        (SWEEP, "flash", 7000): 5.0,
        (EVICTED, "stock", 7000): 6000.0,
        (EVICTED, "flash", 7000): 5.0,
    }
    found = Sweep(agreed=3, compared=4, right=1, judged=2)
    for key, ms in times.items():
        part, arm, context = key
        # A hit takes the server a tenth of what the client waits.
        server = ms / 10 if arm == "flash" else ms
        found.samples[key] = [[sample(arm, ms, part=part, context=context, server=server)] for _ in range(3)]
    return found


def test_bars_of_the_sweep() -> None:
    report = Report()
    of_sweep(report, swept())
    # 60 and 100 ms of decoding, 0.4 and 0.5 of hits, each three times.
    assert report.bars["radix_decode_over_flash_p50"] == pytest.approx(80 / 0.45)
    assert report.bars["radix_decode_over_flash_p99"] == pytest.approx(100 / 0.5)
    assert report.bars["flash_7000_over_500"] == pytest.approx(1.25)
    assert report.bars["stock_over_preposition_7000"] is None
    assert report.intervals["flash_7000_over_500"] == pytest.approx((1.25, 1.25))
    by_name = {(row.name, row.arm, row.details.get("context")): row for row in report.rows}
    assert by_name["sweep_server", "flash", 500].median == pytest.approx(0.4)
    assert by_name["evicted_ttft", "stock", 7000].median == 6000.0
    assert by_name["same_answers", "bfloat16", None].median == 0.75


def test_an_entry_is_held_against_the_stock_server_whose_cache_was_evicted() -> None:
    found = swept()
    found.samples[EVICTED, "entry", 7000] = [[sample("entry", 100.0, part=EVICTED)]] * 3
    report = Report()
    of_sweep(report, found)
    assert report.bars["stock_over_preposition_7000"] == 60.0


def test_bars_of_the_others() -> None:
    report = Report()
    of_interleavings(report, Outcome(interleavings=10, asked=20, stored=8, stale=["one"]))
    blocks = [[sample("off", float(ms)) for ms in range(1, 101)]]
    slower = [[replace(one, ttft_ms=1.5 * one.ttft_ms) for one in blocks[0]]]
    of_foreground(report, {"off": blocks, "on": slower}, registered=20)
    fired = [judged(f"q{n}", 4.0, n > 0, "gate") for n in range(10)]
    found = Gates([*fired, judged("q1", 0.1, False, right=None)])
    found.gate, found.decode = [[sample("gate", 2.0)]], [[sample("radix", 100.0)]]
    of_gates(report, found)
    bars = report.bars
    assert (bars["stale"], bars["foreground_p95_on_over_off"]) == (1, pytest.approx(1.5))
    assert (bars["gate_precision"], bars["gate_coverage"]) == (0.9, pytest.approx(10 / 11))
    assert bars["radix_decode_over_gate_p50"] == 50.0
    assert {name for name, value in bars.items() if value is None} == {
        "radix_decode_over_flash_p50",
        "radix_decode_over_flash_p99",
        "flash_7000_over_500",
        "stock_over_preposition_7000",
    }
    assert all(low <= bars[name] <= high for name, (low, high) in report.intervals.items())
    assert max(high for _, high in report.intervals.values()) < inf


def test_small_sizes_have_rows_and_no_bars() -> None:
    report = Report()
    of_interleavings(report, Outcome(interleavings=10, asked=20, stored=8))
    assert as_json(report, official=True)["bars"] == dict.fromkeys(BARS) | {"stale": 0}
    small = as_json(report, official=False)
    assert (small["bars"], len(small["rows"])) == (dict.fromkeys(BARS), 1)  # type: ignore[arg-type]


def test_bars_have_the_names_that_others_read() -> None:
    assert tuple(Report().bars) == BARS
    with pytest.raises(AssertionError, match="hits"):
        Report().bar("hits", 1.0)


def test_a_stored_answers_time_is_of_the_whole_reply_and_anothers_of_its_first_token() -> None:
    meta = {"e2e_latency": 0.5, "first_token_latency": 0.2, "cached_tokens": 3, "prompt_tokens": 4}
    decoded = sample_of(SWEEP, "radix", 500, Reply(9.0, [1], meta))
    stored = sample_of(SWEEP, "flash", 500, Reply(9.0, [1], meta | {"session": {"served_from": "flash"}}))
    assert (decoded.server_ms, stored.server_ms) == (200.0, 500.0)
    uses = [
        sample_of(
            SWEEP, "entry", 500, Reply(9.0, [1], meta | {"session": {"served_from": "entry", "entry": {"by": by}}})
        )
        for by in ("prefix", "ahead", "whole", "gate")
    ]
    assert [one.server_ms for one in uses] == [200.0, 200.0, 500.0, 500.0]
    assert (decoded.ttft_ms, decoded.cached_tokens, decoded.prompt_tokens) == (9.0, 3, 4)


def test_the_plot_is_a_png(tmp_path) -> None:
    path = tmp_path / "plot.png"
    arms = {
        (arm, context): [sample(arm, ms, context=context)] * 4
        for arm, ms in (("stock", 300.0), ("flash", 3.0))
        for context in (500, 7000)
    }
    draw(arms, path)
    assert path.read_bytes().startswith(b"\x89PNG")
