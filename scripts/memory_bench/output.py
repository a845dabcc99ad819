"""The file of a benchmark's bars and rows, whole after every step of a measurement."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from locomo.errors import RunError
from locomo.whole_file import write_whole

Bars = Mapping[str, float | None]
Intervals = Mapping[str, tuple[float, float]]
Row = Mapping[str, Any]
_STARTED = time.monotonic()


def say(line: str) -> None:
    """What is going on, with the time since the start."""
    print(f"{time.monotonic() - _STARTED:4.0f} s  {line}", file=sys.stderr, flush=True)


class Output:
    """Takes the rows as they come; a measurement that is ended has in its file what was measured until then.

    Parameters
    ----------
    path
        None writes nothing.
    bars
        Names; each is null until the measurement has finished, and where it is not ``official``.
    meta
        What the rows were measured on.

    Raises
    ------
    RunError
        The file cannot be written: at once, before anything is measured, and from every write.
    """

    def __init__(self, path: Path | None, *, bars: Sequence[str], meta: Mapping[str, Any], official: bool) -> None:
        self._path = path
        self._bars: dict[str, float | list[float] | None] = dict.fromkeys(bars)
        self._official = official
        self.meta = dict(meta)
        self.rows: Sequence[Row] = ()
        if path is not None:
            _require_writable(path)

    def write(self, rows: Sequence[Row]) -> None:
        """Put these rows in place of those before."""
        self.rows = rows
        self._write(is_finished=False)

    def finish(self, rows: Sequence[Row], bars: Bars, intervals: Intervals | None = None) -> None:
        """Write the last rows with the bars, and print the bars; a bar's 95 % interval is ``<bar>_interval``."""
        self.rows = rows
        assert bars.keys() == self._bars.keys(), bars
        if self._official:
            self._bars |= bars
            self._bars |= {f"{bar}_interval": list(interval) for bar, interval in (intervals or {}).items()}
        self._write(is_finished=True)
        print(json.dumps(self._bars))

    def describe(self) -> str:
        """What of the measurement is kept, and where."""
        if self._path is None:
            return f"{len(self.rows)} rows are lost, without --json"
        return f"{len(self.rows)} rows are in {self._path}"

    def _write(self, *, is_finished: bool) -> None:
        if self._path is None:
            return
        meta = self.meta | {"finished": is_finished, "took_s": round(time.monotonic() - _STARTED)}
        found = {"bars": self._bars, "rows": list(self.rows), "meta": meta}
        write_whole(self._path, json.dumps(found, indent=1) + "\n")


def _require_writable(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise RunError(f"cannot write {path}: it is no file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
