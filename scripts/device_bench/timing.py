"""Time of a splice and of a capture, beside a copy of as many bytes."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from device_bench.settings import Setting
from kv_splice import ArenaScales, RopeSpec
from kv_splice.gpu import (
    LAUNCHES,
    HostTier,
    Traffic,
    capture_traffic,
    launch_capture,
    launch_quantise,
    launch_splice,
    splice_traffic,
    warm_up,
)
from kv_splice.gpu.timing import median_ms

__all__ = ["FASTEST", "TARGET_TOKENS", "target_met", "time_all"]

DTYPE = torch.bfloat16
SOURCES = (torch.bfloat16, torch.int8)
FASTEST = 0.8
"""What a splice out of device memory should reach of the copy, in one launch."""

TARGET_TOKENS = 2000
"""From this length on."""


def time_all(setting: Setting) -> list[dict[str, Any]]:
    """One row for each length, dtype of the source, and tier."""
    spec = RopeSpec(head_dim=setting.head_dim, rotary_dim=setting.head_dim, is_neox=True, base=5e5)
    table = spec.cos_sin(torch.arange(2 * max(setting.tokens))).to(setting.device)
    flush = torch.empty(setting.flush_bytes, dtype=torch.uint8, device=setting.device)
    rows = []
    for source in SOURCES:
        for num_tokens in setting.tokens:
            bench = _Bench(setting, table, flush, num_tokens, source)
            rows += [bench.from_device(), *bench.from_host(), bench.capture()]
            del bench
            if setting.device.type == "cuda":
                torch.cuda.empty_cache()
    return rows


class _Bench:
    """One length and dtype of the source; tokens of facts in shuffled order, into slots in none."""

    def __init__(self, setting: Setting, table: Tensor, flush: Tensor, num_tokens: int, source: torch.dtype) -> None:
        self.setting, self.table, self.flush, self.num_tokens, self.source = setting, table, flush, num_tokens, source
        device = setting.device
        token = (setting.num_kv_heads, setting.head_dim)
        self.arena_shape = (setting.num_layers, num_tokens, *token)
        self.k_pools, self.v_pools = (
            list(torch.zeros((setting.num_layers, 2 * num_tokens, *token), dtype=DTYPE, device=device)) for _ in "kv"
        )
        facts = torch.arange(num_tokens).split(setting.fact_tokens)
        self.rows = torch.cat([facts[i] for i in torch.randperm(len(facts)).tolist()]).to(device)
        self.slots = torch.randperm(2 * num_tokens)[:num_tokens].to(device)
        self.positions = torch.arange(100, 100 + num_tokens, device=device) % len(table)
        self.num_facts = len(facts)
        self.scales: ArenaScales | None = None
        if source == torch.int8:
            of_keys, of_values = (
                torch.ones(shape, dtype=torch.float16, device=device)
                for shape in ((setting.num_layers, self.num_facts, *token), self.arena_shape[:3])
            )
            self.scales = ArenaScales(of_keys, self.rows // setting.fact_tokens, of_values)
        sizes, repeats = (min(num_tokens, 2048),), min(setting.repeats, 10)
        warm_up(self.k_pools, self.v_pools, source, table, is_neox=True, sizes=sizes, repeats=repeats)

    def from_device(self) -> dict[str, Any]:
        """Out of an arena in device memory."""
        k, v = self._numbers(), self._numbers()
        run = partial(self._launch, k, v, rows=self.rows, scales=self.scales)
        return self._row("device", run, self._traffic(rows=True), self._copy_ms(self._traffic(rows=True).total // 2))

    def from_host(self) -> list[dict[str, Any]]:
        """Out of a blob in pinned host memory, both ways; beside a copy of it to the device."""
        is_cuda = self.setting.device.type == "cuda"
        k, v = (torch.empty(self.arena_shape, dtype=self.source, pin_memory=is_cuda) for _ in "kv")
        k.copy_(self._numbers())
        v.copy_(self._numbers())
        tier = HostTier(self.setting.device, buffer_bytes=self.setting.buffer_bytes)
        in_order = torch.arange(self.num_tokens, device=self.setting.device)
        scales = self.scales and self.scales._replace(sets=in_order // self.setting.fact_tokens)
        to = torch.empty_like(k, device=self.setting.device)

        def copy() -> None:
            to.copy_(k, non_blocking=True)
            to.copy_(v, non_blocking=True)

        copy_ms = self._ms(copy)
        rows = []
        for name, threshold in (("host, read by the kernel", None), ("host, copied in layers", 0)):
            tier.threshold_bytes = threshold
            run = partial(
                tier.launch,
                k,
                v,
                self.table,
                self.slots,
                self.k_pools,
                self.v_pools,
                scales=scales,
                positions=self.positions,
                is_neox=True,
            )
            rows.append(self._row(name, run, self._traffic(rows=False), copy_ms))
        return rows

    def capture(self) -> dict[str, Any]:
        """Out of the pool into a blob."""
        arguments = (self.k_pools, self.v_pools, self.slots, self.table)
        setting, is_int8 = self.setting, self.source == torch.int8
        run: Callable[[], object] = partial(launch_capture, *arguments, positions=self.positions, is_neox=True)
        if is_int8:
            bounds = [*range(0, self.num_tokens, setting.fact_tokens), self.num_tokens]
            offsets = torch.tensor(bounds, device=setting.device)
            run = partial(launch_quantise, *arguments, self.positions, offsets, is_neox=True)
        traffic = capture_traffic(
            num_layers=setting.num_layers,
            num_tokens=self.num_tokens,
            num_kv_heads=setting.num_kv_heads,
            head_dim=setting.head_dim,
            rotary_dim=setting.head_dim,
            pool=DTYPE,
            out=self.source,
            num_indices=2,
            num_facts=self.num_facts,
        )
        return self._row("capture", run, traffic, self._copy_ms(traffic.total // 2))

    def _numbers(self) -> Tensor:
        numbers = torch.empty(self.arena_shape, dtype=self.source, device=self.setting.device)
        return numbers.random_(-127, 128) if self.source == torch.int8 else numbers.normal_()

    def _launch(self, k: Tensor, v: Tensor, **source: Any) -> None:
        launch_splice(
            k,
            v,
            **source,
            cos_sin=self.table,
            positions=self.positions,
            slots=self.slots,
            k_pools=self.k_pools,
            v_pools=self.v_pools,
            is_neox=True,
        )

    def _traffic(self, *, rows: bool) -> Traffic:
        setting = self.setting
        return splice_traffic(
            num_layers=setting.num_layers,
            num_tokens=self.num_tokens,
            num_kv_heads=setting.num_kv_heads,
            head_dim=setting.head_dim,
            rotary_dim=setting.head_dim,
            source=self.source,
            pool=DTYPE,
            num_indices=2 + rows + (self.scales is not None),
            num_facts=self.num_facts,
        )

    def _copy_ms(self, num_bytes: int) -> float:
        """A plain copy that reads that many bytes, and writes as many."""
        source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=self.setting.device) for _ in range(2))
        return self._ms(partial(target.copy_, source))

    def _ms(self, run: Callable[[], object]) -> float:
        run()
        times = []
        for _ in range(self.setting.repeats):
            self.flush.zero_()
            times.append(median_ms(run, self.setting.device, repeats=1, warm_ups=0))
        return statistics.median(times)

    def _row(self, tier: str, run: Callable[[], object], traffic: Traffic, copy_ms: float) -> dict[str, Any]:
        before = LAUNCHES.total()
        run()
        launches = LAUNCHES.total() - before
        ms = self._ms(run)
        row = {
            "tokens": self.num_tokens,
            "source": str(self.source).removeprefix("torch."),
            "tier": tier,
            "ms": ms,
            "copy_ms": copy_ms,
            "fraction_of_copy": copy_ms / ms,
            "bytes_read": traffic.read,
            "bytes_written": traffic.written,
            "gb_s": traffic.total / ms / 1e6,
            "launches": launches,
        }
        is_met = target_met(tier, self.num_tokens, fraction_of_copy=copy_ms / ms, launches=launches)
        return row if is_met is None else {**row, "target_met": is_met}


def target_met(tier: str, num_tokens: int, *, fraction_of_copy: float, launches: int) -> bool | None:
    """Whether a row reaches the target; None where there is none for it."""
    if tier != "device" or num_tokens < TARGET_TOKENS:
        return None
    return fraction_of_copy >= FASTEST and launches == 1
