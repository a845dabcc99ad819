"""What is to be sent and how its reply is read: one value for both clients.

An operation is a generator that yields calls, is sent their results, and returns its own (``Steps``). It does no I/O:
``Sender`` and ``AsyncSender`` run it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import quote

from sgl_stateful.client.errors import InvalidCall

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request.

    Attributes
    ----------
    path
        With its parts quoted (``path``).
    read
        What the caller gets, from the reply's JSON. Raises ``Unreadable``.
    is_repeatable
        Whether doing it twice is the same as doing it once.
    """

    method: str
    path: str
    read: Callable[[Any], T]
    params: Mapping[str, Any] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    is_repeatable: bool = False

    def content(self) -> bytes | None:
        """The body in UTF-8.

        Raises
        ------
        TypeError, ValueError
            It cannot be JSON: of another type, not a number, or half of a surrogate pair.
        """
        if self.body is None:
            return None
        return json.dumps(self.body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class Decoder(Protocol[T_co]):
    """Makes a result of a streamed reply; one for each stream."""

    @property
    def text(self) -> str:
        """What has arrived so far."""
        ...

    def feed(self, event: Any) -> str:
        """Take one event and return the text that it adds. Raises ``Unreadable``, or ``Refused`` for an error."""
        ...

    def result(self) -> T_co:
        """The whole, once the stream has ended. Raises ``Unreadable``."""
        ...


@dataclass(frozen=True, slots=True)
class StreamCall(Generic[T]):
    """A request whose reply arrives in pieces; ``on_result`` sees the whole."""

    call: Call[Any]
    decoder: Callable[[], Decoder[T]]
    on_result: Callable[[T], object] | None = None


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A part of a list; ``next`` is where the next one begins, None at the end."""

    items: tuple[T, ...]
    next: str | int | None


PageCalls = Callable[[str | int | None], Call[Page[T]]]
Steps = Generator[Call[Any], Any, T]


def send(call: Call[T]) -> Steps[T]:
    """The step of one call, for ``yield from``."""
    result: T = yield call
    return result


def path(*parts: str) -> str:
    """A path of these parts, each quoted as a whole, so that any id and owner can stand in one.

    Raises
    ------
    InvalidCall
        A part is empty, or cannot be UTF-8.
    """
    if not all(parts):
        raise InvalidCall("an id or owner is empty")
    try:
        # Dots alone would be taken for "this folder" and "the one above".
        quoted = [part.replace(".", "%2E") if part in {".", ".."} else quote(part, safe="") for part in parts]
    except UnicodeEncodeError as error:
        raise InvalidCall(f"an id or owner is not text: {error}") from error
    return "/" + "/".join(quoted)


def given(**fields: Any) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}
