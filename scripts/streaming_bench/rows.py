"""Rows, bars and intervals of what was measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sessions_bench.measure import Row, row_of

from .clients import Sample
from .figures import BARS, Blocks, at, flat, interval_of_ratio, ratio
from .gates import Gates, pooled
from .interleavings import Outcome
from .sweep import EVICTED, SWEEP, Sweep

Samples = Sequence[Sequence[Sample]]


@dataclass(slots=True)
class Report:
    """Rows in the order in which they come, bars, and the bars' 95 % intervals."""

    rows: list[Row] = field(default_factory=list)
    bars: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(BARS))
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)

    def bar(self, name: str, value: float | None, interval: tuple[float, float] | None = None) -> None:
        """Set a bar; None leaves it as not measured."""
        assert name in self.bars, name
        self.bars[name] = value
        if interval is not None:
            self.intervals[name] = interval

    def ratio(self, name: str, above: Blocks, below: Blocks, percent: int) -> None:
        """Set a bar that is a ratio of two percentiles."""
        statistic = at(percent)
        self.bar(name, ratio(above, below, statistic), interval_of_ratio(above, below, statistic))


def ttft(samples: Samples) -> list[list[float]]:
    """The client's times, by block."""
    return [[sample.ttft_ms for sample in block] for block in samples]


def server(samples: Samples) -> list[list[float]]:
    """The server's own times, by block."""
    return [[sample.server_ms for sample in block] for block in samples]


def of_interleavings(report: Report, outcome: Outcome) -> None:
    """How many answers were of an earlier state."""
    report.bar("stale", len(outcome.stale))
    note = (
        f"{outcome.interleavings} interleavings in float32; {outcome.asked} answers, {outcome.stored} of them stored, "
        f"{outcome.with_facts} with facts, each held against decoding on the state at that moment"
    )
    details = {"stale": outcome.stale[:20]}
    report.rows.append(Row("stale", "flash", "answers", len(outcome.stale), outcome.asked, note=note, details=details))


def of_sweep(report: Report, sweep: Sweep) -> None:
    """Times by arm and length, and the bars of stored answers."""
    for (part, arm, context), blocks in sweep.samples.items():
        samples = [sample for block in blocks for sample in block]
        uncached = sorted(sample.prompt_tokens - sample.cached_tokens for sample in samples)[len(samples) // 2]
        evicted = ", unrelated traffic before each" if part == EVICTED else ""
        note = f"{context} tokens{evicted}; {uncached} of {samples[0].prompt_tokens} prefilled"
        details = {"part": part, "context": context}
        for unit, times in (("ttft", ttft(blocks)), ("server", server(blocks))):
            name = f"{part}_{unit}"
            report.rows.append(row_of(name, arm, flat(times), note=note, details=details))
    radix, flash = (_joined(sweep, arm) for arm in ("radix", "flash"))
    for percent in (50, 99):
        report.ratio(f"radix_decode_over_flash_p{percent}", server(radix), server(flash), percent)
    lengths = sorted(context for part, arm, context in sweep.samples if (part, arm) == (SWEEP, "flash"))
    longest, shortest = (sweep.samples[SWEEP, "flash", context] for context in (lengths[-1], lengths[0]))
    report.ratio("flash_7000_over_500", ttft(longest), ttft(shortest), 50)
    if (EVICTED, "entry", lengths[-1]) in sweep.samples:
        stock, entry = (sweep.samples[EVICTED, arm, lengths[-1]] for arm in ("stock", "entry"))
        report.ratio("stock_over_preposition_7000", ttft(stock), ttft(entry), 50)
    note = f"{sweep.agreed} of {sweep.compared} answers are token by token those of stock or of decoding for real"
    share = sweep.agreed / sweep.compared
    report.rows.append(Row("same_answers", "bfloat16", "", share, sweep.compared, note=note))
    if sweep.judged:
        note = f"{sweep.right} of {sweep.judged} open answers of the model are right by the data"
        report.rows.append(Row("model_is_right", "open", "", sweep.right / sweep.judged, sweep.judged, note=note))


def of_gates(report: Report, gates: Gates) -> None:
    """Precision, coverage and time of the gates."""
    precision, interval = gates.precision()
    report.bar("gate_precision", precision, interval)
    report.bar("gate_coverage", gates.coverage())
    asked, fired = len(gates.held_out), len(gates.fired)
    note = f"{fired} of {asked} held-out questions were answered by a gate, {len(gates.retired)} questions retired"
    report.rows.append(Row("gate_coverage", "own", "", gates.coverage(), asked, note=note))
    if precision is not None:
        note = f"agreement with decoding, 95 % interval {interval.low:.3f}-{interval.high:.3f}"
        report.rows.append(Row("gate_precision", "own", "", precision, fired, note=note))
    agreed, fires, rest = pooled(gates.held_out)
    note = f"one gate for all: learnt from half of the questions; {agreed} of the {fires} of {rest} that fire agree"
    report.rows.append(Row("gate_precision", "pooled", "", agreed / fires if fires else 0.0, fires, note=note))
    judged = [one.right for one in gates.held_out if one.right is not None]
    note = f"{sum(judged)} of {len(judged)} choices of the model are right by the data"
    report.rows.append(Row("model_is_right", "closed", "", sum(judged) / len(judged), len(judged), note=note))
    if not gates.gate:
        return
    for arm, samples in (("gate", gates.gate), ("radix", gates.decode)):
        report.rows.append(row_of("gate_server", arm, flat(server(samples))))
        report.rows.append(row_of("gate_ttft", arm, flat(ttft(samples))))
    report.ratio("radix_decode_over_gate_p50", server(gates.decode), server(gates.gate), 50)


def of_foreground(report: Report, taken: Mapping[str, Samples], *, registered: int) -> None:
    """Callers' times beside registered questions."""
    for kind, samples in taken.items():
        note = f"{len(samples)} blocks, {registered if kind == 'on' else 'no'} registered questions"
        details = {"p95": at(95)(flat(ttft(samples)))}
        report.rows.append(row_of("foreground_ttft", kind, flat(ttft(samples)), note=note, details=details))
    report.ratio("foreground_p95_on_over_off", ttft(taken["on"]), ttft(taken["off"]), 95)


def of_saturated(report: Report, taken: Mapping[str, Samples]) -> None:
    """Hits while the engine is busy; the ratio of medians is in the row."""
    for unit, times in (("ttft", ttft), ("server", server)):
        busy, idle = times(taken["saturated"]), times(taken["idle"])
        low, high = interval_of_ratio(busy, idle, at(50))
        note = f"a hit while others decode; over idle with 95 % interval {low:.2f}-{high:.2f}"
        found = ratio(busy, idle, at(50))
        report.rows.append(row_of(f"hit_{unit}", "saturated", flat(busy), ratio=found, note=note))
        report.rows.append(row_of(f"hit_{unit}", "idle", flat(idle), note="nobody else asks"))


def _joined(sweep: Sweep, arm: str) -> Samples:
    return [
        block for (part, name, _), blocks in sweep.samples.items() if (part, name) == (SWEEP, arm) for block in blocks
    ]
