"""The factory behind ``--radix-cache-backend stateful``, in the scheduler process."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_unified_radix_cache

from kv_splice import warm_up_pools
from memstore import KVBlobs
from sgl_stateful.settings import KVStorage, StatefulSettings
from sgl_stateful.splice import FactArena

from .control import StatefulControlReqInput, StatefulScheduler
from .fact_kv import FactKV
from .fingerprint import computation, fact_fingerprint, kv_fingerprint, model_digest, model_directory, weights_digest
from .kv_pool import KVPool, find_kv_pool
from .prefix_cache import StatefulRadixCache
from .selfcheck import check_flags, check_hooks, check_pool, check_scheduling, check_sglang_version
from .session_kv import SessionKV

logger = logging.getLogger(__name__)


def create_stateful_cache(ctx: TreeCacheBuildContext) -> StatefulRadixCache:
    """Build the cache, check everything that it relies on, and connect the facts' KV.

    Raises
    ------
    IncompatibleServer, UnsupportedRope, StoreError
        With one line that names the cause; SGLang then stops the server.
    """
    settings = StatefulSettings()
    check_sglang_version()
    check_hooks(StatefulScheduler, StatefulControlReqInput)
    check_scheduling(StatefulScheduler)
    check_flags(ctx.server_args)
    kv_cache = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    check_pool(kv_cache, is_hybrid_swa=ctx.is_hybrid_swa, is_hybrid_ssm=ctx.is_hybrid_ssm)
    runner = ctx.tp_worker.model_runner
    pool = find_kv_pool(kv_cache, runner.model, getattr(runner, "forward_stream", None))
    cache = create_unified_radix_cache(ctx, cache_class=StatefulRadixCache)
    assert isinstance(cache, StatefulRadixCache), type(cache)
    config = runner.model_config
    model_files = model_directory(
        config.model_path, revision=config.revision, download_dir=ctx.server_args.download_dir
    )
    layout = {
        "rope": pool.rope.digest(),
        "dtype": str(pool.dtype),
        "num_layers": pool.num_layers,
        "num_kv_heads": pool.num_kv_heads,
        "head_dim": pool.head_dim,
        "tp_size": ctx.tp_size,
    }
    model = model_digest(model_files)
    computed = computation(ctx.server_args, config)
    weights = weights_digest(model_files)
    fingerprint = kv_fingerprint({"model": model, "weights": weights, "computed": computed, **layout})
    description: dict[str, Any] = {
        "fingerprint": fingerprint,
        "fact_fingerprint": fact_fingerprint(fingerprint, settings.kv_storage),
        "kv_storage": settings.kv_storage.value,
        "model": model,
        # Of earlier releases, which named sessions' models by it.
        "former_fingerprint": kv_fingerprint({"model": model_digest(ctx.server_args.model_path), **layout}),
        "dtype": str(pool.dtype).removeprefix("torch."),
        "num_layers": pool.num_layers,
        "num_kv_heads": pool.num_kv_heads,
        "head_dim": pool.head_dim,
        "page_size": cache.page_size,
        "pool_tokens": ctx.params.token_to_kv_pool_allocator.size,
        "bytes_per_token": 2 * pool.num_layers * pool.num_kv_heads * pool.head_dim * pool.dtype.itemsize,
        "device": str(pool.device),
        "tree_core": type(cache.tree_core).__name__,
    }
    facts = None if settings.memory is None else _open_facts(settings, pool, shard=ctx.tp_rank)
    stored = _stored_dtype(settings, pool)
    warm_up_pools(pool.k_pools, pool.v_pools, stored, pool.cos_sin_cache, is_neox=pool.rope.is_neox)
    cache.attach(facts, description, num_slots=kv_cache.get_key_buffer(0).shape[0])
    if (folder := settings.snapshot_path()) is not None:
        cache.session_kv = SessionKV(pool=pool, folder=folder, fingerprint=fingerprint)
    logger.info("sgl-stateful attached: %s", description)
    return cache


def _open_facts(settings: StatefulSettings, pool: KVPool, *, shard: int) -> FactKV:
    arena = FactArena(
        budget_bytes=settings.arena_mib << 20,
        num_layers=pool.num_layers,
        num_kv_heads=pool.num_kv_heads,
        head_dim=pool.head_dim,
        dtype=_stored_dtype(settings, pool),
        device=pool.device,
    )
    blobs = KVBlobs(settings.kv_path(), shard=shard, settings=settings.store_settings())
    return FactKV(pool=pool, arena=arena, blobs=blobs)


def _stored_dtype(settings: StatefulSettings, pool: KVPool) -> torch.dtype:
    """Of facts' keys and values, in memory and on disk."""
    return torch.int8 if settings.kv_storage == KVStorage.INT8 else pool.dtype
