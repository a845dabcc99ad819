"""What the routes of ``/v1/sessions`` take."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt

from memstore.session_log import SessionHeader
from sgl_stateful.params import MemoryParams
from sgl_stateful.sessions.content import Content
from sgl_stateful.sessions.service import Options

_LONGEST_S = 10 * 365 * 86400.0
_MOST_TOKENS = 1 << 31
_MOST_MESSAGES = 10_000

Seconds = Annotated[float, Field(gt=0, le=_LONGEST_S, allow_inf_nan=False, strict=True)]
Tokens = Annotated[int, Field(ge=0, lt=_MOST_TOKENS, strict=True)]
Version = Annotated[int, Field(ge=1, lt=2**63, strict=True)]
Priority = Annotated[int, Field(ge=-100, le=100, strict=True)]
OnFull = Literal["refuse", "demote"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    owner: str


class ContentBody(_Body):
    """Exactly one of text, messages and input_ids."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, max_length=_MOST_MESSAGES)
    input_ids: list[StrictInt] | None = None

    def content(self) -> Content:
        """What it holds.

        Raises
        ------
        BadSessionRequest
            None of them, or several.
        """
        return Content(
            self.text,
            None if self.messages is None else tuple(self.messages),
            None if self.input_ids is None else tuple(self.input_ids),
        )


class CreateBody(ContentBody):
    """A new session; without content it is empty. A null ``ttl_s`` is no idle limit."""

    ttl_s: Seconds | None = None
    max_age_s: Seconds | None = None
    reserve_tokens: Tokens = 0
    priority: Priority = 0
    window_tokens: Annotated[int, Field(ge=1, lt=_MOST_TOKENS, strict=True)] | None = None
    pin: bool = True
    on_full: OnFull = "refuse"

    def has_content(self) -> bool:
        """Whether it begins with something."""
        return any(value is not None for value in (self.text, self.messages, self.input_ids))

    def options(self, default_ttl_s: float) -> Options:
        """How it is to be kept."""
        return Options(
            ttl_s=self.ttl_s if "ttl_s" in self.model_fields_set else default_ttl_s,
            max_age_s=self.max_age_s,
            reserve_tokens=self.reserve_tokens,
            priority=self.priority,
            window_tokens=self.window_tokens,
            on_full=self.on_full,
            pin=self.pin,
        )


class AppendBody(ContentBody):
    """Data to add; ``wait: false`` answers once it is queued."""

    if_version: Version | None = None
    wait: bool = True


class AskBody(ContentBody):
    """A query or turn: the question, and what of SGLang's ``/generate`` goes with it."""

    sampling_params: dict[str, Any] = Field(default_factory=dict)
    stream: bool = False
    return_logprob: bool = False
    top_logprobs_num: Annotated[int, Field(ge=0, le=1000)] = 0
    token_ids_logprob: list[StrictInt] | None = None
    return_text_in_logprobs: bool = False
    memory: MemoryParams | None = None
    if_version: Version | None = None
    fresh: bool = False
    max_staleness_s: Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False, strict=True)] = 0.0


class ForkBody(_Body):
    """What differs from the parent."""

    version: Version | None = None
    ttl_s: Seconds | None = None
    max_age_s: Seconds | None = None
    reserve_tokens: Tokens = 0
    priority: Priority = 0
    pin: bool = True
    on_full: OnFull = "refuse"

    def options(self, parent: SessionHeader) -> Options:
        """How the fork is to be kept."""
        given = {name: getattr(self, name) for name in self.model_fields_set - {"owner", "version"}}
        return Options(
            **{
                "ttl_s": parent.ttl_s,
                "max_age_s": parent.max_age_s,
                "reserve_tokens": parent.reserve_tokens,
                "priority": parent.priority,
                "window_tokens": parent.window_tokens,
                "on_full": parent.on_full,
                "pin": parent.is_pinned,
                **given,
            }
        )


class RewindBody(_Body):
    """Which version to go back to."""

    version: Version
    if_version: Version | None = None


class PinBody(_Body):
    """What becomes of a pin that does not fit; by default what the session says."""

    on_full: OnFull | None = None


class OwnerBody(_Body):
    """Whose session it is."""
