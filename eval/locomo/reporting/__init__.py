"""What a run found, as one page to read and figures to show; and two runs beside each other."""

from .page import BENCHES, write_report
from .scores import read_object

__all__ = ["BENCHES", "read_object", "write_report"]
