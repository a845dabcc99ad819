"""The folder with snapshots of sessions' KV, within a budget; and when reading one is faster than prefill."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from memstore.kv.session_files import PART, session_of
from memstore.session_log import SessionId

from .snapshot_file import SnapshotDamaged, SnapshotHeader, read_header

logger = logging.getLogger(__name__)

MIN_TOKENS = 256  # fewer are prefilled at once
_ABANDONED_S = 600.0  # nobody writes one file for so long
_RATE_HOLDS_S = 600.0
_WEIGHT_OF_LATEST = 0.5


class SnapshotFolder:
    """Snapshots on disk, one file a session. Every call may wait for the disk, and raises ``OSError``.

    Parameters
    ----------
    budget_bytes
        What the files may take together.
    """

    def __init__(self, path: Path, *, budget_bytes: int) -> None:
        self.path = path
        self._budget_bytes = budget_bytes

    def scan(self, fingerprint: str, *, weights: str = "") -> dict[SessionId, SnapshotHeader]:
        """Snapshots of this fingerprint by session; removes what nobody can read any more.

        That is what is damaged, what was abandoned half-written, and what is of weights that a server was given after
        its start: ``fingerprint`` and something behind it. A file that cannot be looked at is as good as none.

        Parameters
        ----------
        weights
            That something, where this server was given new weights already.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        found: dict[SessionId, SnapshotHeader] = {}
        for file in self.path.iterdir():
            if (session_id := session_of(file.name)) is None:
                continue
            try:
                header = self._readable(file)
                if header is None:
                    continue
                if header.fingerprint == fingerprint + weights:
                    found[session_id] = header
                elif header.fingerprint != fingerprint and header.fingerprint.startswith(fingerprint):
                    file.unlink(missing_ok=True)
            except FileNotFoundError:  # by another server
                continue
            except OSError as error:
                logger.warning("a snapshot cannot be looked at: %s", error)
        return found

    @staticmethod
    def _readable(file: Path) -> SnapshotHeader | None:
        """What a snapshot says of itself; removes it where it is damaged, or was abandoned."""
        if file.name.endswith(PART):
            if time.time() - file.stat().st_mtime > _ABANDONED_S:
                file.unlink(missing_ok=True)
            return None
        try:
            return read_header(file)
        except SnapshotDamaged as error:
            logger.warning("a snapshot is removed: %s", error)
            file.unlink(missing_ok=True)
            return None

    def names(self) -> list[str]:
        """Files of sessions, those being written included; none where there is no such folder yet."""
        try:
            return [file.name for file in self.path.iterdir() if session_of(file.name) is not None]
        except FileNotFoundError:
            return []

    def make_room(
        self, name: str, num_bytes: int, *, used_at: float, used: Mapping[SessionId, float]
    ) -> list[str] | None:
        """Remove what was used longest ago until one more file fits, and return its names; None where it does not fit.

        It gives way itself to what was used since. A former file of its name counts until the new one is there, and
        goes where both do not fit.

        Parameters
        ----------
        name, num_bytes, used_at
            Of that file, which takes the place of a former one of the same name.
        used
            When sessions were last used, seconds since 1970; of others the file's own time counts.
        """
        if num_bytes > self._budget_bytes:
            return None
        former = 0
        others: list[tuple[float, int, Path]] = []
        for file in self.path.iterdir():
            if (session_id := session_of(file.name)) is None or file.name == name + PART:
                continue
            try:
                stat = file.stat()
            except FileNotFoundError:  # by another server
                continue
            if file.name == name:
                former = stat.st_size
                continue
            others.append((used.get(session_id, stat.st_mtime), stat.st_size, file))
        over = num_bytes + sum(size for _, size, _ in others) - self._budget_bytes
        going: list[Path] = []
        for at, size, file in sorted(others):
            if over <= 0:
                break
            if at >= used_at:  # else two sessions would displace each other for ever
                return None
            going.append(file)
            over -= size
        if former and over + former > 0:
            going.append(self.path / name)
        for file in going:
            file.unlink(missing_ok=True)
        return [file.name for file in going]

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, and what is written under their names."""
        for name in names:
            for file in (name, name + PART):
                (self.path / file).unlink(missing_ok=True)

    def remove_orphans(self, names: Iterable[str], alive: Collection[SessionId]) -> int:
        """Remove those of the files whose session is not among ``alive``, or that were abandoned; returns how many.

        Raises
        ------
        OSError
            One of them cannot be removed; the others are.
        """
        orphans, failed = 0, None
        for name in names:
            try:
                if session_of(name) not in alive:
                    self.remove([name])
                    orphans += 1
                elif name.endswith(PART):
                    self._readable(self.path / name)
            except FileNotFoundError:  # by another server
                continue
            except OSError as error:
                failed = error
        if failed is not None:
            raise failed
        return orphans

    def touch(self, name: str, used_at: float) -> None:
        """The snapshot was used."""
        os.utime(self.path / name, (used_at, used_at))


@dataclass(slots=True)
class Rate:
    """Something by the second, as it was measured lately."""

    clock: Callable[[], float] = time.monotonic
    _value: float | None = None
    _at: float = 0.0

    def saw(self, amount: float, seconds: float) -> None:
        """Take a measurement."""
        latest = amount / max(seconds, 1e-6)
        former = self.value()
        self._value = latest if former is None else former + _WEIGHT_OF_LATEST * (latest - former)
        self._at = self.clock()

    def value(self) -> float | None:
        """By the second; None where there is no measurement, or none of the last ten minutes."""
        return self._value if self.clock() - self._at < _RATE_HOLDS_S else None


@dataclass(slots=True)
class Rates:
    """How fast prefill and reading are on this machine; what is not known is tried."""

    prefilled_tokens: Rate = field(default_factory=Rate)
    read_bytes: Rate = field(default_factory=Rate)

    def least_tokens(self, num_bytes: int) -> int:
        """From how many tokens on reading a file of ``num_bytes`` is expected to be faster than prefilling them."""
        prefill, read = self.prefilled_tokens.value(), self.read_bytes.value()
        if prefill is None or read is None:
            return MIN_TOKENS
        return max(MIN_TOKENS, math.ceil(num_bytes / read * prefill))
