"""Errors of the client, one tree.

ClientError
├── InvalidCall               a call that was not sent, because it cannot be right, or the client is closed
├── UnexpectedReply           no such server answers like this
├── Unreachable               there was no answer, or not a whole one
│   ├── StreamCut             a stream ended before its end
│   └── OutcomeUnknown        the connection was lost, and whether the call was done cannot be told
└── Refused                   the server said no; what this attempt asked for was not done
    ├── BadRequest            400, 422
    │   ├── BadMemoryRequest
    │   ├── BadSessionRequest
    │   └── BadFlashRequest
    │       ├── EmptyFlashQuestion
    │       ├── FlashNeedsMemory
    │       ├── FlashSlotMissing
    │       └── FlashChoicesAlike
    ├── Unauthorized          401, 403
    ├── NotFound              404
    │   ├── FactNotFound
    │   ├── FlashNotFound
    │   └── SessionNotFound
    │       ├── SessionClosed
    │       └── SessionExpired
    ├── Conflict              409
    │   ├── VersionConflict
    │   │   └── SessionVersionConflict
    │   ├── TurnInProgress
    │   ├── SessionOfAnotherModel
    │   ├── DuplicateFact
    │   ├── FactSuperseded
    │   ├── FlashExists
    │   ├── FlashNotReady
    │   └── IdempotencyConflict
    ├── Gone                  410
    ├── TooLong               413
    │   └── SessionTooLong
    ├── TooMany               429
    │   ├── AppendQueueFull
    │   ├── FlashLimitReached
    │   ├── FlashReadersFull
    │   ├── FlashReaderTooSlow
    │   └── PinRefused        with its numbers
    ├── ServerFailed          500 and above
    │   ├── Unavailable       503
    │   │   └── SessionNotSaved
    │   └── StoreFull         507
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgl_stateful.client.session_results import SessionInfo


class ClientError(Exception):
    """Base of everything that a client raises.

    Attributes
    ----------
    earlier
        The failure of an attempt before the one that this is of, where that may have been done; None: there was none.
    """

    earlier: ClientError | None = None


class InvalidCall(ClientError, ValueError):
    """The call cannot be right as written, or the client is closed; nothing was sent."""


class UnexpectedReply(ClientError):
    """The reply is not what such a server answers: something else listens there, or it is of another version."""


class Unreachable(ClientError):
    """There was no answer.

    Attributes
    ----------
    was_sent
        Whether the server may have received the request, with this attempt or one before it, and done what it says.
    """

    def __init__(self, message: str, *, was_sent: bool = True) -> None:
        super().__init__(message)
        self.was_sent = was_sent


class StreamCut(Unreachable):
    """A stream ended before its end.

    Attributes
    ----------
    text
        What had arrived of it.
    """

    def __init__(self, message: str, *, text: str) -> None:
        super().__init__(message)
        self.text = text


class OutcomeUnknown(Unreachable):
    """The connection was lost, and the session has been changed since; by this call or by another's.

    Attributes
    ----------
    session
        As it is now.
    """

    def __init__(self, message: str, *, session: SessionInfo) -> None:
        super().__init__(message)
        self.session = session


@dataclass(frozen=True, slots=True)
class Refusal:
    """What an error reply says.

    Attributes
    ----------
    status
        HTTP status.
    type
        The server's name for the error; empty where it gave none.
    retry_after_s
        When to try again, where the server said so.
    raw
        The fields of ``error``.
    """

    status: int
    type: str
    message: str
    retry_after_s: float | None
    raw: Mapping[str, Any]


class Refused(ClientError):
    """The server said no.

    Attributes
    ----------
    refusal
        What it said.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal

    @property
    def status(self) -> int:
        """HTTP status."""
        return self.refusal.status

    @property
    def retry_after_s(self) -> float | None:
        """When to try again, where the server said so."""
        return self.refusal.retry_after_s


class BadRequest(Refused):
    """A field is unknown, missing or out of range."""


class BadMemoryRequest(BadRequest):
    """Of memory."""


class BadSessionRequest(BadRequest):
    """Of a session: besides, there was nothing to append, or the version is no longer kept."""


class BadFlashRequest(BadRequest):
    """Of a registered question."""


class EmptyFlashQuestion(BadFlashRequest):
    """The question has no tokens."""


