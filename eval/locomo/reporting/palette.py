"""The colours of page and charts: Okabe and Ito's, which colour-blind readers tell apart, in a light and a dark tone.

Charts are drawn in the light tones; on the page each becomes a CSS variable, which is how a chart follows the reader's
choice of light or dark without being drawn twice.
"""

from __future__ import annotations

from collections.abc import Mapping

from .arm_names import ArmName

LIGHT: Mapping[str, str] = {
    "surface": "#fefefe",
    "ink": "#1c2127",
    "muted": "#5b6570",
    "rule": "#dde1e6",
    "band": "#98a2ad",
    "blue": "#0072b2",
    "sky": "#56b4e9",
    "green": "#009e73",
    "vermillion": "#d55e00",
    "purple": "#b5659a",
    "orange": "#e69f00",
    "grey": "#747d88",
}
DARK: Mapping[str, str] = {
    "surface": "#14171b",
    "ink": "#e9ebee",
    "muted": "#a4adb7",
    "rule": "#363d45",
    "band": "#6d7782",
    "blue": "#4aa8e0",
    "sky": "#8fd0f5",
    "green": "#2bc296",
    "vermillion": "#f58742",
    "purple": "#d791bd",
    "orange": "#f2bd4b",
    "grey": "#959fa9",
}
FAMILY_COLOURS = {"window": "green", "anchor": "purple", "ladder": "vermillion"}
KIND_COLOURS = {"text": "blue", "full": "ink", "none": "grey", "floor": "grey", "splice": "vermillion"}
PARTS = {"retrieve": "orange", "assemble": "sky", "splice": "vermillion", "prefill": "blue", "other": "band"}


def colour_of(arm: ArmName) -> str:
    """The hex colour of an arm: one per way to give the model its facts; placement is told by the mark instead."""
    name = FAMILY_COLOURS.get(arm.family or "") or KIND_COLOURS.get(arm.kind, "ink")
    return LIGHT[name]


def as_variables(svg: str) -> str:
    """The drawing with each colour of the palette as the page's variable of its name."""
    for name, colour in LIGHT.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg
