"""Facts that lie in pinned host memory: read by the kernel itself, or brought to the device layer by layer.

The kernel's own reads need no memory and no second stream, and are the first to arrive; copies by the device's copy
engine use the bus better once they are large. Where one overtakes the other depends on the machine, so it is measured.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kv_splice.facts import Facts, FactScales
from kv_splice.gpu.launch import check_device, launch_splice
from kv_splice.gpu.pools import table_of
from kv_splice.gpu.timing import median_ms
from kv_splice.quantise import ArenaScales
from kv_splice.validate import check_pools, check_splice

__all__ = ["HostTier", "crossover"]

_BUFFERS = 2
_Stream: Any = torch.cuda.Stream
_Event: Any = torch.cuda.Event


@dataclass(frozen=True, slots=True)
class _Target:
    """Where tokens go."""

    cos_sin: Tensor
    positions: Tensor | None
    slots: Tensor
    k_pools: Sequence[Tensor]
    v_pools: Sequence[Tensor]
    is_neox: bool

    def launch(self, k: Tensor, v: Tensor, **source: Any) -> None:
        """`launch_splice` of these keys and values."""
        launch_splice(
            k,
            v,
            cos_sin=self.cos_sin,
            positions=self.positions,
            slots=self.slots,
            k_pools=self.k_pools,
            v_pools=self.v_pools,
            is_neox=self.is_neox,
            **source,
        )


class HostTier:
    """Splices out of pinned host memory into pools on `device`.

    Parameters
    ----------
    device
        The pools' own.
    buffer_bytes
        Of device memory for one of two buffers, which layers are copied to in turns: while a kernel reads one, the
        other is filled. A blob whose single layer does not fit is read by the kernel.

    Attributes
    ----------
    threshold_bytes: blobs from this size on are copied; None, as long as nothing was measured: none is.
    """

    def __init__(self, device: torch.device, *, buffer_bytes: int = 32 << 20) -> None:
        self.threshold_bytes: int | None = None
        self._device = device
        self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, device=device) for _ in range(_BUFFERS)]
        self._is_cuda = device.type == "cuda"
        self._copy_stream = _Stream(device) if self._is_cuda else None
        if self._copy_stream is not None:  # the buffers' memory may be in use by what was launched before
            self._copy_stream.wait_stream(torch.cuda.current_stream(device))
        # Per buffer: it has been filled; it has been read.
        self._filled, self._read = ([_Event() if self._is_cuda else None for _ in range(_BUFFERS)] for _ in range(2))

    def splice(
        self,
        arena_k: Tensor,
        arena_v: Tensor,
        cos_sin: Tensor,
        slots: Tensor,
        k_pools: Sequence[Tensor],
        v_pools: Sequence[Tensor],
        *,
        scales: ArenaScales | FactScales | None = None,
        rows: Tensor | None = None,
        facts: Facts | None = None,
        positions: Tensor | None = None,
        is_neox: bool,
    ) -> None:
        """As `kv_splice.gpu.splice`, of arenas in pinned host memory; everything else is on the device.

        Only a blob, without rows and facts, is ever copied: rows of an arena lie apart, and a copy of each would cost
        more than it brings. The arenas must hold their numbers when this is called, because the copies do not wait for
        the current stream, and must live and stay as they are until it has passed: Torch's allocator knows of the
        copies, and not of what a kernel reads.

        Raises
        ------
        SpliceError, UnsupportedDevice
            As `kv_splice.gpu.splice`.
        """
        check_device(k_pools)
        check_splice(
            arena_k,
            arena_v,
            scales=scales,
            rows=rows,
            cos_sin=cos_sin,
            slots=slots,
            k_pools=k_pools,
            v_pools=v_pools,
            positions=positions,
            facts=facts,
        )
        self.launch(
            arena_k,
            arena_v,
            cos_sin,
            slots,
            k_pools,
            v_pools,
            scales=scales,
            rows=rows,
            facts=facts,
            positions=positions,
            is_neox=is_neox,
        )

    def launch(
        self,
        arena_k: Tensor,
        arena_v: Tensor,
        cos_sin: Tensor,
        slots: Tensor,
        k_pools: Sequence[Tensor],
        v_pools: Sequence[Tensor],
        *,
        scales: ArenaScales | FactScales | None = None,
        rows: Tensor | None = None,
        facts: Facts | None = None,
        positions: Tensor | None = None,
        is_neox: bool,
    ) -> None:
        """As `splice`, of arguments that have been checked: the device is not waited for, and nothing is allocated.

        Raises
        ------
        SpliceError
            What is not aligned to 16 bytes.
        """
        target = _Target(cos_sin, positions, slots, k_pools, v_pools, is_neox)
        is_large = self.threshold_bytes is not None and arena_k.nbytes + arena_v.nbytes >= self.threshold_bytes
        if is_large and rows is None and facts is None and self._layers_at_once(arena_k, arena_v):
            self._splice_staged(arena_k, arena_v, target, scales)
        else:
            target.launch(arena_k, arena_v, scales=scales, rows=rows, facts=facts)

    def calibrate(
        self,
        k_pools: Sequence[Tensor],
        v_pools: Sequence[Tensor],
        source: torch.dtype,
        angles: Tensor,
        *,
        is_neox: bool,
        sizes: Sequence[int] = (32, 128, 512, 2048),
        repeats: int = 10,
    ) -> None:
        """Measure both ways at these numbers of tokens, and set `threshold_bytes`. Slots from 0 on are written.

        Sizes rise; those of more tokens than the pools have slots are left out.

        Raises
        ------
        SpliceError, UnsupportedDevice
            Pools that do not fit together, or are not on a GPU.
        """
        check_device(k_pools)
        check_pools(k_pools, v_pools)
        table = table_of(k_pools, v_pools)
        zero_copy_ms, staged_ms, blob_bytes = [], [], []
        for size in sizes:
            if size > table.num_slots:
                break
            shape = (table.num_layers, size, table.num_kv_heads, table.head_dim)
            k, v = (torch.zeros(shape, dtype=source, pin_memory=self._copy_stream is not None) for _ in range(2))
            if not self._layers_at_once(k, v):
                break
            slots = torch.arange(size, device=self._device)
            first = torch.zeros_like(slots)
            scales = None
            if source == torch.int8:
                of_keys, of_values = (
                    torch.zeros(of, dtype=torch.float16, device=self._device)
                    for of in ((shape[0], 1, *shape[2:]), shape[:3])
                )
                scales = ArenaScales(of_keys, first, of_values)
            target = _Target(angles, first, slots, k_pools, v_pools, is_neox)
            zero_copy = partial(target.launch, k, v, scales=scales)
            staged = partial(self._splice_staged, k, v, target, scales)
            blob_bytes.append(k.nbytes + v.nbytes)
            zero_copy_ms.append(median_ms(zero_copy, self._device, repeats=repeats))
            staged_ms.append(median_ms(staged, self._device, repeats=repeats))
        self.threshold_bytes = crossover(blob_bytes, zero_copy_ms, staged_ms)

    def _layers_at_once(self, k: Tensor, v: Tensor) -> int:
        """How many layers of keys and values one buffer takes; 0 where it is too small for one, or they lie apart."""
        if not (k.is_contiguous() and v.is_contiguous() and k.numel()):
            return 0
        return self._buffers[0].numel() // (2 * k[0].nbytes)

    def _splice_staged(
        self, arena_k: Tensor, arena_v: Tensor, target: _Target, scales: ArenaScales | FactScales | None
    ) -> None:
        """Copy some layers at a time on the copy stream, and launch for them on the current one."""
        at_once = self._layers_at_once(arena_k, arena_v)
        table = table_of(target.k_pools, target.v_pools)
        for turn, start in enumerate(range(0, arena_k.shape[0], at_once)):
            end = min(start + at_once, arena_k.shape[0])
            buffer = turn % _BUFFERS
            k, v = self._views(buffer, arena_k[start:end])
            with self._copying(buffer):
                k.copy_(arena_k[start:end], non_blocking=True)
                v.copy_(arena_v[start:end], non_blocking=True)
            with self._reading(buffer):
                target.launch(k, v, scales=_layers_of(scales, start, end), table=table.layers(start, end))

    def _views(self, buffer: int, layers: Tensor) -> tuple[Tensor, Tensor]:
        num_bytes, memory = layers.nbytes, self._buffers[buffer]
        k, v = (memory[at : at + num_bytes].view(layers.dtype).view(layers.shape) for at in (0, num_bytes))
        return k, v

    @contextmanager
    def _copying(self, buffer: int) -> Iterator[None]:
        """On the copy stream, once what last read the buffer has."""
        if self._copy_stream is None:
            yield
            return
        filled, read = self._events(buffer)
        with torch.cuda.stream(self._copy_stream):
            self._copy_stream.wait_event(read)
            yield
            filled.record(self._copy_stream)

    @contextmanager
    def _reading(self, buffer: int) -> Iterator[None]:
        """On the current stream, once the buffer has been filled."""
        if self._copy_stream is None:
            yield
            return
        filled, read = self._events(buffer)
        current = torch.cuda.current_stream(self._device)
        current.wait_event(filled)
        yield
        read.record(current)

    def _events(self, buffer: int) -> tuple[Any, Any]:
        return self._filled[buffer], self._read[buffer]


def crossover(sizes: Sequence[int], first_ms: Sequence[float], second_ms: Sequence[float]) -> int | None:
    """The size from which on the second way was faster at all of the rising `sizes`; None where not at the last."""
    threshold = None
    for size, first, second in zip(reversed(sizes), reversed(first_ms), reversed(second_ms), strict=True):
        if second >= first:
            break
        threshold = size
    return threshold


def _layers_of(scales: ArenaScales | FactScales | None, start: int, end: int) -> ArenaScales | FactScales | None:
    if scales is None:
        return None
    return scales._replace(keys=scales.keys[start:end], values=scales.values[start:end])
