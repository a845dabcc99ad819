"""Registered questions in programs of SGLang's frontend language."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from sgl_stateful.client import Answer, Session
from sgl_stateful.client.call import given
from sgl_stateful.client.content import Messages
from sgl_stateful.client.flash import QuestionOptions
from sgl_stateful.client.flash_results import FlashQuestion
from sgl_stateful.flash.slots import fill
from sgl_stateful.sessions.content import Content


class ProgramFlash:
    """Registered questions of the session in front of a program; each call waits as those of ``ProgramSession`` do.

    Parameters
    ----------
    arrive
        Waits until the program has done what it was told before.
    named
        Makes an answer a variable of the program.
    """

    def __init__(
        self, handle: Session, arrive: Callable[[], None], named: Callable[[str | None, Answer], Answer]
    ) -> None:
        self._handle = handle
        self._arrive = arrive
        self._named = named

    def register(
        self,
        name: str,
        messages: Messages | None = None,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        **options: Unpack[QuestionOptions],
    ) -> FlashQuestion:
        """Register a question, as the client's ``session.flash.register``.

        A ``gen`` of the program is served from what is stored where its text and its sampling parameters are those of
        the question.
        """
        self._arrive()
        return self._handle.flash.register(name, messages, text=text, input_ids=input_ids, **options)

    def ask(self, name: str, *, into: str | None = None, **options: Any) -> Answer:
        """Ask a registered question: the answer is what is stored, where that holds now, and else decoded.

        Parameters
        ----------
        into
            Variable of the program that takes the answer's text; None: the one of the question's name.
        options
            Of the client's ``Session.query``: ``fresh``, ``max_staleness_s``, ``if_version``.

        Raises
        ------
        FlashNotFound
            Nothing is registered under the name.
        """
        self._arrive()
        asked = asked_again(self._handle.flash.get(name).raw)
        return self._named(into or name, self._handle.query(**asked, **options))


def asked_again(question: Mapping[str, Any]) -> dict[str, Any]:
    """What a query says to ask a registered question, of what the server shows of that."""
    messages, input_ids = question.get("messages"), question.get("input_ids")
    template = Content(
        text=question.get("text"),
        messages=None if messages is None else tuple(messages),
        input_ids=None if input_ids is None else tuple(input_ids),
    )
    filled = fill(template, question["data"])
    return given(
        text=filled.text,
        messages=None if filled.messages is None else list(filled.messages),
        input_ids=None if filled.input_ids is None else list(filled.input_ids),
        sampling_params=question["sampling_params"],
        memory=question.get("memory"),
    )
