"""Quality against time: one point per arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from locomo.reporting.drawing import PNG_DOTS_PER_INCH, canvas, grid
from locomo.reporting.palette import LIGHT

_MARKS = "os^Dv"


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG: KL over the floor's against time to the first token over full prefill's, a panel per k."""
    ks = sorted({row["k"] for row in rows})
    with canvas(3.0 * len(ks)) as drawn:
        for number, (k, axes) in enumerate(zip(ks, drawn.subplots(len(ks), 1, squeeze=False)[:, 0], strict=True)):
            shown = [row for row in rows if row["k"] == k and row["kl_over_floor"]]
            for row in shown:
                x, estimate = row["ttft_over_text"], row["kl_over_floor"]
                y, interval = max(estimate["mean"], 1e-3), estimate["interval"]
                if interval:
                    axes.plot([x, x], [max(bound, 1e-3) for bound in interval], color=LIGHT["muted"], linewidth=0.8)
                axes.plot([x], [y], _MARKS[number % len(_MARKS)], color=LIGHT["ink"])
                axes.annotate(row["arm"], (x, y), xytext=(5, 3), textcoords="offset points", fontsize=7.5)
            axes.axhline(1.0, color=LIGHT["muted"], linewidth=0.8, linestyle="--")
            axes.set_yscale("log")
            axes.set_title(f"k = {k}")
            axes.set_ylabel("KL ÷ the floor's")
            grid(axes, along="y")
        axes.set_xlabel("time to the first token ÷ full prefill's")
        drawn.savefig(path, format="png", dpi=PNG_DOTS_PER_INCH, facecolor=LIGHT["surface"])
