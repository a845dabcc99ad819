"""Checks at attach time, in the scheduler process: what cannot be served is refused by name before it serves.

SGLang swallows exceptions of plugins and hooks, so each hook is looked for here rather than trusted.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import sglang
import torch
from sglang.srt.managers import io_struct, schedule_batch, schedule_policy, scheduler
from sglang.srt.mem_cache.common import match_kv_cache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import UnifiedTreeCoreInterface
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats
from sglang.srt.plugins.hook_registry import HookRegistry

from sgl_stateful.errors import IncompatibleServer

SUPPORTED_SGLANG = ("0.5.23",)
_POOL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_sglang_version() -> None:
    """Refuse an SGLang whose internals have not been verified."""
    if sglang.__version__ not in SUPPORTED_SGLANG:
        raise IncompatibleServer(
            f"sglang {sglang.__version__} is installed; sgl-stateful supports {', '.join(SUPPORTED_SGLANG)}. "
            f"Install it with: pip install sglang=={SUPPORTED_SGLANG[-1]}"
        )


def check_hooks(scheduler_class: type, message_class: type) -> None:
    """Refuse to start where SGLang dropped a hook of ours in this process."""
    if missing := sorted(set(HookRegistry._hooks) - HookRegistry._patched):
        raise IncompatibleServer(f"SGLang did not apply these hooks: {', '.join(missing)}")
    if not issubclass(scheduler.Scheduler, scheduler_class):
        raise IncompatibleServer("SGLang's Scheduler was not replaced by sgl-stateful's; another plugin replaces it")
    if message_class not in io_struct._all_types:
        raise IncompatibleServer("SGLang's IPC does not know sgl-stateful's control message")


_SCHEDULER_CALLS = {  # what sessions override or call, and its parameters
    "get_new_batch_prefill": ("self", "running_batch"),
    "update_running_batch": ("self", "batch"),
    "_reqs_finishing_inflight": ("self", "batch"),
    "_add_request_to_queue": ("self", "req", "is_retracted"),
}
_BATCH_CALLS = {
    "is_empty": ("self",),
    "new_tokens_required_next_decode": ("self", "selected_indices"),
    "_get_decode_retraction_order": ("reqs",),
}
_ADDER_CALLS = {  # by which the tokens between spliced facts are charged
    "_replay_len": ("self", "req", "prefix_len"),
    "ceil_paged_tokens": ("self", "tokens"),
}
_CACHE_CALLS = {
    "lock": ("self", "node_id", "skip_lock_components"),
    "unlock": ("self", "lock"),
    "match_prefix": ("self", "params"),
    "path_device_indices": ("self", "node"),
    "checkpoint": ("self", "req", "up_to", "kwargs"),
    "evictable_size": ("self",),
    "protected_size": ("self",),
    "reset": ("self",),
}
_REQUEST_FIELDS = (
    "cache_salt",
    "customized_info",
    "extend_end",
    "extra_key",
    "finished_reason",
    "full_untruncated_fill_ids",
    "last_node",
    "origin_input_ids",
    "output_ids",
    "prefix_len",
    "send_token_offset",
    "stream",
    "time_stats",
    "to_finish",
)
_SCHEDULER_FIELDS = ("chunked_prefill_size", "chunked_req", "enable_priority_scheduling", "policy", "waiting_queue")


def check_scheduling(scheduler_class: type) -> None:
    """Refuse a scheduler, request or cache in which something that is relied on has another shape.

    ``scheduler_class`` is ours; what it extends is looked at.
    """
    theirs = scheduler_class.__mro__[1]
    check_calls(theirs, _SCHEDULER_CALLS)
    check_calls(schedule_batch.ScheduleBatch, _BATCH_CALLS)
    check_calls(schedule_policy.PrefillAdder, _ADDER_CALLS)
    check_calls(UnifiedRadixCache, _CACHE_CALLS)
    check_calls(UnifiedTreeCoreInterface, {"match_full_device_prefix": ("self", "key")})
    check_calls(match_kv_cache, {"__call__": ("req", "tree_cache", "token_ids", "cow_mamba", "max_prefix_len")})
    check_assigned(schedule_batch.Req, _REQUEST_FIELDS)
    check_assigned(theirs, _SCHEDULER_FIELDS)
    check_assigned(schedule_policy.PrefillAdder, ("can_run_list", "rem_chunk_tokens"))
    check_assigned(scheduler.NextBatchPlan, ("batch_to_run", "running_batch"))
    check_assigned(schedule_batch.ReqKvInfo, ("cache_protected_len", "kv_allocated_len"))
    check_assigned(SchedulerReqTimeStats, ("wait_queue_entry_time",))


def check_calls(owner: Any, calls: Mapping[str, Sequence[str]]) -> None:
    """Refuse an owner one of whose calls is missing or takes other parameters; ``__call__``: the owner itself."""
    for name, expected in calls.items():
        call = owner if name == "__call__" else getattr(owner, name, None)
        found = None if call is None else tuple(inspect.signature(call).parameters)
        if found != tuple(expected):
            _refuse(owner, f"{name} takes {found}, not {tuple(expected)}" if call else f"{name} is missing")


def check_assigned(owner: type, names: Sequence[str]) -> None:
    """Refuse a class that neither declares one of these attributes nor assigns it to its instances."""
    package = owner.__module__.partition(".")[0]
    bases = [base for base in owner.__mro__ if base.__module__.partition(".")[0] == package]
    declared = {name for base in bases for name in inspect.get_annotations(base)}
    source = "".join(inspect.getsource(base) for base in bases)
    assigned = set(re.findall(r"self\.(\w+)\b(?:\s*:[^=\n]+)?\s*=(?!=)", source))
    if missing := [name for name in names if name not in declared | assigned]:
        _refuse(owner, f"{', '.join(missing)} missing")


def _refuse(owner: Any, what: str) -> None:
    raise IncompatibleServer(f"SGLang's {owner.__name__} is not the one that sgl-stateful knows: {what}")


def check_flags(server_args: Any) -> None:
    """Refuse flags under which a splice could be wrong, each by its name."""
    refusals = {
        "--enable-hierarchical-cache": server_args.enable_hierarchical_cache,
        "--enable-lmcache": server_args.enable_lmcache,
        "--enable-unified-cache-external-linker": getattr(server_args, "enable_unified_cache_external_linker", False),
        "--speculative-algorithm": server_args.speculative_algorithm,
        "--disable-radix-cache": server_args.disable_radix_cache,
        "--enable-dp-attention": server_args.enable_dp_attention,
        "--tp-size": server_args.tp_size > 1,  # each rank would decide alone what to splice
        "--pp-size": server_args.pp_size > 1,
        "--enable-mixed-chunk": server_args.enable_mixed_chunk,
        "--attention-backend flashinfer without SGLANG_FLASHINFER_USE_PAGED=1": (
            "flashinfer" in (server_args.attention_backend, server_args.prefill_attention_backend)
            and os.environ.get("SGLANG_FLASHINFER_USE_PAGED") != "1"  # else it writes K and V after attention
        ),
        "--dp-size": server_args.dp_size > 1,
        "--tokenizer-worker-num": server_args.tokenizer_worker_num > 1,
        "--enable-unified-memory": getattr(server_args, "enable_unified_memory", False),
        "--skip-tokenizer-init": server_args.skip_tokenizer_init,
    }
    for flag, is_set in refusals.items():
        if is_set:
            raise IncompatibleServer(f"{flag} cannot be combined with --radix-cache-backend stateful")
    if server_args.disaggregation_mode not in (None, "null"):
        raise IncompatibleServer("--disaggregation-mode cannot be combined with --radix-cache-backend stateful")


def check_pool(kv_cache: Any, *, is_hybrid_swa: bool, is_hybrid_ssm: bool) -> None:
    """Refuse KV pools other than plain multi-head (or grouped-query) attention in 16 or 32 bits."""
    if is_hybrid_swa or is_hybrid_ssm:
        raise IncompatibleServer("sliding-window and hybrid models are not supported: their KV pool drops tokens")
    if type(kv_cache) is not MHATokenToKVPool:
        raise IncompatibleServer(
            f"KV pool {type(kv_cache).__name__} is not supported; only plain MHA/GQA pools are (not MLA, not quantised)"
        )
    if kv_cache.dtype not in _POOL_DTYPES or kv_cache.store_dtype != kv_cache.dtype:
        raise IncompatibleServer(f"KV cache dtype {kv_cache.dtype} is not supported; use auto, bfloat16 or float32")
    if kv_cache.v_head_dim != kv_cache.head_dim:
        raise IncompatibleServer(f"head widths of keys ({kv_cache.head_dim}) and values ({kv_cache.v_head_dim}) differ")
    layout = tuple(kv_cache.get_key_buffer(0).shape[1:])
    if layout != (kv_cache.head_num, kv_cache.head_dim):
        raise IncompatibleServer(f"KV layout {layout} is not [slot, head, dim]; unset SGLANG_USE_HND_KVCACHE")
