"""Tokens inside a spliced stretch that no fact covers are computed in one extend forward of their own.

They are *holes*: text between the cached prefix and the first fact, facts that are not encoded yet. Each run of
holes is a pseudo-sequence over the request's own row: prefix ``[0, a)``, extend ``[a, b)``. Every layer writes the K
and V of all runs before it attends, so a run sees the fresh K and V of the runs before it. The request's own extend
follows on the same stream.

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
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

from sgl_stateful.directive import Span

from .request_state import hole_tokens_of

logger = logging.getLogger(__name__)

MAX_TOKENS = 2048  # of one forward of holes, and of the holes of one request
MAX_RUNS = 64  # of one forward: SGLang's LM head makes logits [num_runs, vocab_size], which nobody reads
HOLES = "_sgl_stateful_holes"  # attribute of a request: its runs, until they have been computed


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
    """AROUND ``TpModelWorker.forward_batch_generation``: compute the holes of a batch's requests first."""
    if batch is not None and batch.forward_mode.is_extend_without_speculative():
        jobs = [(i, run) for i, req in enumerate(batch.reqs) for run in req.__dict__.pop(HOLES, ())]
        if jobs:
            _compute(worker.model_runner, batch, jobs)
    return original(worker, batch, *args, **kwargs)


def _compute(runner: Any, batch: Any, jobs: Sequence[tuple[int, Run]]) -> None:
    # Attention backends size their buffers by the number of rows there can be; left to right, splitting is exact.
    at = 0
    while at < len(jobs):
        part = _next_part(jobs[at:], max_runs=max(int(runner.req_to_token_pool.size), 1))
        try:
            forward_batch = ForwardBatch.init_new(
                _pseudo_batch(runner, batch, part),
                runner,
                capture_hidden_mode=CaptureHiddenMode.NULL,
                return_hidden_states_before_norm=False,
            )
            runner.forward(forward_batch)
        except Exception as error:
            # An exception here would end the scheduler; these requests alone must not be answered.
            logger.exception("computing holes failed; aborting the requests that have them")
            for req in {id(r): r for r in (batch.reqs[i] for i, _ in jobs[at:])}.values():
                req.skip_radix_cache_insert = True
                req.discard_output_reason = FINISH_ABORT(
                    f"computing the text between spliced facts failed: {type(error).__name__}",
                    HTTPStatus.INTERNAL_SERVER_ERROR,
                )
            return
        at += len(part)


def _next_part(jobs: Sequence[tuple[int, Run]], *, max_runs: int) -> Sequence[tuple[int, Run]]:
    """The first jobs that go into one forward: at least one, and ``MAX_RUNS`` or ``max_runs`` at most.

    Several have no more tokens than a chunk of prefill.
    """
    max_runs = min(max_runs, MAX_RUNS)
    tokens = 0
    for count, (_, run) in enumerate(jobs):
        tokens += run.end - run.start
        if count == max_runs or (count and tokens > MAX_TOKENS):
            return jobs[:count]
    return jobs


def _pseudo_batch(runner: Any, batch: Any, jobs: Sequence[tuple[int, Run]]) -> Any:
    """A copy of the batch in which each run is a sequence; never scheduled, sampled or released."""
    req_to_token, device = runner.req_to_token_pool.req_to_token, runner.device
    index = [i for i, _ in jobs]
    runs = [run for _, run in jobs]
    starts, ends = [run.start for run in runs], [run.end for run in runs]
    lens = [end - start for start, end in runs]
    rows = batch.req_pool_indices[index]
    pseudo = copy(batch)
    pseudo.reqs = [batch.reqs[i] for i in index]
    pseudo.input_ids = torch.tensor(
        [t for i, run in jobs for t in batch.reqs[i].full_untruncated_fill_ids[run.start : run.end]],
        dtype=torch.int64,
        device=device,
    )
    pseudo.prefill_input_ids_cpu = None
    pseudo.req_pool_indices = rows
    pseudo.req_pool_indices_cpu = batch.req_pool_indices_cpu[index]
    pseudo.prefix_lens, pseudo.extend_lens, pseudo.extend_num_tokens = starts, lens, sum(lens)
    pseudo.seq_lens_cpu = torch.tensor(ends, dtype=torch.int64)
    pseudo.seq_lens = pseudo.seq_lens_cpu.to(device)
    pseudo.seq_lens_sum = sum(ends)
    pseudo.orig_seq_lens = pseudo.seq_lens.to(torch.int32)
    pseudo.out_cache_loc = torch.cat([req_to_token[rows[k], run.start : run.end] for k, run in enumerate(runs)]).long()
    pseudo.return_logprob = False
    pseudo.top_logprobs_nums = pseudo.token_ids_logprobs = pseudo.extend_input_logprob_token_ids = None
    pseudo.extend_logprob_start_lens = lens
    pseudo.is_prefill_only = True
    pseudo.spec_info = pseudo.sampling_info = None
    pseudo.has_grammar = False
    pseudo.multimodal_inputs = [None] * len(jobs)
    return pseudo
