"""What a run found, as one page to read and figures to show; and runs beside each other."""

from .comparison import Pair, compare
from .comparison_tables import render, write_comparison
from .measures import Measured, Run
from .page import BENCHES, write_report
from .scores import read_object

__all__ = [
    "BENCHES",
    "Measured",
    "Pair",
    "Run",
    "compare",
    "read_object",
    "render",
    "write_comparison",
    "write_report",
]
