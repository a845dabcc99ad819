"""A run's folder: its config, written first, and its rows, one JSON object a line."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from locomo.errors import ConfigError, RunError
from locomo.runs.config import RunConfig
from locomo.whole_file import write_whole

Key = tuple[str, int]

IDENTITY = ("data_sha256", "prompt_sha256", "model_fingerprint", "embedder")
"""What the headers of all starts of one run have in common."""

COUNTS = ("facts", "fact_tokens", "tokens_prefilled", "bytes")
"""What ``encoding.json`` has of each policy: facts encoded, their tokens, tokens computed for that, bytes of KV."""

# What may change between two starts, with a warning: it decides times, and answers in their last digits.
_WARNED = ("commit", "versions", "python", "machine", "threads", "server_flags", "system")
_MEASURED = "self_test"  # of the system: figures of each start, which never are the same


class RunFolder:
    """Rows of one run on disk; a row that was written stays.

    ========================  ==========================================================================
    ``config.json``           ``{"config": ..., "header": ...}``, of the first start
    ``starts.jsonl``          the header of every start, with its time under ``started`` (UTC, ISO 8601)
    ``rows.jsonl``            one object a question
    ``encoding.json``         by policy, what encoding has cost over all starts: `COUNTS`
    ========================  ==========================================================================

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
        self._starts = path / "starts.jsonl"
        self._rows = path / "rows.jsonl"
        self._encoding = path / "encoding.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from running in this folder, which is made where there is none.

        Raises
        ------
        RunError
            Another process runs there, or there can be no such folder.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            opened = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise RunError(f"{self.path} can be no run's folder: {error.strerror or error}") from error
        try:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RunError(f"{self.path} is in use: another process runs there") from error
            yield
        finally:
            os.close(opened)

    def check(self, config: RunConfig, known: Mapping[str, Any]) -> None:
        """Refuse what the folder cannot go on with, from what is known of the header before a server is asked.

        Raises
        ------
        ConfigError
            The folder holds a run of another config, or one whose header has other values under the names in ``known``.
        """
        if not self._config.exists():
            return
        stored = self.read_config()
        _refuse_another(stored["config"], config.as_json(), self.path)
        _refuse_another({name: stored["header"].get(name) for name in known}, known, self.path)

    def begin(self, config: RunConfig, header: Mapping[str, Any]) -> list[str]:
        """Write config and header, or go on with the run that is there, whose config and header stay.

        Returns
        -------
        list of str
            What of the header is not as it was at the first start and may change times or answers, in words.

        Raises
        ------
        ConfigError
            The folder holds a run of another config, or of other data, another model, embedder or wording.
        """
        differences: list[str] = []
        if self._config.exists():
            self.check(config, {name: header.get(name) for name in IDENTITY})
            differences = _differences(self.read_config()["header"], header)
            self._repair(self._rows)
            self._repair(self._starts)
        else:
            stored = {"config": config.as_json(), "header": dict(header)}
            write_whole(self._config, json.dumps(stored, indent=1, ensure_ascii=False) + "\n")
        started = datetime.now(UTC).isoformat(timespec="seconds")
        self._append(self._starts, {"started": started, **header})
        return differences

    def read_config(self) -> dict[str, Any]:
        """``{"config": ..., "header": ...}``."""
        try:
            found: dict[str, Any] = json.loads(self._config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path} holds no run: {error}") from error
        if not (isinstance(found, dict) and all(isinstance(found.get(part), dict) for part in ("config", "header"))):
            raise RunError(f"{self._config} is no run's config")
        return found

    def encodings(self) -> dict[str, dict[str, float]]:
        """What encoding has cost over all starts so far, by policy and count; empty before the first one."""
        if not self._encoding.exists():
            return {}
        try:
            found: dict[str, dict[str, float]] = json.loads(self._encoding.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"cannot read {self._encoding}: {error}") from error
        return found

    def write_encodings(self, counts: Mapping[str, Mapping[str, float]]) -> None:
        """Replace what `encodings` gives."""
        write_whole(self._encoding, json.dumps(counts, indent=1) + "\n")

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every row, in the order of writing; a last line that was not written to its end is left out."""
        if not self._rows.exists():
            return
        try:
            with self._rows.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if not line.endswith(b"\n"):
                        return
                    yield self._parsed(line, number)
        except OSError as error:
            raise RunError(f"cannot read {self._rows}: {error.strerror or error}") from error

    def _parsed(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise RunError(f"{self._rows}, line {number}, is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise RunError(f"{self._rows}, line {number}, is no row of a run")
        return row

    def done(self) -> set[Key]:
        """Questions that have their row."""
        try:
            return {(row["sample_id"], row["index"]) for row in self.rows()}
        except (KeyError, TypeError) as error:
            raise RunError(f"{self._rows} has a row of no question") from error

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row to the disk."""
        self._append(self._rows, row)

    def _append(self, path: Path, row: Mapping[str, Any]) -> None:
        line = json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace") + b"\n"
        end = None
        try:
            with path.open("ab") as file:
                end = file.tell()
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if end is not None:
                with suppress(OSError):  # what cannot be cut off now is cut off when the run goes on
                    os.truncate(path, end)
            reason = error.strerror or error
            raise RunError(f"cannot write {path}: {reason}; run again to go on behind the rows before") from error

    def _repair(self, path: Path) -> None:
        """Cut off a last line that was not written to its end."""
        if not path.exists():
            return
        try:
            with path.open("r+b") as file:
                content = file.read()
                file.truncate(content.rfind(b"\n") + 1)
        except OSError as error:
            raise RunError(f"cannot repair {path}: {error}") from error


def _differences(stored: Mapping[str, Any], header: Mapping[str, Any]) -> list[str]:
    was, now = (dict(_leaves({name: values.get(name) for name in _WARNED})) for values in (stored, header))
    names = [name for name in dict.fromkeys([*was, *now]) if not name.startswith(f"system.{_MEASURED}")]
    return [
        f"{name}: {was.get(name)!r} at first, {now.get(name)!r} now" for name in names if was.get(name) != now.get(name)
    ]


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    # Through JSON, so that what was read and what would be written are alike.
    for name, value in json.loads(json.dumps(values)).items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _refuse_another(stored: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    # Through JSON, so that what was read and what would be written are alike.
    stored, wanted = json.loads(json.dumps(stored)), json.loads(json.dumps(wanted))
    differing = [name for name in wanted if stored.get(name) != wanted[name]]
    if differing:
        parts = "; ".join(f"{name}: {stored.get(name)!r} there, {wanted[name]!r} now" for name in differing)
        raise ConfigError(f"{path} holds another run ({parts}): choose another folder")
