"""Sessions' KV between the pool and the disk, in the scheduler process.

The scheduler's thread copies out of the pool and writes into it; files are written by a thread of their own.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey

from memstore.kv.session_files import PART
from sgl_stateful.sessions.hold import Readback
from sgl_stateful.sessions.snapshot_file import (
    SnapshotDamaged,
    SnapshotHeader,
    read_header,
    read_layers,
    tokens_digest,
    write_snapshot,
)

from .kv_pool import KVPool

if TYPE_CHECKING:
    from .prefix_cache import StatefulRadixCache

logger = logging.getLogger(__name__)

_REMEMBERED = 1024  # outcomes that have not been asked for


class SnapshotUnusable(Exception):
    """The snapshot was not read, and the request is prefilled; the message is one word of a few."""


@dataclass(slots=True)
class _Job:
    """One file being written."""

    name: str
    header: SnapshotHeader
    is_dropped: bool = False
    error: str | None = None
    is_done: bool = False


class SessionKV:
    """Writes and reads snapshots. Belongs to the scheduler's thread.

    Parameters
    ----------
    fingerprint
        Of the model and the pool's layout.
    """

    def __init__(self, *, pool: KVPool, folder: Path, fingerprint: str) -> None:
        self.pool = pool
        self.folder = folder
        self._fingerprint = fingerprint
        self._weights: str | None = ""
        self._jobs: dict[str, _Job] = {}
        self._lock = threading.Lock()  # of what jobs have become, and of the last step of writing
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="sgl-stateful snapshot")

    def fence(self, weights: str | None) -> None:
        """From now on KV is of these weights, in addition to the fingerprint; None: they are being changed."""
        if weights == self._weights:
            return
        self._weights = weights
        self.drop(list(self._jobs))

    # ---- writing ----

    def write(self, name: str, token_ids: Sequence[int], slots: torch.Tensor) -> Mapping[str, Any]:
        """Copy the KV of ``token_ids``, which is in ``slots``, and have it written; see ``state``."""
        if self._weights is None or (name in self._jobs and not self._jobs[name].is_done):
            return {"state": "failed", "error": "weights are being changed, or it is being written already"}
        keys, values = self.pool.read_as_served(slots)
        header = SnapshotHeader(
            fingerprint=self._fingerprint + self._weights,
            tokens_digest=tokens_digest(token_ids),
            shape=(keys.shape[0], keys.shape[1], keys.shape[2], keys.shape[3]),
            dtype=str(keys.dtype).removeprefix("torch."),
        )
        job = self._jobs[name] = _Job(name, header)
        while len(self._jobs) > _REMEMBERED:
            del self._jobs[next(iter(self._jobs))]
        self._writer.submit(self._write, job, keys, values)
        return self.state(name)

    def _write(self, job: _Job, keys: torch.Tensor, values: torch.Tensor) -> None:
        part = self.folder / (job.name + PART)
        try:
            if not job.is_dropped:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_snapshot(part, job.name, job.header, keys, values)
            with self._lock:  # who drops a job knows that nothing appears under its name afterwards
                if job.is_dropped:
                    part.unlink(missing_ok=True)
                else:
                    part.replace(self.folder / job.name)
        except Exception as error:
            # Nobody waits for this thread: what went wrong is told to who asks.
            job.error = f"{type(error).__name__}: {error}"
            part.unlink(missing_ok=True)
        finally:
            job.is_done = True

    def state(self, name: str) -> Mapping[str, Any]:
        """What has become of a file: ``writing``, ``written``, ``dropped``, ``failed``; forgotten once it is told."""
        job = self._jobs.get(name)
        if job is None or job.is_dropped:
            return {"state": "dropped"}
        if not job.is_done:
            return {"state": "writing"}
        del self._jobs[name]
        if job.error is not None:
            return {"state": "failed", "error": job.error}
        header = job.header
        return {
            "state": "written",
            "fingerprint": header.fingerprint,
            "tokens_digest": header.tokens_digest,
            "shape": header.shape,
            "dtype": header.dtype,
        }

    def drop(self, names: Sequence[str]) -> int:
        """Let nothing appear under these names that is being written now; returns how many were."""
        with self._lock:
            jobs = [job for name in names if (job := self._jobs.pop(name, None)) is not None and not job.is_done]
            for job in jobs:
                job.is_dropped = True
        return len(jobs)

    # ---- reading ----

    def read(self, readback: Readback, token_ids: array[int], slots: torch.Tensor, start: int) -> int:
        """Write the KV of tokens ``[start, start + num_slots)`` of a request into ``slots``; returns bytes read.

        Raises
        ------
        SnapshotUnusable
            ``slots`` may have been written in part.
        """
        path = self.folder / readback.name
        if path.parent != self.folder:
            raise SnapshotUnusable("absent")
        try:
            header = read_header(path)
            self._check(header, token_ids, start + len(slots))
            self.pool.write_as_served(slots, read_layers(path), first=start)
        except OSError as error:
            logger.warning("the snapshot %s cannot be read: %s", readback.name, error)
            raise SnapshotUnusable("absent") from error
        except SnapshotDamaged as error:
            logger.warning("a session's snapshot is damaged, its tokens are prefilled: %s", error)
            raise SnapshotUnusable("damaged") from error
        return header.payload_bytes

    def _check(self, header: SnapshotHeader, token_ids: array[int], end: int) -> None:
        pool = self.pool
        layout = (pool.num_layers, header.num_tokens, pool.num_kv_heads, pool.head_dim)
        if self._weights is None or header.fingerprint != self._fingerprint + self._weights:
            raise SnapshotUnusable("other_fingerprint")
        if header.shape != layout or header.dtype != str(pool.dtype).removeprefix("torch."):
            raise SnapshotUnusable("other_fingerprint")
        if header.num_tokens < end or tokens_digest(token_ids[: header.num_tokens]) != header.tokens_digest:
            raise SnapshotUnusable("other_tokens")


def load_snapshot(
    cache: StatefulRadixCache, kv: SessionKV, readback: Readback, token_ids: array[int], *, start: int, end: int
) -> tuple[torch.Tensor, Mapping[str, Any]]:
    """Slots of the request's own ``[end - start]`` with the KV of its tokens ``[start, end)``, and what to report.

    Raises
    ------
    SnapshotUnusable
        Nothing is held then.
    """
    began = time.perf_counter()
    allocator = cache.token_to_kv_pool_allocator
    if (short := end - start - allocator.available_size()) > 0:
        cache.evict(EvictParams(num_tokens=short))
    slots = allocator.alloc(end - start)
    if slots is None:
        raise SnapshotUnusable("pool_full")
    slots = slots.to(torch.int64)
    try:
        num_bytes = kv.read(readback, token_ids, slots, start)
    except BaseException:
        allocator.free(slots)
        raise
    ms = 1e3 * (time.perf_counter() - began)
    return slots, {"state": "read", "tokens": end - start, "bytes": num_bytes, "ms": ms}


def cached_tokens(cache: StatefulRadixCache, body: dict[str, Any]) -> int:
    """How many of ``token_ids`` the pool has under ``salt``, from the first on."""
    return int(_match(cache, body)[1].device_prefix_len)


def _match(cache: StatefulRadixCache, body: dict[str, Any]) -> tuple[array[int], MatchResult]:
    ids = array("q", body["token_ids"])
    key = RadixKey(ids, None, is_bigram=cache.tree_core.is_eagle, cache_salt=body["salt"])
    return ids, cache.match_prefix(MatchPrefixParams(key=key))


def snapshot_control(cache: StatefulRadixCache, op: str, body: dict[str, Any]) -> dict[str, Any]:
    """Answer ``snapshot_write``, ``snapshot_state``, ``snapshot_drop`` or ``snapshot_fence``.

    ``snapshot_write`` writes nothing where less than ``least_tokens`` would be in the file, and with ``look`` only says
    how many would be.
    """
    kv = cache.session_kv
    if kv is None:
        return {"state": "dropped"}
    match op:
        case "snapshot_write":
            ids, match = _match(cache, body)
            tokens = match.device_prefix_len
            if tokens < max(body["least_tokens"], 1):
                return {"state": "not_in_pool"}
            if body.get("look"):
                return {"state": "in_pool", "tokens": tokens}
            slots = cache.path_device_indices(match.last_device_node)[:tokens]
            return dict(kv.write(body["name"], ids[:tokens], slots))
        case "snapshot_state":
            return dict(kv.state(body["name"]))
        case "snapshot_drop":
            return {"dropped": kv.drop(body["names"])}
        case _:
            kv.fence(body["weights"])
            return {}
