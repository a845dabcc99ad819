"""From a caller's request to a prompt: which policy and repair it gets, and whether anything is spliced at all."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from sgl_stateful.encoding import Ladder
from sgl_stateful.errors import BadMemoryRequest
from sgl_stateful.faithfulness.gate import FaithfulnessGate
from sgl_stateful.params import MemoryParams
from sgl_stateful.planner import Prepared, PromptPlanner
from sgl_stateful.repair import parse_repair
from sgl_stateful.report import Report
from sgl_stateful.retrieval import Retrieved, Retriever


class RequestPlanner:
    """Plans callers' requests under one state of the model's weights. Thread-safe.

    Parameters
    ----------
    ladders
        What requests can choose from by name, the default first.
    """

    def __init__(
        self,
        *,
        ladders: Mapping[str, Ladder],
        retriever: Retriever,
        planner: PromptPlanner,
        gate: FaithfulnessGate,
    ) -> None:
        self._ladders = ladders
        self._retriever = retriever
        self._planner = planner
        self._gate = gate

    def plan(
        self,
        params: MemoryParams,
        *,
        head: Sequence[int],
        tail: Sequence[int],
        query: str,
        reserve_tokens: int,
        retrieved: Retrieved | None = None,
    ) -> Prepared:
        """See ``MemoryService.prepare_ids``."""
        name = params.policy or next(iter(self._ladders))
        if (ladder := self._ladders.get(name)) is None:
            known = ", ".join(self._ladders)
            raise BadMemoryRequest(f"custom_params.memory.policy: {name!r} is not served here; choose from {known}")
        found = retrieved or self._retriever.find_here(params, query)
        repair = parse_repair(params.repair or self._gate.repair(len(found.hits)))
        report = Report(params.mode, params.owner, name, [], repair.name, retrieve_ms=found.ms)
        if found.failure is not None:
            report.degraded, report.reason = True, f"retrieval_failed: {found.failure}"
        elif params.mode == "splice" and found.hits and (refusal := self._gate.refusal(len(found.hits))) is not None:
            params, report.reason = params.model_copy(update={"mode": "text"}), refusal
        started = time.perf_counter()
        prepared = self._planner.plan(
            params,
            ladder,
            repair,
            found.hits,
            head=head,
            tail=tail,
            reserve_tokens=reserve_tokens,
            salt=found.salt,
            report=report,
        )
        report.assemble_ms = 1e3 * (time.perf_counter() - started)
        return prepared
