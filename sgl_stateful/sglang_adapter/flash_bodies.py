"""What the routes of registered questions take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr

from sgl_stateful.errors import BadFlashRequest, EmptyFlashQuestion
from sgl_stateful.flash.choices import MOST_CHOICES, choices_of
from sgl_stateful.flash.gate import DEFAULT_TARGET
from sgl_stateful.flash.question import DEFAULT_THRESHOLD, DEFAULT_TOKENS, Prompt, Question, check_name
from sgl_stateful.flash.sampling import canonical_sampling
from sgl_stateful.flash.slots import fill
from sgl_stateful.params import MemoryParams
from sgl_stateful.sessions.content import Content, Renderer

from .flash_serving import sampling_defaults
from .sampling import check_sampling
from .session_bodies import ContentBody
from .session_questions import Rendered, render_question

Share = Annotated[float, Field(allow_inf_nan=False, strict=True)]


class GateBody(BaseModel):
    """When a closed set of answers answers by itself: with which share of agreement with decoding for real."""

    model_config = ConfigDict(extra="forbid")

    target: Share = DEFAULT_TARGET


class SemanticBody(BaseModel):
    """Other words that mean the question are answered by it: from which similarity on."""

    model_config = ConfigDict(extra="forbid")

    threshold: Share = DEFAULT_THRESHOLD


class QuestionBody(ContentBody):
    """A question of a session: text, messages or input_ids, in which ``{{name}}`` is a slot that ``data`` fills."""

    data: dict[str, StrictStr | StrictInt | StrictFloat] = Field(default_factory=dict)
    max_tokens: StrictInt = DEFAULT_TOKENS
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    choices: list[str] | None = Field(None, max_length=MOST_CHOICES)
    min_interval_ms: StrictInt = 0
    priority: StrictInt = 0
    gate: GateBody | None = None
    audit_target: Share = DEFAULT_TARGET
    semantic: SemanticBody | None = None
    memory: MemoryParams | None = None

    def filled(self) -> Content:
        """The question with data in its slots; raises ``BadFlashRequest``."""
        return fill(self.content(), self.data)

    def question(self, name: str, renderer: Renderer) -> Question:
        """The question, rendered.

        Raises
        ------
        BadFlashRequest, BadSessionRequest, BadMemoryRequest
        """
        check_name(name)
        content = self.content()
        if not (content.text or content.messages or content.input_ids):
            raise EmptyFlashQuestion("there is no question: it has no tokens")
        filled = fill(content, self.data)
        if self.memory is not None and self.memory.owner != self.owner:
            raise BadFlashRequest("memory.owner has to be the session's owner")
        behind, first = (
            render_question(renderer, filled, self.memory, is_first=is_first) for is_first in (False, True)
        )
        sampling = registered_sampling(self.sampling_params, self.max_tokens)
        choices = () if self.choices is None else choices_of(self.choices, renderer.encode)
        return Question(
            name=name,
            content=content,
            data=self.data,
            behind=as_prompt(behind),
            first=as_prompt(first),
            query=behind.query,
            max_tokens=self.max_tokens,
            sampling_params=sampling,
            sampling=canonical_sampling(sampling, sampling_defaults()),
            choices=choices,
            min_interval_ms=self.min_interval_ms,
            priority=self.priority,
            target=None if self.gate is None else self.gate.target,
            audit_target=self.audit_target,
            memory=self.memory,
            semantic=None if self.semantic is None else self.semantic.threshold,
        )


class RegisterBody(QuestionBody):
    """A question, and its name in the session."""

    name: str = Field(max_length=256)


def registered_sampling(given: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """What the engine is sent: greedy unless said otherwise.

    Raises
    ------
    BadFlashRequest, BadSessionRequest
    """
    check_sampling(given)
    if given.get("max_new_tokens", max_tokens) != max_tokens:
        raise BadFlashRequest("sampling_params.max_new_tokens: say max_tokens instead")
    if given.get("n") not in (None, 1):
        raise BadFlashRequest("sampling_params.n has to be 1: a question has one answer")
    if given.get("custom_params"):
        raise BadFlashRequest("sampling_params.custom_params cannot be registered")
    plain = {name: value for name, value in given.items() if value is not None}
    return {"temperature": 0.0, **plain, "max_new_tokens": max_tokens}


def as_prompt(rendered: Rendered) -> Prompt:
    """Token ids of a question that was rendered."""
    return Prompt(tuple(rendered.head), tuple(rendered.tail))
