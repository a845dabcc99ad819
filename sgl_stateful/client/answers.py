"""Answers of ``/generate``, of a session and of the chat route: whole, and put together from a stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from sgl_stateful.client.reading import Unreadable, mapping, part, value
from sgl_stateful.client.replies import refused_by


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a query or a turn.

    Attributes
    ----------
    meta_info
        SGLang's account of the request: ``finish_reason``, token counts, log probabilities where asked for.
    data_version
        Version of the session that the answer was computed on.
    version
        The one that a turn made; None for a query.
    served_from
        ``engine``; ``flash`` for the stored answer of a registered question; ``entry`` where what was known behind an
        entry of the session was of use.
    """

    text: str
    meta_info: Mapping[str, Any]
    output_ids: tuple[int, ...] = ()
    data_version: int | None = None
    version: int | None = None
    served_from: str = "engine"
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, data: Any) -> Self:
        """From JSON."""
        return value(cls, data, output_ids=tuple(mapping(data).get("output_ids") or ()))

    @property
    def session(self) -> Mapping[str, Any]:
        """What the answer says of its session: tokens, pin, what was cached and what prefilled."""
        found: Mapping[str, Any] = self.meta_info.get("session") or {}
        return found

    @property
    def memory(self) -> Mapping[str, Any] | None:
        """What the answer says of its memory; None where none was asked for."""
        return self.meta_info.get("memory")


class AnswerDecoder:
    """Joins the events of ``/generate``: each has the text so far, or only what is new with SGLang's own flag."""

    def __init__(self) -> None:
        self.text = ""
        self._output_ids: list[int] = []
        self._is_incremental = False
        self._last: Mapping[str, Any] | None = None

    def feed(self, event: Any) -> str:
        """The text that an event adds. Raises ``Refused`` for an error, ``Unreadable``."""
        if "error" in mapping(event):
            raise _failure(event["error"])
        meta_info = mapping(part(event, "meta_info"))
        reason = meta_info.get("finish_reason")
        if isinstance(reason, Mapping) and reason.get("type") == "abort" and reason.get("status_code"):
            raise refused_by({"message": reason.get("message")}, int(reason["status_code"]))
        self._last = event
        text, ids = str(part(event, "text")), list(event.get("output_ids") or ())
        self._is_incremental |= 0 < len(ids) < meta_info.get("completion_tokens", 0)
        piece = text if self._is_incremental else text[len(self.text) :]
        self._output_ids = [*self._output_ids, *ids] if self._is_incremental else ids
        self.text += piece
        return piece

    def result(self) -> Answer:
        """The whole. Raises ``Unreadable`` where there was no event."""
        if self._last is None:
            raise Unreadable("the stream held no answer")
        return Answer.of({**self._last, "text": self.text, "output_ids": self._output_ids})


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """An answer of ``/v1/chat/completions``: its first choice.

    Attributes
    ----------
    memory, session
        What the server says of them; None where the request named none.
    usage
        Token counts; a stream has them only with ``stream_options``.
    """

    text: str
    finish_reason: str | None = None
    memory: Mapping[str, Any] | None = None
    session: Mapping[str, Any] | None = None
    usage: Mapping[str, Any] | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, data: Any) -> Self:
        """From JSON."""
        choice = _first_choice(data)
        message = mapping(part(choice, "message"))
        return value(cls, data, text=message.get("content") or "", finish_reason=choice.get("finish_reason"))


class ChatDecoder:
    """Joins the chunks of ``/v1/chat/completions``."""

    def __init__(self) -> None:
        self.text = ""
        self._seen: dict[str, Any] = {}

    def feed(self, event: Any) -> str:
        """The text that a chunk adds. Raises ``Refused`` for an error, ``Unreadable``."""
        if "error" in mapping(event):
            raise _failure(event["error"])
        self._seen |= {name: event[name] for name in ("memory", "session", "usage") if event.get(name) is not None}
        if not part(event, "choices"):  # the one with the usage
            return ""
        choice = _first_choice(event)
        if choice.get("index"):
            return ""
        self._seen["finish_reason"] = choice.get("finish_reason") or self._seen.get("finish_reason")
        piece = mapping(part(choice, "delta")).get("content") or ""
        self.text += piece
        return piece

    def result(self) -> ChatAnswer:
        """The whole."""
        return value(ChatAnswer, self._seen | {"text": self.text})


def _first_choice(data: Any) -> Mapping[str, Any]:
    choices = part(data, "choices")
    if not isinstance(choices, list) or not choices:
        raise Unreadable(f"the answer has no choice: {data!r:.200}")
    return mapping(choices[0])


def _failure(error: Any) -> Exception:
    code = error.get("code") if isinstance(error, Mapping) else None
    return refused_by({"error": error}, code if isinstance(code, int) else 500)
