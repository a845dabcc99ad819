"""Tokens inside a spliced stretch that no fact covers are computed in the forward of the request's own extend.

They are *holes*: text between the cached prefix and the first fact, facts that are not encoded yet. Each run of
holes is a pseudo-sequence over the request's own row: prefix ``[0, a)``, extend ``[a, b)``. Every layer writes the K
and V of all sequences before it attends, so a run sees the fresh K and V of the runs before it, and the request's own
extend those of all its runs. Of the logits only the rows of the scheduled sequences are kept.

What does not fit into one forward, and the runs of batches that ask for more than the next token (`_shares_forward`),
is computed before it, on the same stream.

SGLang's prefill budget is charged with them where a request is admitted, like the tokens that its own encoders replay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import copy
from http import HTTPStatus
from typing import Any, NamedTuple

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    get_server_return_hidden_states_mode,
)
from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

from sgl_stateful.directive import Span

from .request_state import hole_tokens_of

logger = logging.getLogger(__name__)

MAX_TOKENS = 2048  # of one forward of holes, and of the holes of one request
MAX_RUNS = 64  # of one forward: SGLang's LM head makes logits [num_runs, vocab_size], which nobody reads
HOLES = "_sgl_stateful_holes"  # attribute of a request: its runs, until they have been computed
_PENDING = "_sgl_stateful_pending_holes"  # attribute of the model runner: the batch that its next forward is, its runs


class Run(NamedTuple):
    """Positions ``[start, end)`` of one request that are to be computed."""

    start: int
    end: int


def holes_of(spans: Sequence[Span], start: int, end: int) -> list[Run]:
    """Runs of ``[start, end)`` that no span covers; spans are ascending and do not overlap."""
    runs = []
    for span in spans:
        if span.start >= end:
            break
        if span.start > start:
            runs.append(Run(start, span.start))
        start = max(start, span.end)
    if start < end:
        runs.append(Run(start, end))
    return runs


def around_replay_len(original: Callable[..., int], adder: Any, req: Any, prefix_len: int) -> int:
    """AROUND ``PrefillAdder._replay_len``: tokens of the step's budget that a request takes besides its own extend.

    The first request of a step is not charged with more than its extend leaves, as it would be refused for ever where
    its holes alone are as long as a chunk. So a step computes at most a chunk, and the holes of one request.
    """
    replayed = original(adder, req, prefix_len)
    holes = hole_tokens_of(req)
    if holes and not adder.can_run_list and adder.rem_chunk_tokens is not None:
        extend = adder.ceil_paged_tokens(len(req.full_untruncated_fill_ids) - prefix_len)
        holes = min(holes, max(adder.rem_chunk_tokens - replayed - extend, 0))
    return replayed + holes


def around_forward(original: Callable[..., Any], worker: Any, batch: Any = None, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``TpModelWorker.forward_batch_generation``: have the holes of a batch's requests computed."""
    if batch is None or not batch.forward_mode.is_extend_without_speculative():
        return original(worker, batch, *args, **kwargs)
    jobs = [(i, run) for i, req in enumerate(batch.reqs) for run in req.__dict__.pop(HOLES, ())]
    runner = worker.model_runner
    if jobs and (rest := _compute(runner, batch, jobs)):
        setattr(runner, _PENDING, (batch, rest))
    try:
        return original(worker, batch, *args, **kwargs)
    finally:
        runner.__dict__.pop(_PENDING, None)


