"""A run's folder: its config, written first, and its rows, one JSON object a line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from locomo.errors import ConfigError, RunError
from locomo.runs.config import RunConfig

Key = tuple[str, int]


class RunFolder:
    """Rows of one run on disk; a row that was written stays.

    Parameters
    ----------
    path
        The folder; made where there is none.

    Raises
    ------
    RunError
        From every call: the folder cannot be read or written. What was written so far is kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._config = path / "config.json"
        self._rows = path / "rows.jsonl"

    def begin(self, config: RunConfig, header: Mapping[str, Any]) -> dict[str, Any]:
        """Write config and header, or go on with the run that is there; returns the header that stays.

        Raises
        ------
        ConfigError
            The folder holds a run of another config, of other data, another model or another wording.
        """
        if self._config.exists():
            stored = self.read_config()
            _refuse_another(stored["config"], config.as_json(), self.path)
            _refuse_another(_identity(stored["header"]), _identity(header), self.path)
            self._repair()
            kept: dict[str, Any] = stored["header"]
            return kept
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"config": config.as_json(), "header": dict(header)}, indent=1, ensure_ascii=False)
            draft = self._config.with_suffix(".tmp")
            draft.write_text(text + "\n")
            draft.replace(self._config)
        except OSError as error:
            raise RunError(f"cannot write {self._config}: {error}") from error
        return dict(header)

    def read_config(self) -> dict[str, Any]:
        """``{"config": ..., "header": ...}``."""
        try:
            found: dict[str, Any] = json.loads(self._config.read_text())
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path} holds no run: {error}") from error
        return found

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every row, in the order of writing; a last line that was not written to its end is left out."""
        if not self._rows.exists():
            return
        with self._rows.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise RunError(f"{self._rows}, line {number}, is not JSON: {error}") from error

    def done(self) -> set[Key]:
        """Questions that have their row."""
        return {(row["sample_id"], row["index"]) for row in self.rows()}

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row to the disk."""
        line = json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        end = self._rows.stat().st_size if self._rows.exists() else 0
        try:
            with self._rows.open("ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            with suppress(OSError):  # what cannot be cut off now is cut off when the run goes on
                os.truncate(self._rows, end)
            raise RunError(f"cannot write {self._rows}: {error}; run again to go on behind the rows before") from error

    def _repair(self) -> None:
        """Cut off a last line that was not written to its end."""
        if not self._rows.exists():
            return
        try:
            with self._rows.open("r+b") as file:
                content = file.read()
                file.truncate(content.rfind(b"\n") + 1)
        except OSError as error:
            raise RunError(f"cannot repair {self._rows}: {error}") from error


def _identity(header: Mapping[str, Any]) -> dict[str, Any]:
    """What two headers of one run have in common, whatever was restarted between."""
    return {name: header.get(name) for name in ("data_sha256", "prompt_sha256", "model_fingerprint")}


def _refuse_another(stored: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    # Through JSON, so that what was read and what would be written are alike.
    stored, wanted = json.loads(json.dumps(stored)), json.loads(json.dumps(wanted))
    differing = [name for name in wanted if stored.get(name) != wanted[name]]
    if differing:
        parts = "; ".join(f"{name}: {stored.get(name)!r} there, {wanted[name]!r} now" for name in differing)
        raise ConfigError(f"{path} holds another run ({parts}): choose another folder")
