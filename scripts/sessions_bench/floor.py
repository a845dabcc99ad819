"""A bare forward of the shape of a query, in a process of its own: the model and our attention, nothing else.

SGLang's own `benchmark.one_batch` builds the model; a forward of `new` tokens behind a prefix is prepared once per
prefix and then run again and again, the prefixes in turns. Where the new tokens' cells lie apart from the prefix's, as
in a server that has answered other requests between, attention gathers the keys first; adjacent ones it reads in place.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .servers import shared_flags

_MARK = "floor: "
_SPARE_TOKENS = 500


class Forward(NamedTuple):
    """Shape of a forward: new tokens behind a prefix, whose cells are adjacent to it or not."""

    prefix: int
    is_adjacent: bool


def bare_forward_ms(
    model: Path, prefixes: Sequence[int], *, new: int, repeats: int, dtype: str
) -> dict[Forward, list[float]]:
    """Milliseconds of each forward.

    Raises
    ------
    RuntimeError
        The child failed; with the end of what it wrote.
    """
    pool_tokens = 2 * (sum(prefixes) + len(prefixes) * (new + 1)) + _SPARE_TOKENS  # adjacent and apart, all at once
    arguments = [json.dumps([str(model), list(prefixes), new, repeats, dtype, pool_tokens])]
    child = subprocess.run(
        [sys.executable, "-m", "sessions_bench.floor", *arguments], capture_output=True, text=True, check=False
    )
    lines = [line for line in child.stdout.splitlines() if line.startswith(_MARK)]
    if child.returncode != 0 or not lines:
        raise RuntimeError(f"the bare model failed:\n{child.stderr[-3000:]}")
    return {Forward(*shape): taken for shape, taken in json.loads(lines[-1].removeprefix(_MARK))}


def _measure(
    model: str, prefixes: Sequence[int], new: int, repeats: int, dtype: str, pool_tokens: int
) -> list[tuple[Forward, list[float]]]:
    # These belong to the child alone.
    from sglang.benchmark import one_batch
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, prepare_server_args

    load_plugins()
    server_args = prepare_server_args(
        ["--model-path", model, *shared_flags(dtype=dtype, pool_tokens=pool_tokens), "--disable-radix-cache"]
    )
    server_args.resolve_once()
    one_batch._set_envs_and_config(server_args)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    one_batch._init_process_global_configs()
    bench, _ = one_batch.load_model(server_args, PortArgs.init_new(server_args), 0, 0)
    runner = bench.torch_runner
    backend = type(runner.attn_backend).__name__
    assert backend == "PortableCpuAttention", backend

    shapes = [Forward(prefix, is_adjacent) for is_adjacent in (True, False) for prefix in prefixes]
    batches = {shape: _query_batch(bench, runner, shape, new) for shape in shapes}
    taken: dict[Forward, list[float]] = {shape: [] for shape in shapes}
    for turn in range(repeats + 2):
        for shape in shapes if turn % 2 else reversed(shapes):
            started = time.perf_counter()
            runner.forward(batches[shape])
            if turn >= 2:  # the first ones compile and warm up
                taken[shape].append(1e3 * (time.perf_counter() - started))
    return list(taken.items())


def _query_batch(bench: Any, runner: Any, shape: Forward, new: int) -> Any:
    """Prefill the prefix, and prepare the forward of what follows it."""
    from sglang.benchmark import one_batch
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    prefix = shape.prefix
    ids = [1000 + (7 * i) % 30_000 for i in range(prefix + new)]
    reqs = one_batch.prepare_synthetic_inputs_for_latency_test(1, prefix, [ids[:prefix]])
    bench.extend(reqs)
    if not shape.is_adjacent:
        runner.token_to_kv_pool_allocator.alloc(1)
    [req] = reqs
    req.full_untruncated_fill_ids.extend(ids[prefix:])
    req.prefix_len = prefix
    req.extend_end = prefix + new
    cache = one_batch.TreeCacheNamespace(
        page_size=1, device=runner.device, token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator
    )
    batch = ScheduleBatch.init_new(
        reqs=reqs,
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        tree_cache=cache,
        model_config=runner.model_config,
        enable_overlap=False,
        spec_algorithm=SpeculativeAlgorithm.NONE,
    )
    batch.prepare_for_extend()
    if batch.input_ids is None:
        batch.input_ids = batch.prefill_input_ids_cpu
    forward = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
    assert forward.extend_prefix_lens.tolist() == [prefix], forward.extend_prefix_lens
    assert forward.extend_seq_lens.tolist() == [new], forward.extend_seq_lens
    return forward


if __name__ == "__main__":
    print(_MARK + json.dumps(_measure(*json.loads(sys.argv[1]))), flush=True)
