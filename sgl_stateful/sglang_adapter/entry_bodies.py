"""What the routes of entries take."""

from __future__ import annotations

from typing import Any

from pydantic import Field, StrictInt, StrictStr

from sgl_stateful.errors import EmptyFlashQuestion
from sgl_stateful.flash.choices import MOST_CHOICES, choices_of
from sgl_stateful.flash.entry_point import MOST_STOPS, EntryPoint, check_sampling_ahead, decoding_path
from sgl_stateful.flash.gate import DEFAULT_TARGET
from sgl_stateful.flash.question import DEFAULT_TOKENS, check_name
from sgl_stateful.sessions.content import Renderer

from .flash_bodies import GateBody, Share, as_prompt, registered_sampling
from .flash_serving import sampling_defaults
from .session_bodies import ContentBody
from .session_questions import render_question


class EntryBody(ContentBody):
    """What the next request to a session will begin with: text, messages or input_ids."""

    max_tokens: StrictInt = DEFAULT_TOKENS
    until: list[StrictInt | StrictStr] = Field(default_factory=list, max_length=MOST_STOPS)
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    choices: list[str] | None = Field(None, max_length=MOST_CHOICES)
    gate: GateBody | None = None
    audit_target: Share = DEFAULT_TARGET
    priority: StrictInt = 0

    def entry(self, name: str, renderer: Renderer) -> EntryPoint:
        """The entry, rendered.

        Raises
        ------
        BadFlashRequest, BadSessionRequest
        """
        check_name(name)
        content = self.content()
        if not (content.text or content.messages or content.input_ids):
            raise EmptyFlashQuestion("there is no entry: it has no tokens")
        behind, first = (render_question(renderer, content, None, is_first=is_first) for is_first in (False, True))
        sampling = registered_sampling(self.sampling_params, self.max_tokens)
        defaults = sampling_defaults()
        check_sampling_ahead(sampling, defaults)
        return EntryPoint(
            name=name,
            content=content,
            behind=as_prompt(behind),
            first=as_prompt(first),
            max_tokens=self.max_tokens,
            sampling_params=sampling,
            sampling=decoding_path(sampling, defaults),
            choices=() if self.choices is None else choices_of(self.choices, renderer.encode),
            priority=self.priority,
            target=None if self.gate is None else self.gate.target,
            audit_target=self.audit_target,
            until=tuple(one for one in self.until if isinstance(one, str)),
            until_ids=tuple(one for one in self.until if isinstance(one, int)),
        )


class RegisterEntryBody(EntryBody):
    """An entry, and its name in the session."""

    name: str = Field(max_length=256)
