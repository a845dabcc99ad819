"""What a caller puts into a session or asks of it, as token ids.

A chat template renders a whole conversation; a session only ever gets what is new. The new messages are rendered
behind a short conversation that stands for what is there already, and what the template made of that is cut off. That
is right for every template that renders a message by itself, and told by name where it is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from sgl_stateful.errors import BadSessionRequest

Message = Mapping[str, Any]

# Private-use characters, as for facts, but others: both may stand in one prompt.
MARK = "\ue000\ue001session\ue001\ue000"
_USER: Message = {"role": "user", "content": "."}
BEFORE: tuple[Message, ...] = (_USER, {"role": "assistant", "content": MARK})
"""Stands for what a session holds, in front of new messages."""
_ASKED: tuple[Message, ...] = ({"role": "user", "content": MARK},)
"""Stands in front of an answer: templates want roles to alternate."""
_MESSAGE_SIZE = 1000  # characters that take as long to tokenise as a message takes to be rendered


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that sessions need."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def apply_chat_template(
        self, conversation: Sequence[Message], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class Content:
    """Exactly one of text, messages and token ids.

    Raises
    ------
    BadSessionRequest
        None of them, or several.
    """

    text: str | None = None
    messages: tuple[Message, ...] | None = None
    input_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("text", "messages", "input_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise BadSessionRequest(f"send one of text, messages and input_ids, not {' and '.join(given) or 'none'}")


class Renderer:
    """Makes token ids of contents. Thread-safe as far as the tokenizer is.

    Parameters
    ----------
    vocab_size
        Token ids lie in ``[0, vocab_size)``.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._closings: dict[str, str] = {}

    def check(self, content: Content) -> None:
        """Refuse what is wrong at first sight, before it is accepted to be rendered later.

        Raises
        ------
        BadSessionRequest
            It is empty, no text, for a chat template that there is not, or has ids outside the vocabulary.
        """
        if not (content.text or content.messages or content.input_ids):
            raise BadSessionRequest("there is nothing in it: it has no tokens")
        if content.text is not None:
            try:
                content.text.encode()
            except UnicodeError as error:
                raise BadSessionRequest(f"text cannot be tokenised: {error}") from error
        if content.messages is not None:
            self._check_template()
        if content.input_ids is not None:
            self._check_ids(content.input_ids)

    @staticmethod
    def size(content: Content) -> int:
        """How long it takes to render, in characters of text that take as long to tokenise; itself quick to tell."""
        if content.messages is not None:
            return sum(_MESSAGE_SIZE + _characters(message) for message in content.messages)
        return len(content.text or content.input_ids or ())

    def data(self, content: Content, *, is_first: bool) -> list[list[int]]:
        """Ids of what becomes part of a session: one list a message, without empty ones.

        Parameters
        ----------
        is_first
            Nothing stands before it: the template's own beginning belongs to it.

        Raises
        ------
        BadSessionRequest
            It is empty, or cannot be rendered.
        """
        if content.messages is None:
            parts = [self._plain(content, is_first=is_first)]
        else:
            parts = [self.encode(text) for text in self._pieces(content.messages, is_first=is_first)]
        parts = [part for part in parts if part]
        if not parts:
            raise BadSessionRequest("there is nothing in it: it has no tokens")
        return parts

    def question(self, content: Content, *, is_first: bool) -> list[int]:
        """Ids of what is asked, up to where the answer begins.

        Raises
        ------
        BadSessionRequest
            It is empty, or cannot be rendered.
        """
        if content.messages is None:
            ids = self._plain(content, is_first=is_first)
        else:
            ids = self.encode(self.question_text(content.messages, is_first=is_first))
        if not ids:
            raise BadSessionRequest("there is no question: it has no tokens")
        return ids

    def question_text(self, messages: Sequence[Message], *, is_first: bool) -> str:
        """What the template makes of the messages, up to where the answer begins.

        Raises
        ------
        BadSessionRequest
            They cannot be rendered.
        """
        if not messages:
            raise BadSessionRequest("there is no question: it has no messages")
        if is_first:
            return self._render(messages, add_generation_prompt=True)
        return self.behind(self._render([*BEFORE, *messages], add_generation_prompt=True))

    def behind(self, rendered: str) -> str:
        """Of a conversation that begins with ``BEFORE``, what the template made of the messages behind it.

        Raises
        ------
        BadSessionRequest
            The template does not render them by themselves.
        """
        return self._behind(rendered, BEFORE)

    def closing_text(self) -> str:
        """What the template puts behind an answer."""
        return self._closing(BEFORE)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a piece of text, special tokens only where the text spells them or the model begins with some.

        Raises
        ------
        BadSessionRequest
            It is no text that can be encoded.
        """
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens) if text else []
        except (TypeError, UnicodeError) as error:
            raise BadSessionRequest(f"text cannot be tokenised: {error}") from error

    def closing_ids(self) -> list[int]:
        """Ids of ``closing_text``."""
        return self.encode(self.closing_text())

    def answer(self, token_ids: Sequence[int], text: str, *, stopped_by: Any, is_chat: bool) -> list[int]:
        """Ids of an answer as it becomes part of a session.

        Parameters
        ----------
        token_ids, text
            As generated, and as the caller saw it.
        stopped_by
            The token id or string that ended it; None: its length.
        is_chat
            Whether the question was messages: then what the template puts behind an answer follows.
        """
        ids = list(token_ids)
        if isinstance(stopped_by, str):
            ids = self._visible(ids, text)
        elif stopped_by is not None and ids and ids[-1] == stopped_by:
            ids.pop()
        return [*ids, *self.closing_ids()] if is_chat else ids

    def _visible(self, ids: list[int], text: str) -> list[int]:
        """The ids of what was left of an answer when a stop string was cut off."""
        for end in range(len(ids), -1, -1):
            shown = self._tokenizer.decode(ids[:end])
            if shown == text:
                return ids[:end]
            if len(shown) < len(text):
                break
        return self.encode(text)

    def _plain(self, content: Content, *, is_first: bool) -> list[int]:
        if content.text is not None:
            return self.encode(content.text, add_special_tokens=is_first)
        assert content.input_ids is not None
        self._check_ids(content.input_ids)
        return list(content.input_ids)

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not ids or (min(ids) >= 0 and max(ids) < self._vocab_size):
            return
        position, token_id = next((n, i) for n, i in enumerate(ids) if not 0 <= i < self._vocab_size)
        raise BadSessionRequest(
            f"input_ids[{position}] is {token_id}, and this model's vocabulary has {self._vocab_size} tokens"
        )

    def _pieces(self, messages: Sequence[Message], *, is_first: bool) -> list[str]:
        """The text of each message, or all of it as one where the template needs them together."""
        if not messages:
            return []
        if is_first:
            whole = self._render(messages, add_generation_prompt=False)
        else:
            whole = self.behind(self._render([*BEFORE, *messages], add_generation_prompt=False))
        # Each by itself, and the first is what is left, as the template's own beginning belongs to it.
        try:
            rest = [self._alone(message, is_last=False) for message in messages[1:-1]]
            rest += [self._alone(message, is_last=True) for message in messages[1:][-1:]]
        except BadSessionRequest:
            return [whole]
        joined = "".join(rest)
        if not whole.endswith(joined):
            return [whole]
        return [whole[: len(whole) - len(joined)], *rest]

    def _alone(self, message: Message, *, is_last: bool) -> str:
        """What the template makes of one message of a conversation, behind others that are always the same."""
        is_answer = message.get("role") == "assistant"
        before = _ASKED if is_answer else BEFORE
        if is_last or not is_answer:
            return self._behind(self._render([*before, message], add_generation_prompt=False), before)
        # Templates may leave a model's thinking out once the next question is asked.
        shown = self._behind(self._render([*before, message, _USER], add_generation_prompt=False), before)
        if not shown.endswith(self._next_question):
            raise BadSessionRequest("this model's chat template does not render messages one by one")
        return shown[: len(shown) - len(self._next_question)]

    @cached_property
    def _next_question(self) -> str:
        return self._alone(_USER, is_last=True)

    def _behind(self, rendered: str, before: Sequence[Message]) -> str:
        _, mark, rest = rendered.partition(MARK)
        closing = self._closing(before)
        if not mark or not rest.startswith(closing) or MARK in rest:
            raise BadSessionRequest(
                "this model's chat template does not render messages one by one: send text or input_ids"
            )
        return rest[len(closing) :]

    def _closing(self, before: Sequence[Message]) -> str:
        """What the template puts behind the last of these messages, which holds the mark."""
        role = str(before[-1]["role"])
        if role not in self._closings:
            _, mark, closing = self._render(before, add_generation_prompt=False).partition(MARK)
            if not mark:
                raise BadSessionRequest("this model's chat template does not show answers: send text or input_ids")
            self._closings[role] = closing
        return self._closings[role]

    def _check_template(self) -> None:
        if getattr(self._tokenizer, "chat_template", None) is None:
            raise BadSessionRequest("this model has no chat template: send text or input_ids")

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        self._check_template()
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:
            # Whatever a template's own code raises is about the messages that it was given.
            raise BadSessionRequest(f"the chat template cannot render these messages: {error}") from error
        return str(rendered)


def _characters(value: Any) -> int:
    """Of every text inside."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 0
