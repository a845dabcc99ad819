"""Canvases for charts, and their export as PNG and as SVG for a page."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from .contents import Figure
from .palette import LIGHT, as_variables

WIDTH_INCHES = 7.0
PNG_DOTS_PER_INCH = 200
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.labelsize": 9,
    "axes.labelcolor": LIGHT["muted"],
    "axes.edgecolor": LIGHT["rule"],
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "text.color": LIGHT["ink"],
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "grid.color": LIGHT["rule"],
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "locomo",
    "figure.constrained_layout.use": True,
}


@contextmanager
def canvas(height_inches: float) -> Iterator[Canvas]:
    """Draw in the page's style; the same input always gives the same bytes."""
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        yield Canvas(figsize=(WIDTH_INCHES, height_inches))


def export(drawn: Canvas, name: str, *, alt: str, caption: str) -> Figure:
    """Both forms of a chart; call it inside `canvas`, whose style the export needs."""
    png, svg = io.BytesIO(), io.StringIO()
    drawn.savefig(png, format="png", dpi=PNG_DOTS_PER_INCH, facecolor=LIGHT["surface"], metadata={"Software": None})
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    drawn.savefig(svg, format="svg", facecolor="none", metadata=nothing)
    return Figure(name, alt, caption, png.getvalue(), for_page(svg.getvalue(), name=name))


def for_page(svg: str, *, name: str) -> str:
    """Make a drawing part of a page: colours by variable, the page's font, ids that no other drawing has."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r'\1 aria-hidden="true"', svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"([^>]*?) width="[^"]*"', r'\1\2 aria-hidden="true"', svg, count=1)
    svg = svg.replace("'DejaVu Sans'", "var(--sans)")
    return as_variables(svg).strip()


def grid(axes: Axes, *, along: str) -> None:
    """Faint lines across the axis that carries the numbers (``x`` or ``y``), and a base line at the other."""
    axes.grid(True, axis="x" if along == "x" else "y")
    if along == "x":
        axes.spines["bottom"].set_visible(False)
