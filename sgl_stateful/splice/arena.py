"""The fact arena: one copy of each encoded fact in memory, shared by every request that splices it.

A row is one token's keys and values in all layers. A fact owns rows; they are handed out as few runs as possible,
because the splice copies a run faster than single rows. The least recently used facts make room for new ones. What a
row is made of is in ``sgl_stateful.splice.slabs``.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import OrderedDict
from typing import NamedTuple

import torch

from kv_splice import ArenaScales, KVScales
from memstore import EncodingId

from .slabs import bytes_per_row, new_slabs, runs_of


class ArenaFullError(Exception):
    """A fact does not fit, even with every other fact dropped that the current request does not need."""


class ArenaStats(NamedTuple):
    """Occupancy and traffic of the arena; bytes count keys, values and scales of all layers.

    ``rows`` are taken, of ``capacity_rows``: one a token and, in int8, one a fact besides.
    """

    facts: int
    tokens: int
    rows: int
    capacity_rows: int
    bytes: int
    hits: int
    misses: int
    evictions: int


class FactArena:
    """Rows of encoded facts under a byte budget, least recently used first out.

    Not thread-safe: it belongs to the scheduler's thread.

    Parameters
    ----------
    budget_bytes
        Upper bound for all facts together. Memory is touched as facts arrive.
    num_layers, num_kv_heads, head_dim
        Shape of one token's keys, and of its values.
    dtype
        Of keys and values: the KV pool's own, or ``torch.int8``. Of int8, a fact has a row more than it has tokens, for
        the scales of its keys.
    device
        The KV pool's own.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.bytes_per_row = bytes_per_row(num_layers, num_kv_heads, head_dim, dtype=dtype)
        self.capacity_rows = budget_bytes // self.bytes_per_row
        self._slabs = new_slabs(
            self.capacity_rows,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
        )
        self.keys, self.values = self._slabs.keys, self._slabs.values
        self._rows: OrderedDict[EncodingId, torch.Tensor] = OrderedDict()
        self._token_ids: dict[EncodingId, array[int]] = {}
        self._free: list[tuple[int, int]] = [(0, self.capacity_rows)] if self.capacity_rows else []
        self._hits = self._misses = self._evictions = 0

    def __contains__(self, encoding_id: EncodingId) -> bool:
        return encoding_id in self._rows

    def ids(self) -> list[EncodingId]:
        """The facts that are present, the least recently used first."""
        return list(self._rows)

    def rows(self, encoding_id: EncodingId) -> torch.Tensor | None:
        """Rows ``[num_tokens]`` (int64, on the CPU) of a fact, marked as just used; None where it is absent."""
        rows = self._rows.get(encoding_id)
        if rows is None:
            self._misses += 1
            return None
        self._hits += 1
        self._rows.move_to_end(encoding_id)
        return rows[self._slabs.extra_rows :]

    @property
    def is_quantised(self) -> bool:
        """Whether facts are held in int8."""
        return self.keys.dtype == torch.int8

    def scales(self, rows: torch.Tensor) -> ArenaScales | None:
        """Scales for a splice of tokens out of ``rows``, which are on the arena's device; None where there are none."""
        return self._slabs.scales(rows)

    def token_ids(self, encoding_id: EncodingId) -> array[int]:
        """The tokens of a fact that is present."""
        return self._token_ids[encoding_id]

    def put(
        self,
        encoding_id: EncodingId,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        token_ids: array[int],
        keep: frozenset[EncodingId],
        scales: KVScales | None = None,
    ) -> torch.Tensor:
        """Copy a fact in, dropping old facts other than ``keep`` where room is needed.

        Parameters
        ----------
        keys, values
            ``[num_layers, num_tokens, num_kv_heads, head_dim]``, keys before rotation.
        scales
            Of keys and values in int8, which only an arena in int8 takes, and nothing else.

        Returns
        -------
        The fact's rows ``[num_tokens]``, int64.

        Raises
        ------
        ArenaFullError
            The fact does not fit beside ``keep``; nothing was dropped for it.
        """
        assert (scales is not None) == self.is_quantised, f"{keys.dtype} for an arena of {self.keys.dtype}"
        num_rows = keys.shape[1] + self._slabs.extra_rows
        self.drop(encoding_id)
        kept = sum(len(rows) for name, rows in self._rows.items() if name in keep)
        if num_rows > self.capacity_rows - kept:
            raise ArenaFullError(
                f"{keys.shape[1]} tokens take {num_rows} rows: {self.free_rows} of {self.capacity_rows} are free, "
                f"and {kept} are of facts that the request needs"
            )
        self._make_room(num_rows, keep)
        rows = self._take(num_rows)
        try:
            self._slabs.write(rows, keys, values, scales)
        except BaseException:
            self._give_back(rows)  # nobody else knows of them
            raise
        self._rows[encoding_id] = rows
        self._token_ids[encoding_id] = token_ids
        return rows[self._slabs.extra_rows :]

    def fits_free(self, num_tokens: int) -> bool:
        """Whether a fact of that length fits without dropping another."""
        return self.free_rows >= num_tokens + self._slabs.extra_rows

    @property
    def free_rows(self) -> int:
        """Rows that no fact owns."""
        return sum(end - start for start, end in self._free)

    def drop(self, encoding_id: EncodingId) -> bool:
        """Forget a fact; True where it was present."""
        rows = self._rows.pop(encoding_id, None)
        if rows is None:
            return False
        del self._token_ids[encoding_id]
        self._give_back(rows)
        return True

    def clear(self) -> None:
        """Forget everything."""
        self._rows.clear()
        self._token_ids.clear()
        self._free = [(0, self.capacity_rows)] if self.capacity_rows else []

    def stats(self) -> ArenaStats:
        """Occupancy and traffic so far."""
        rows = self.capacity_rows - self.free_rows
        return ArenaStats(
            facts=len(self._rows),
            tokens=rows - len(self._rows) * self._slabs.extra_rows,
            rows=rows,
            capacity_rows=self.capacity_rows,
            bytes=rows * self.bytes_per_row,
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
        )

    def _make_room(self, num_rows: int, keep: frozenset[EncodingId]) -> None:
        while self.free_rows < num_rows:
            oldest = next((e for e in self._rows if e not in keep), None)
            assert oldest is not None, (
                f"{self.free_rows} free rows of {self.capacity_rows}, {num_rows} wanted: some are lost"
            )
            self.drop(oldest)
            self._evictions += 1

    def _take(self, num_rows: int) -> torch.Tensor:
        """Take rows: one run where a run is long enough, else the first runs that add up."""
        whole = next((i for i, (start, end) in enumerate(self._free) if end - start >= num_rows), None)
        pieces: list[torch.Tensor] = []
        while num_rows:
            i = 0 if whole is None else whole
            start, end = self._free[i]
            taken = min(end - start, num_rows)
            pieces.append(torch.arange(start, start + taken))
            if start + taken == end:
                del self._free[i]
            else:
                self._free[i] = (start + taken, end)
            num_rows -= taken
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)

    def _give_back(self, rows: torch.Tensor) -> None:
        for run in runs_of(rows):
            insort(self._free, run)
        merged: list[tuple[int, int]] = []
        for run in self._free:
            if merged and merged[-1][1] == run[0]:
                merged[-1] = (merged[-1][0], run[1])
            else:
                merged.append(run)
        self._free = merged
