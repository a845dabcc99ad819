"""Time to the first token against the length of the stream, one line an arm."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from sessions_bench.measure import percentile

from locomo.reporting.drawing import PNG_DOTS_PER_INCH, canvas, grid
from locomo.reporting.palette import LIGHT

from .clients import Sample

NAMES = {
    "stock": ("stock SGLang, prompt resent", "blue", "o"),
    "query": ("session query", "green", "s"),
    "entry": ("pre-positioned entry, its end prefilled", "purple", "^"),
    "ahead": ("pre-positioned entry, answer gone on with", "orange", "v"),
    "flash": ("flash hit", "vermillion", "D"),
}


def draw(samples: Mapping[tuple[str, int], Sequence[Sample]], path: Path) -> None:
    """Write a PNG of medians, with the middle half of the samples as a band.

    Parameters
    ----------
    samples
        By arm and length in tokens; arms without a name here are left out.
    """
    with canvas(3.6) as drawn:
        axes = drawn.subplots()
        for arm, (label, colour, mark) in NAMES.items():
            lengths = sorted(length for name, length in samples if name == arm)
            if not lengths:
                continue
            times = [[sample.ttft_ms for sample in samples[arm, length]] for length in lengths]
            middle = [statistics.median(one) for one in times]
            axes.fill_between(
                lengths,
                [percentile(one, 25) for one in times],
                [percentile(one, 75) for one in times],
                color=LIGHT[colour],
                alpha=0.18,
                linewidth=0,
            )
            axes.plot(lengths, middle, f"{mark}-", color=LIGHT[colour], label=label)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda ms, _: f"{ms:,g}")  # powers would need the math that the style leaves out
        axes.set_xlabel("length of the stream, tokens")
        axes.set_ylabel("time to the first token, ms")
        axes.legend(frameon=False, fontsize=8)
        grid(axes, along="y")
        drawn.savefig(path, format="png", dpi=PNG_DOTS_PER_INCH, facecolor=LIGHT["surface"])
