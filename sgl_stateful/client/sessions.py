"""Sessions of an owner: ``client.sessions``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, Unpack

from sgl_stateful.client.call import Call, Page, PageCalls, Steps, given, path, send
from sgl_stateful.client.content import Messages, content, owner_of
from sgl_stateful.client.operation import AsyncSide, Listing, Operation, SyncSide
from sgl_stateful.client.reading import each, part
from sgl_stateful.client.senders import AsyncSender, Sender
from sgl_stateful.client.session import SESSIONS, AsyncSession, ForkOptions, Session, closing
from sgl_stateful.client.session_results import Pin, SessionInfo, SessionStats, of_session

_PAGE = 100

H = TypeVar("H")


class CreateOptions(ForkOptions, total=False):
    """How a session is to be kept; see ``docs/sessions.md``."""

    window_tokens: int | None


class SessionsOperations(Generic[H]):
    """Operations on the sessions of an owner. Each raises the ``ClientError`` tree."""

    _default_owner: str | None

    @abstractmethod
    def _handle(self, info: SessionInfo) -> H: ...

    @Operation
    def create(
        self,
        messages: Messages | None = None,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        owner: str | None = None,
        **options: Unpack[CreateOptions],
    ) -> Steps[H]:
        """Open a session, with nothing in it or with a prefix that stays; a string is one system message."""
        is_empty = messages is None and text is None and input_ids is None
        prefix = {} if is_empty else content(messages, text, input_ids, role="system")
        body = {"owner": owner_of(owner, self._default_owner), **prefix, **options}
        return self._handle((yield from send(Call("POST", SESSIONS, of_session, body=body))))

    @Operation
    def get(self, session_id: str, *, owner: str | None = None) -> Steps[H]:
        """One session. Raises ``SessionNotFound``."""
        params = {"owner": owner_of(owner, self._default_owner)}
        call = Call("GET", SESSIONS + path(session_id), of_session, params=params, is_repeatable=True)
        return self._handle((yield from send(call)))

    @Operation
    def list(
        self, *, owner: str | None = None, limit: int = _PAGE, after: str | int | None = None
    ) -> Steps[Page[SessionInfo]]:
        """One page; the next begins ``after`` this one's ``next``."""
        return (yield from send(_page_of(owner_of(owner, self._default_owner), limit, after)))

    @Listing
    def iter(self, *, owner: str | None = None) -> PageCalls[SessionInfo]:
        """Iterate all of them."""
        name = owner_of(owner, self._default_owner)
        return lambda after: _page_of(name, _PAGE, after)

    @Operation
    def close(self, session_id: str, *, owner: str | None = None) -> Steps[SessionInfo]:
        """Close one; what runs on it ends. A second time raises ``SessionClosed``.

        Where the server's store did not answer the attempt that closed it, version and length are 0: not known.
        """
        name = owner_of(owner, self._default_owner)
        unknown = SessionInfo(session_id, name, version=0, tokens=0, pin=Pin("unpinned"))
        return (yield from closing(session_id, name, unknown))

    @Operation
    def stats(self, *, sessions: int = 0) -> Steps[SessionStats]:
        """Cells, counts and latencies, and up to ``sessions`` sessions of all owners; wants the admin key."""
        call = Call("GET", f"{SESSIONS}/stats", SessionStats.of, params={"sessions": sessions}, is_repeatable=True)
        return (yield from send(call))


def _page_of(owner: str, limit: int, after: str | int | None) -> Call[Page[SessionInfo]]:
    params = given(owner=owner, limit=limit, after=after)
    return Call("GET", SESSIONS, _read_page, params=params, is_repeatable=True)


def _read_page(reply: Any) -> Page[SessionInfo]:
    return Page(each(part(reply, "sessions"), SessionInfo.of), part(reply, "next"))


class Sessions(SyncSide, SessionsOperations[Session]):
    """``Client.sessions``."""

    def __init__(self, sender: Sender, owner: str | None) -> None:
        self._sender = sender
        self._default_owner = owner

    def _handle(self, info: SessionInfo) -> Session:
        return Session(self._sender, info)


class AsyncSessions(AsyncSide, SessionsOperations[AsyncSession]):
    """``AsyncClient.sessions``."""

    def __init__(self, sender: AsyncSender, owner: str | None) -> None:
        self._sender = sender
        self._default_owner = owner

    def _handle(self, info: SessionInfo) -> AsyncSession:
        return AsyncSession(self._sender, info)