def around_model_forward(
    original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND ``ModelRunner.forward``: compute the pending holes as further sequences of this forward."""
    pending = runner.__dict__.pop(_PENDING, None)
    if pending is None:
        return original(runner, forward_batch, *args, **kwargs)
    batch, jobs = pending
    try:
        shared, kept = _shared_batch(runner, batch, forward_batch, jobs)
        output = original(runner, _forward_batch(shared, runner), *args, **kwargs)
    except Exception as error:
        _abort(batch, jobs, error)
        return original(runner, forward_batch, *args, **kwargs)
    logits = output.logits_output
    logits.next_token_logits = logits.next_token_logits[kept]
    return output


def _shares_forward(batch: Any) -> bool:
    """Whether rows of logits are all that the batch's forward returns, so that further rows can be dropped."""
    return not (
        _wants_prompt_logprobs(batch)
        or batch.return_hidden_states_mode is not CaptureHiddenMode.NULL
        or get_server_return_hidden_states_mode() is not CaptureHiddenMode.NULL
        or get_global_experts_capturer() is not None
        or get_global_indexer_capturer() is not None
        or batch.spec_info is not None
        or batch.input_embeds is not None
        or batch.replace_embeds is not None
        or batch.encoder_lens is not None
        or batch.global_num_tokens is not None
        or any(one is not None for one in batch.multimodal_inputs or ())
    )


def _wants_prompt_logprobs(batch: Any) -> bool:
    starts, lens = batch.extend_logprob_start_lens, batch.extend_lens
    return batch.return_logprob and any(start < length for start, length in zip(starts, lens, strict=True))


def _compute(runner: Any, batch: Any, jobs: Sequence[tuple[int, Run]]) -> Sequence[tuple[int, Run]]:
    """Compute runs from left to right until the rest fits into the batch's own forward; returns that rest."""
    # Attention backends size their buffers by the number of rows there can be; left to right, splitting is exact.
    rows, tokens = max(int(runner.req_to_token_pool.size), 1), sum(batch.extend_lens)
    shares = _shares_forward(batch)
    while jobs:
        room = rows - len(batch.reqs)
        if shares and len(_next_part(jobs, max_runs=room, tokens=tokens)) == len(jobs):
            break
        part = _next_part(jobs, max_runs=rows)
        try:
            runner.forward(_forward_batch(_pseudo_batch(runner, batch, part), runner))
        except Exception as error:
            _abort(batch, jobs, error)
            return ()
        jobs = jobs[len(part) :]
    return jobs


def _forward_batch(batch: Any, runner: Any) -> Any:
    return ForwardBatch.init_new(
        batch, runner, capture_hidden_mode=CaptureHiddenMode.NULL, return_hidden_states_before_norm=False
    )


def _abort(batch: Any, jobs: Sequence[tuple[int, Run]], error: Exception) -> None:
    """End the requests whose holes were not computed: an exception would end the scheduler, an answer be wrong."""
    logger.error("computing holes failed; aborting the requests that have them", exc_info=error)
    for req in {id(r): r for r in (batch.reqs[i] for i, _ in jobs)}.values():
        req.skip_radix_cache_insert = True
        req.discard_output_reason = FINISH_ABORT(
            f"computing the text between spliced facts failed: {type(error).__name__}",
            HTTPStatus.INTERNAL_SERVER_ERROR,
        )


def _next_part(jobs: Sequence[tuple[int, Run]], *, max_runs: int, tokens: int = 0) -> Sequence[tuple[int, Run]]:
    """The first jobs that go into one forward: ``MAX_RUNS`` or ``max_runs`` at most.

    Several have no more tokens than a chunk of prefill, and so have some beside the ``tokens`` of a batch. Without
    any tokens beside it there is always one.
    """
    max_runs, alone = min(max_runs, MAX_RUNS), tokens == 0
    for count, (_, run) in enumerate(jobs):
        tokens += run.end - run.start
        if count == max_runs or (tokens > MAX_TOKENS and (count or not alone)):
            return jobs[:count]
    return jobs


def _shared_batch(
    runner: Any, batch: Any, forward_batch: Any, jobs: Sequence[tuple[int, Run]]
) -> tuple[Any, torch.Tensor]:
    """A copy of the batch with each run as a sequence in front of its request's own.

    Returns
    -------
    The batch, and the index ``[len(batch.reqs)]`` int64 of the scheduled sequences in it.
    """
    runs: dict[int, list[Run]] = {}
    for i, run in jobs:
        runs.setdefault(i, []).append(run)
    index: list[int] = []
    spans: list[Run] = []
    inputs: list[torch.Tensor] = []
    slots: list[torch.Tensor] = []
    kept: list[int] = []
    pseudo = _pseudo_batch(runner, batch, jobs)
    at = of_jobs = 0
    for i, (prefix, extend) in enumerate(zip(batch.prefix_lens, batch.extend_lens, strict=True)):
        own = runs.get(i, [])
        tokens = sum(run.end - run.start for run in own)
        inputs += [pseudo.input_ids[of_jobs : of_jobs + tokens], forward_batch.input_ids[at : at + extend]]
        slots += [pseudo.out_cache_loc[of_jobs : of_jobs + tokens], batch.out_cache_loc[at : at + extend].long()]
        spans += [*own, Run(prefix, prefix + extend)]
        index += [i] * (len(own) + 1)
        kept.append(len(index) - 1)
        at, of_jobs = at + extend, of_jobs + tokens
    shared = _sequences(runner, batch, index, spans)
    shared.input_ids, shared.out_cache_loc = torch.cat(inputs), torch.cat(slots)
    shared.is_prefill_only = batch.is_prefill_only
    return shared, torch.tensor(kept, device=runner.device)


def _pseudo_batch(runner: Any, batch: Any, jobs: Sequence[tuple[int, Run]]) -> Any:
    """A copy of the batch in which each run is a sequence; never scheduled, sampled or released."""
    req_to_token = runner.req_to_token_pool.req_to_token
    pseudo = _sequences(runner, batch, [i for i, _ in jobs], [run for _, run in jobs])
    pseudo.input_ids = torch.tensor(
        [t for i, run in jobs for t in batch.reqs[i].full_untruncated_fill_ids[run.start : run.end]],
        dtype=torch.int64,
        device=runner.device,
    )
    pseudo.out_cache_loc = torch.cat(
        [req_to_token[pseudo.req_pool_indices[k], run.start : run.end] for k, (_, run) in enumerate(jobs)]
    ).long()
    return pseudo


def _sequences(runner: Any, batch: Any, index: list[int], spans: Sequence[Run]) -> Any:
    """A copy of the batch of which sequence k extends request ``index[k]`` by ``spans[k]``; without ids and slots."""
    starts, ends = [span.start for span in spans], [span.end for span in spans]
    lens = [end - start for start, end in spans]
    copied = copy(batch)
    copied.reqs = [batch.reqs[i] for i in index]
    copied.prefill_input_ids_cpu = None
    copied.req_pool_indices = batch.req_pool_indices[index]
    copied.req_pool_indices_cpu = batch.req_pool_indices_cpu[index]
    copied.prefix_lens, copied.extend_lens, copied.extend_num_tokens = starts, lens, sum(lens)
    copied.seq_lens_cpu = torch.tensor(ends, dtype=torch.int64)
    copied.seq_lens = copied.seq_lens_cpu.to(runner.device)
    copied.seq_lens_sum = sum(ends)
    copied.orig_seq_lens = copied.seq_lens.to(torch.int32)
    copied.return_logprob = False
    copied.top_logprobs_nums = copied.token_ids_logprobs = copied.extend_input_logprob_token_ids = None
    copied.extend_logprob_start_lens = lens
    copied.is_prefill_only = True
    copied.spec_info = copied.sampling_info = None
    copied.has_grammar = False
    copied.multimodal_inputs = [None] * len(index)
    return copied
