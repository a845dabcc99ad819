"""What a caller asks of memory in one request: ``custom_params: {"memory": {...}}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from sgl_stateful.directive import DIRECTIVE_KEY
from sgl_stateful.errors import BadMemoryRequest, ForgedDirective
from sgl_stateful.prompt import Order, Placement
from sgl_stateful.repair import parse_repair

MEMORY_KEY = "memory"
MAX_FACTS = 1000

Mode = Literal["splice", "text", "off"]
Search = Literal["vector", "keyword", "hybrid"]


class MemoryParams(BaseModel):
    """Facts of ``owner`` that belong into the prompt, and how they get there.

    Attributes
    ----------
    owner
        Whose facts.
    facts
        Ids of the facts to serve, in the order of the prompt, instead of a search: ``k``, ``order``, ``min_score``,
        ``where``, ``search`` and ``query`` do not apply. Ids that the owner does not have are left out.
    k
        How many at most, 0 to 1000.
    mode
        ``splice`` serves encoded facts from memory, ``text`` prefills the same token ids, ``off`` leaves facts out.
    placement
        ``tail``: at the start of the last user message, behind the history. ``system``: at the end of the system
        message. Prompts without messages have the marker ``{{memory}}`` or take the facts first.
    order
        ``relevance_last`` puts the best fact nearest the question; ``chronological`` keeps the order of arrival.
    min_score
        Leave out facts below this score: of what ``search`` ranks by, before the boosts of a hybrid search; a search
        of its own (``POST /v1/memory/search``) shows it as ``unboosted``.
    where
        Only facts that pass this filter over stream, speaker, time and metadata (see ``memstore.search.filters``).
    search
        Rank by ``vector``, by ``keyword`` (BM25), or by both (``hybrid``), which finds most.
    query
        What to search for; by default the last user message (or the prompt).
    policy
        Which of the server's policies (``GET /v1/memory/status`` lists them); by default its first.
    repair
        Which tokens of spliced facts are computed anew: ``none``, ``first:M`` (of each fact), ``share:P%`` (of each
        fact, those that depend most on context), ``last:N`` or ``last:P%`` (of the block), or several with a plus
        between; by default the server's.
    insert_at
        For prompts given as token ids: the position at which the facts go in.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    owner: str
    facts: tuple[str, ...] | None = Field(None, max_length=MAX_FACTS)
    k: int = Field(10, ge=0, le=MAX_FACTS, strict=True)
    mode: Mode = "splice"
    placement: Placement = "tail"
    order: Order = "relevance_last"
    min_score: float | None = Field(None, ge=-1, le=1)
    where: dict[str, Any] | None = None
    search: Search = "hybrid"
    query: str | None = None
    policy: str | None = None
    repair: str | None = None
    insert_at: int = Field(0, ge=0, strict=True)

    @field_validator("repair")
    @classmethod
    def _is_a_repair(cls, repair: str | None) -> str | None:
        if repair is not None:
            parse_repair(repair)
        return repair

    @property
    def needs_query(self) -> bool:
        """Whether there is something to search for, and nothing here says what."""
        return self.query is None and self.facts is None and self.k > 0 and self.mode != "off"


def parse_memory_params(custom_params: Mapping[str, Any] | None) -> MemoryParams | None:
    """Read a request's memory parameters; None where it asks for none.

    Raises
    ------
    ForgedDirective
        The caller set the server's internal key.
    BadMemoryRequest
        A field is unknown, missing or out of range; the message names each.
    """
    if not isinstance(custom_params, Mapping):  # SGLang's to refuse, or None
        return None
    if DIRECTIVE_KEY in custom_params:
        raise ForgedDirective(f"custom_params.{DIRECTIVE_KEY} is reserved for the server; remove it")
    raw = custom_params.get(MEMORY_KEY)
    if raw is None:
        return None
    try:
        return MemoryParams.model_validate(raw)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or MEMORY_KEY}: {problem['msg']}" for problem in error.errors()
        )
        raise BadMemoryRequest(f"custom_params.memory is not valid: {problems}") from error
