"""The fact arena: one copy of each encoded fact in memory, shared by every request that splices it.

Two slabs, keys and values, each ``[num_layers, capacity_tokens, num_kv_heads, head_dim]``. A fact owns rows of the
slabs; rows are handed out as few runs as possible, because the splice copies a run faster than single rows. The least
recently used facts make room for new ones.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import OrderedDict
from typing import NamedTuple

import torch

from memstore import EncodingId


class ArenaFullError(Exception):
    """A fact does not fit, even with every other fact dropped that the current request does not need."""


class ArenaStats(NamedTuple):
    """Occupancy and traffic of the arena; tokens and bytes count keys and values of all layers."""

    facts: int
    tokens: int
    capacity_tokens: int
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
        Upper bound for both slabs together. Memory is touched as facts arrive.
    num_layers, num_kv_heads, head_dim
        Shape of one token's keys, and of its values.
    dtype, device
        Of both slabs; the KV pool's own.
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
        self.bytes_per_token = 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize
        self.capacity_tokens = budget_bytes // self.bytes_per_token
        shape = (num_layers, self.capacity_tokens, num_kv_heads, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)  # before rotation
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self._rows: OrderedDict[EncodingId, torch.Tensor] = OrderedDict()
        self._token_ids: dict[EncodingId, array[int]] = {}
        self._free: list[tuple[int, int]] = [(0, self.capacity_tokens)] if self.capacity_tokens else []
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
        return rows

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
    ) -> torch.Tensor:
        """Copy a fact in, dropping old facts other than ``keep`` where room is needed.

        Parameters
        ----------
        keys, values
            ``[num_layers, num_tokens, num_kv_heads, head_dim]``, keys before rotation.

        Returns
        -------
        The fact's rows ``[num_tokens]``, int64.

        Raises
        ------
        ArenaFullError
            The fact does not fit beside ``keep``; nothing was dropped for it.
        """
        num_tokens = keys.shape[1]
        self.drop(encoding_id)
        kept = sum(len(rows) for name, rows in self._rows.items() if name in keep)
        if num_tokens > self.capacity_tokens - kept:
            raise ArenaFullError(
                f"{num_tokens} tokens do not fit: {self.free_tokens} of {self.capacity_tokens} are free"
            )
        self._make_room(num_tokens, keep)
        rows = self._take(num_tokens)
        self.keys[:, rows] = keys.to(self.keys)
        self.values[:, rows] = values.to(self.values)
        self._rows[encoding_id] = rows
        self._token_ids[encoding_id] = token_ids
        return rows

    def fits_free(self, num_tokens: int) -> bool:
        """Whether a fact of that length fits without dropping another."""
        return self.free_tokens >= num_tokens

    @property
    def free_tokens(self) -> int:
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
        self._free = [(0, self.capacity_tokens)] if self.capacity_tokens else []

    def stats(self) -> ArenaStats:
        """Occupancy and traffic so far."""
        tokens = self.capacity_tokens - self.free_tokens
        return ArenaStats(
            facts=len(self._rows),
            tokens=tokens,
            capacity_tokens=self.capacity_tokens,
            bytes=tokens * self.bytes_per_token,
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
        )

    def _make_room(self, num_tokens: int, keep: frozenset[EncodingId]) -> None:
        while self.free_tokens < num_tokens:
            self.drop(next(e for e in self._rows if e not in keep))
            self._evictions += 1

    def _take(self, num_tokens: int) -> torch.Tensor:
        """Take rows: one run where a run is long enough, else the first runs that add up."""
        whole = next((i for i, (start, end) in enumerate(self._free) if end - start >= num_tokens), None)
        pieces: list[torch.Tensor] = []
        while num_tokens:
            i = 0 if whole is None else whole
            start, end = self._free[i]
            taken = min(end - start, num_tokens)
            pieces.append(torch.arange(start, start + taken))
            if start + taken == end:
                del self._free[i]
            else:
                self._free[i] = (start + taken, end)
            num_tokens -= taken
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)

    def _give_back(self, rows: torch.Tensor) -> None:
        ids = rows.tolist()
        start = 0
        for i in range(1, len(ids) + 1):
            if i == len(ids) or ids[i] != ids[i - 1] + 1:
                insort(self._free, (ids[start], ids[i - 1] + 1))
                start = i
        merged: list[tuple[int, int]] = []
        for run in self._free:
            if merged and merged[-1][1] == run[0]:
                merged[-1] = (merged[-1][0], run[1])
            else:
                merged.append(run)
        self._free = merged