class FlashNeedsMemory(BadFlashRequest):
    """Other words cannot be matched on a server without a memory."""


class FlashSlotMissing(BadFlashRequest):
    """A slot of the template has no data, or data has no slot."""


class FlashChoicesAlike(BadFlashRequest):
    """Two choices begin with the same token."""


class Unauthorized(Refused):
    """The key is missing or wrong, or the route wants the admin key."""


class NotFound(Refused):
    """There is no such thing, or it is another owner's."""


class FactNotFound(NotFound):
    """There is no such fact of this owner."""


class FlashNotFound(NotFound):
    """The session has no question of that name."""


class SessionNotFound(NotFound):
    """There is no such session of this owner."""


class SessionClosed(SessionNotFound):
    """It has been closed."""


class SessionExpired(SessionNotFound):
    """Its time has come to an end."""


class Conflict(Refused):
    """It is not as the caller believes."""


class VersionConflict(Conflict):
    """It has another version by now."""


class SessionVersionConflict(VersionConflict):
    """The session has another version by now."""


class TurnInProgress(Conflict):
    """Another turn of the session is running."""


class SessionOfAnotherModel(Conflict):
    """The session's token ids belong to another model or tokenizer."""


class DuplicateFact(Conflict):
    """The owner has this very fact already."""


class FactSuperseded(Conflict):
    """The fact has been superseded, and stays what it is."""


class IdempotencyConflict(Conflict):
    """The idempotency key came with something else before."""


class FlashExists(Conflict):
    """The session has a question of that name, or this very one under another."""


class FlashNotReady(Conflict):
    """The question has no answer that may be served now."""


class Gone(Refused):
    """It is no longer kept."""


class TooLong(Refused):
    """It does not fit."""


class SessionTooLong(TooLong):
    """The session would not fit the model's context or the pool beside an answer."""


class TooMany(Refused):
    """Not now; the server may say when."""


class AppendQueueFull(TooMany):
    """Too many appends of the session are waiting."""


class FlashLimitReached(TooMany):
    """No more questions may be registered; ``refusal.raw`` has the numbers."""


class FlashReadersFull(TooMany):
    """Too many follow the answers of the session."""


class FlashReaderTooSlow(TooMany):
    """Changes came faster than they were read, and were no longer kept: follow anew."""


class PinRefused(TooMany):
    """The pin does not fit into the budget of all sessions, or into the owner's quota.

    Numbers are in cells; a cell is one token slot of the KV pool. One that the server did not give is None.
    """

    def _cells(self, name: str) -> int | None:
        number = self.refusal.raw.get(name)
        return number if isinstance(number, int) else None

    @property
    def needed(self) -> int | None:
        """By this pin, beyond what it has."""
        return self._cells("needed")

    @property
    def pinned(self) -> int | None:
        """By all sessions."""
        return self._cells("pinned")

    @property
    def budget(self) -> int | None:
        """How many all sessions may have."""
        return self._cells("budget")

    @property
    def owner_pinned(self) -> int | None:
        """By this owner's sessions."""
        return self._cells("owner_pinned")

    @property
    def quota(self) -> int | None:
        """How many an owner may have."""
        return self._cells("quota")


class ServerFailed(Refused):
    """The server could not do it."""


class Unavailable(ServerFailed):
    """Not now: a store does not answer, or the server is starting or stopping."""


class SessionNotSaved(Unavailable):
    """A turn was answered, but could not be written down: look at the session before the next."""


class StoreFull(ServerFailed):
    """There is no room left for facts or their KV."""


def _tree(root: type[Refused]) -> dict[str, type[Refused]]:
    found = {root.__name__: root}
    for kind in root.__subclasses__():
        found |= _tree(kind)
    return found


_BY_TYPE = _tree(Refused) | {"BlobStoreFull": StoreFull}
_BY_STATUS: dict[int, type[Refused]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    409: Conflict,
    410: Gone,
    413: TooLong,
    422: BadRequest,
    429: TooMany,
    503: Unavailable,
    507: StoreFull,
}


def refused(refusal: Refusal) -> Refused:
    """The error of a refusal: by its type, else by its status."""
    of_status = _BY_STATUS.get(refusal.status, ServerFailed if refusal.status >= 500 else Refused)
    kind = _BY_TYPE.get(refusal.type, of_status)
    return kind(refusal)
