"""Verdicts by content: a question that was judged is not asked again, whatever arm gave the answer."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from locomo.errors import VerdictCacheError
from locomo.judging.verdict import Verdict


@dataclass(frozen=True, slots=True)
class StoredVerdict:
    """One line of the file: what was decided, by which model as the endpoint named it, and its words."""

    key: str
    verdict: Verdict
    model: str
    reply: str


def verdict_key(*, endpoint: str, prompt: str, model: str, question: str, gold: str, prediction: str, run: int) -> str:
    """SHA-256, hex, of all that a verdict depends on; `endpoint` is its address, `prompt` the unfilled template."""
    content = json.dumps([endpoint, prompt, model, question, gold, prediction, run], ensure_ascii=False)
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()


class VerdictCache:
    """An append-only JSONL file of `StoredVerdict`, one process at a time.

    A line is on the disk when `put` returns. A last line that a crash left torn is cut off when the file is opened.

    Raises
    ------
    VerdictCacheError
        On opening: the file cannot be opened, another process has it, or a line before the last is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._verdicts: dict[str, StoredVerdict] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise VerdictCacheError(f"cannot open {path}: {error.strerror}") from error
        try:
            self._end = self._load()
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> VerdictCache:
        """Return the cache."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()

    def __len__(self) -> int:
        """Return how many verdicts there are."""
        return len(self._verdicts)

    def close(self) -> None:
        """Close the file and let another process have it."""
        os.close(self._file)

    def get(self, key: str) -> StoredVerdict | None:
        """Look a verdict up."""
        return self._verdicts.get(key)

    def put(self, stored: StoredVerdict) -> None:
        """Append a verdict.

        Raises
        ------
        VerdictCacheError
            It cannot be written (disk full); the lines before it are whole.
        """
        line = (json.dumps(asdict(stored), ensure_ascii=True) + "\n").encode()
        with self._lock:
            try:
                written = os.write(self._file, line)
                while written < len(line):
                    written += os.write(self._file, line[written:])
                os.fsync(self._file)
            except OSError as error:
                os.ftruncate(self._file, self._end)
                message = f"cannot write {self._path}: {error.strerror}; {len(self)} verdicts are kept"
                raise VerdictCacheError(message) from error
            self._end += len(line)
            self._verdicts[stored.key] = stored

    def _load(self) -> int:
        """Fill the table from the file and return where the next line begins."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise VerdictCacheError(f"{self._path} is in use by another process") from error
        content = self._path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.ftruncate(self._file, whole)
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                fields = json.loads(line)
                stored = StoredVerdict(**{**fields, "verdict": Verdict(fields["verdict"])})
            except (ValueError, TypeError, LookupError) as error:
                message = f"{self._path}, line {number}, is no verdict ({error}): move the file away to judge anew"
                raise VerdictCacheError(message) from error
            self._verdicts[stored.key] = stored
        return whole
