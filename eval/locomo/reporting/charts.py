"""Two charts that several sections share: estimates one below the other, and lines with their names at the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from .arm_names import ArmName
from .contents import format_interval, format_number
from .drawing import grid
from .palette import LIGHT, colour_of
from .scores import Estimate

ROW_INCHES = 0.27


class Mark(NamedTuple):
    """A mark's shape, and how it is written."""

    shape: str
    filled: str
    hollow: str


MARKS = (Mark("o", "●", "○"), Mark("s", "■", "□"), Mark("^", "▲", "△"), Mark("D", "◆", "◇"), Mark("v", "▼", "▽"))


@dataclass(frozen=True, slots=True)
class Row:
    """One estimate of a forest plot."""

    arm: ArmName
    label: str
    value: Estimate


@dataclass(frozen=True, slots=True)
class Line:
    """One series over k, length or load; points are in ascending order of x."""

    arm: ArmName
    label: str
    x: Sequence[float]
    y: Sequence[Estimate]


def forest(
    axes: Axes, rows: Sequence[Row], *, floors: Sequence[Estimate] = (), log: bool = False, digits: int = 3
) -> None:
    """Dots with intervals, one arm a row, the figures written at the right.

    `floors` are shaded behind all rows: what lies in one is no further off than a change that should not matter.
    """
    positions = range(len(rows))
    if log:
        _log_axis(axes, "x", [row.value for row in rows] + list(floors))
    for floor in floors:
        low, high = ends(floor)
        axes.axvspan(max(low, axes.get_xlim()[0]) if log else low, high, color=LIGHT["band"], alpha=0.28, linewidth=0)
        axes.axvline(floor.mean, color=LIGHT["band"], linewidth=1)
    left = axes.get_xlim()[0]
    for position, row in zip(positions, rows, strict=True):
        value, colour = row.value, colour_of(row.arm)
        if value.low is not None and value.high is not None:
            low = max(value.low, left) if log else value.low
            axes.plot([low, value.high], [position, position], color=colour, linewidth=2.2, solid_capstyle="butt")
        axes.plot(
            [max(value.mean, left) if log else value.mean],
            [position],
            marker="o",
            markersize=6.5,
            color=colour,
            markerfacecolor=LIGHT["surface"] if row.arm.placement == "head" else colour,
            clip_on=False,
            zorder=3,
        )
        written = " ".join(filter(None, (format_number(value.mean, digits), format_interval(value, digits))))
        axes.annotate(
            written,
            (1.02, position),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
            annotation_clip=False,
        )
    axes.set_yticks(list(positions), [row.label for row in rows])
    axes.tick_params(axis="y", labelcolor=LIGHT["ink"])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    grid(axes, along="x")


def lines(
    axes: Axes,
    series: Sequence[Line],
    *,
    floors: Sequence[Line] = (),
    log: bool = False,
    scale_with: Sequence[Estimate] = (),
) -> None:
    """Lines with error bars, each named at its end; dashed and hollow where the facts stand at the head.

    `floors` are shaded bands. The axis of y begins at zero, or is logarithmic and then reaches over `scale_with` too,
    for panels that share a scale. Lines of one colour differ by their marks, which stand before their names.
    """
    everything = [*scale_with, *(value for line in (*series, *floors) for value in line.y)]
    if log:
        _log_axis(axes, "y", everything)
    else:
        axes.set_ylim(0, max((ends(value)[1] for value in everything), default=0.0) * 1.08 or 1.0)
    bottom = axes.get_ylim()[0]
    for floor in floors:
        low, high = zip(*map(ends, floor.y), strict=True)
        axes.fill_between(floor.x, np.maximum(low, bottom), high, color=LIGHT["band"], alpha=0.28, linewidth=0)
        axes.plot(floor.x, [value.mean for value in floor.y], color=LIGHT["band"], linewidth=1)
    names = []
    for line, mark in zip(series, _marks(series), strict=True):
        means = np.maximum([value.mean for value in line.y], bottom)
        low, high = zip(*map(ends, line.y), strict=True)
        head = line.arm.placement == "head"
        axes.errorbar(
            line.x,
            means,
            yerr=[np.maximum(means - np.maximum(low, bottom), 0.0), np.maximum(high - means, 0.0)],
            color=colour_of(line.arm),
            linestyle="--" if head else "-",
            marker=MARKS[mark].shape,
            markerfacecolor=LIGHT["surface"] if head else None,
            elinewidth=1.1,
            zorder=3,
        )
        glyph = MARKS[mark].hollow if head else MARKS[mark].filled
        names.append((f"{glyph} {line.label}", float(means[-1]), colour_of(line.arm)))
    names += [(floor.label, floor.y[-1].mean, LIGHT["muted"]) for floor in floors]
    axes.set_xticks(sparse({x for line in series for x in line.x}))
    grid(axes, along="y")
    _name_at_end(axes, names)


def sparse(values: Iterable[float]) -> list[float]:
    """Those of the values that can be written side by side on an axis that spans them all."""
    ordered = sorted(values)
    kept = ordered[:1]
    for value in ordered[1:]:
        if value - kept[-1] >= 0.03 * (ordered[-1] - ordered[0]):
            kept.append(value)
    return kept


def ends(value: Estimate) -> tuple[float, float]:
    """The interval, or the mean twice where there is none."""
    return (value.mean if value.low is None else value.low, value.mean if value.high is None else value.high)


def _marks(series: Sequence[Line]) -> list[int]:
    """For each line, how many before it have its colour."""
    colours = [colour_of(line.arm) for line in series]
    return [colours[:index].count(colour) % len(MARKS) for index, colour in enumerate(colours)]


def _name_at_end(axes: Axes, names: Sequence[tuple[str, float, str]]) -> None:
    """Write (text, y, colour) right of the plot, moved apart where names would lie on each other."""
    if not names:
        return
    figure = axes.get_figure(root=True)
    assert figure is not None
    step = 11.5 / (axes.get_position().height * figure.get_figheight() * 72)
    to_axes = axes.transData + axes.transAxes.inverted()
    ordered = sorted((float(to_axes.transform((0.0, y))[1]), text, colour) for text, y, colour in names)
    placed: list[float] = []
    for fraction, _, _ in ordered:
        placed.append(max(min(fraction, 1.0), placed[-1] + step if placed else 0.0))
    placed[-1] = min(placed[-1], 1.0)
    for index in range(len(placed) - 2, -1, -1):
        placed[index] = min(placed[index], placed[index + 1] - step)
    for (_, text, colour), fraction in zip(ordered, placed, strict=True):
        where = (1.025, fraction)
        axes.annotate(
            text, where, xycoords="axes fraction", va="center", fontsize=8.5, color=colour, annotation_clip=False
        )


def _log_axis(axes: Axes, which: str, values: Sequence[Estimate]) -> None:
    """Logarithmic, in plain numbers, wide enough for every interval; what is zero or less lies on the near edge."""
    known = [part for value in values for part in (value.mean, value.low, value.high) if part is not None and part > 0]
    low, high = (min(known) / 1.4, max(known) * 1.4) if known else (0.1, 1.0)
    axis = axes.xaxis if which == "x" else axes.yaxis
    if which == "x":
        axes.set_xscale("log")
        axes.set_xlim(low, high)
    else:
        axes.set_yscale("log")
        axes.set_ylim(low, high)
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 300 else (1.0, 3.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
