"""What the routes of ``/v1/memory`` take."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from memstore import NewFact
from sgl_stateful.errors import BadMemoryRequest

MAX_LISTED = 1000
_MAX_ADDED = 10_000


class FactBody(BaseModel):
    """One fact to add; ``expires_at`` in Unix seconds."""

    model_config = ConfigDict(extra="forbid")

    text: str
    stream: str = ""
    speaker: str | None = None
    time: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    expires_at: float | None = None


class AddBody(FactBody):
    """One fact, or many under ``facts``; ``wait`` answers once their KV exists."""

    text: str | None = None  # type: ignore[assignment]
    owner: str
    facts: list[FactBody] | None = Field(None, min_length=1, max_length=_MAX_ADDED)
    idempotency_key: str | None = None
    wait: bool = False

    def new_facts(self) -> list[NewFact]:
        """The facts of the body.

        Raises
        ------
        BadMemoryRequest
            Both forms at once, or neither.
        """
        if (self.text is None) == (self.facts is None):
            raise BadMemoryRequest("send either 'text' or 'facts'")
        if self.facts is not None and (beside := sorted(self.model_fields_set & FactBody.model_fields.keys())):
            raise BadMemoryRequest(f"with 'facts', {', '.join(beside)} belongs into each of them")
        single = self.facts is None
        bodies = (
            [FactBody.model_validate(self.model_dump(include=set(FactBody.model_fields)))] if single else self.facts
        )
        return [NewFact(**body.model_dump()) for body in bodies or []]

    def key(self, header: str | None) -> str | None:
        """The idempotency key, of the body or of the ``Idempotency-Key`` header; refuses two different ones."""
        if header is not None and self.idempotency_key not in (None, header):
            raise BadMemoryRequest("idempotency_key and the Idempotency-Key header differ: send one of them")
        return header if self.idempotency_key is None else self.idempotency_key


class _ChangeBody(BaseModel):
    """Fields that are not sent keep what they are."""

    model_config = ConfigDict(extra="forbid")

    owner: str
    stream: str = ""
    speaker: str | None = None
    time: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    expires_at: float | None = None
    wait: bool = False

    def fields(self) -> dict[str, Any]:
        """What is to be changed beside the text."""
        names = self.model_fields_set & {"stream", "speaker", "time", "metadata", "expires_at"}
        return {name: getattr(self, name) for name in names}


class UpdateBody(_ChangeBody):
    """New values of some fields of a fact; null clears speaker, time and expires_at."""

    text: str = ""

    def fields(self) -> dict[str, Any]:
        """What is to be changed.

        Raises
        ------
        BadMemoryRequest
            Nothing is.
        """
        fields = super().fields() | ({"text": self.text} if "text" in self.model_fields_set else {})
        if not fields:
            raise BadMemoryRequest("send at least one field of the fact that is to change")
        return fields


class SupersedeBody(_ChangeBody):
    """The fact that takes another's place: its stream, speaker and metadata, unless given, are the other's."""

    text: str


class SearchBody(BaseModel):
    """A search without a prompt, as a request with memory would search."""

    model_config = ConfigDict(extra="forbid")

    owner: str
    query: str
    k: int = Field(10, ge=0, le=MAX_LISTED)
    min_score: float | None = None
    where: dict[str, Any] | None = None
    mode: Literal["vector", "keyword", "hybrid"] = "hybrid"
