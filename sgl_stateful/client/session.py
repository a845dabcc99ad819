"""One session: what ``client.sessions.create``, ``get`` and ``fork`` give."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import Lock
from types import TracebackType
from typing import Any, Generic, Self, TypedDict, TypeVar, Unpack

from sgl_stateful.client.answers import Answer, AnswerDecoder
from sgl_stateful.client.call import Call, Steps, StreamCall, given, path, send
from sgl_stateful.client.content import Messages, content, memory_of
from sgl_stateful.client.entries import AsyncEntries, Entries
from sgl_stateful.client.errors import (
    ClientError,
    InvalidCall,
    OutcomeUnknown,
    SessionExpired,
    SessionNotFound,
    SessionVersionConflict,
    Unreachable,
)
from sgl_stateful.client.flash import AsyncFlash, Flash
from sgl_stateful.client.operation import AsyncSide, Operation, Streaming, SyncSide
from sgl_stateful.client.senders import AsyncSender, Sender
from sgl_stateful.client.session_results import Appended, Queued, SessionInfo, of_session

SESSIONS = "/v1/sessions"
_APPEND_REPEATS = 3

H = TypeVar("H")


class ForkOptions(TypedDict, total=False):
    """What a fork may have otherwise than its parent."""

    ttl_s: float | None
    max_age_s: float | None
    priority: int
    reserve_tokens: int
    pin: bool
    on_full: str


def closing(session_id: str, owner: str, known: SessionInfo) -> Steps[SessionInfo]:
    """Close a session, and return it as the server has it or, where only an earlier attempt was told, as ``known``.

    A server whose store is busy has ended the session all the same: the next attempt finds it closed.
    """
    call = Call("DELETE", SESSIONS + path(session_id), of_session, params={"owner": owner})
    try:
        return (yield from send(call))
    except SessionNotFound as error:
        if error.earlier is None or isinstance(error, SessionExpired):
            raise
        return replace(known, state="closed")


class SessionOperations(Generic[H]):
    """Operations on one session. Each raises the ``ClientError`` tree.

    Attributes
    ----------
    info
        As the replies have it: the one of the latest version that has described it, and of a turn since then version
        and length.
    """

    info: SessionInfo

    @property
    def version(self) -> int:
        """The latest that a reply has named."""
        return self.info.version

    @property
    def id(self) -> str:
        """Its id."""
        return self.info.id

    @property
    def owner(self) -> str:
        """Whose it is."""
        return self.info.owner

    @abstractmethod
    def _handle(self, info: SessionInfo) -> H: ...

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} version {self.version}>"

    def _at(self, *action: str) -> str:
        return SESSIONS + path(self.id, *action)

    def _begin(self, info: SessionInfo) -> None:
        self._seeing = Lock()
        self.info = info

    def _saw(self, info: SessionInfo) -> SessionInfo:
        with self._seeing:  # replies to several threads may be read in another order than they were written in
            if info.version >= self.info.version:
                self.info = info
        return info

    def _saw_answer(self, answer: Answer) -> Answer:
        self.saw_turn({**answer.session, **given(version=answer.version)})
        return answer

    def saw_turn(self, session: Mapping[str, Any]) -> None:
        """Take over version and length from what an answer says of its session; nothing from that of a query."""
        seen = given(version=session.get("version"), tokens=session.get("tokens"))
        with self._seeing:
            if seen.get("version", 0) > self.info.version:
                self.info = replace(self.info, **seen, raw={**self.info.raw, **seen})

    def _look(self) -> Call[SessionInfo]:
        return Call("GET", self._at(), SessionInfo.of, params={"owner": self.owner}, is_repeatable=True)

    def _change(self, action: str, **fields: Any) -> Steps[SessionInfo]:
        body = {"owner": self.owner, **given(**fields)}
        return self._saw((yield from send(Call("POST", self._at(action), of_session, body=body))))

    def _question(
        self, action: str, asked: dict[str, Any], memory: Mapping[str, Any] | None, **fields: Any
    ) -> Call[Answer]:
        if (fields.get("sampling_params") or {}).get("n") not in (None, 1):
            raise InvalidCall("n is not 1: ask once for each answer; any number of queries run at once")
        body = {"owner": self.owner, **asked, **given(memory=memory_of(memory, self.owner), **fields)}
        is_repeatable = action == "query" and not fields.get("stream")
        return Call("POST", self._at(action), Answer.of, body=body, is_repeatable=is_repeatable)

    @Operation
    def append(
        self,
        messages: Messages | None = None,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        if_version: int | None = None,
    ) -> Steps[Appended]:
        """Add data at the end; a string is one user message.

        With ``if_version`` it is done only to that version, and after a lost connection the session is looked at:
        where it still has that version the append is sent again, which cannot add twice, since the version would no
        longer be that one. Where it has another, nobody can tell whose append made it, and ``OutcomeUnknown`` is
        raised. Where looking or sending again fails, it stays ``Unreachable``: the first may have been done. Without
        ``if_version`` a lost connection raises ``Unreachable`` at once.
        """
        body = {"owner": self.owner, **content(messages, text, input_ids), **given(if_version=if_version)}
        call = Call("POST", self._at("append"), Appended.of, body=body)
        steps = send(call) if if_version is None else self._append_to(call, if_version)
        appended = yield from steps
        self._saw(appended.session)
        return appended

    def _append_to(self, call: Call[Appended], if_version: int) -> Steps[Appended]:
        lost: Unreachable | None = None
        for _ in range(_APPEND_REPEATS):
            try:
                return (yield from send(call))
            except SessionVersionConflict:
                if lost is None:
                    raise
            except ClientError as error:
                if isinstance(error, Unreachable) and error.was_sent:
                    lost = error
                elif lost is None or isinstance(error, SessionNotFound):
                    raise
                else:
                    raise lost from error
            try:
                session = yield from send(self._look())
            except SessionNotFound:
                raise  # and with the session goes what was added
            except ClientError as error:
                raise lost from error
            if session.version != if_version:
                self._saw(session)
                raise OutcomeUnknown(
                    f"the connection was lost, and the session has gone from version {if_version} to"
                    f" {session.version}: by this append, or by another's",
                    session=session,
                ) from lost
        assert lost is not None, "the loop ends otherwise only by returning or raising"
        raise lost

    @Operation
    def enqueue(
        self,
        messages: Messages | None = None,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
    ) -> Steps[Queued]:
        """``append`` without waiting for it; never sent again after a lost connection."""
        body = {"owner": self.owner, "wait": False, **content(messages, text, input_ids)}
        queued = yield from send(Call("POST", self._at("append"), Queued.of, body=body))
        self._saw(queued.session)
        return queued

    @Operation
    def query(
        self,
        /,
        messages: Messages | None = None,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        memory: Mapping[str, Any] | None = None,
        if_version: int | None = None,
        **fields: Any,
    ) -> Steps[Answer]:
        """Ask, and leave the session as it is; a string is one user message.

        ``memory`` is as in ``custom_params.memory``, and further keywords are fields of SGLang's ``/generate``.
        """
        asked = content(messages, text, input_ids)
        more = {"sampling_params": sampling_params, "if_version": if_version, **fields}
        return (yield from send(self._question("query", asked, memory, **more)))

    @Operation
    def turn(
        self,
        /,
        messages: Messages | None = None,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        memory: Mapping[str, Any] | None = None,
        if_version: int | None = None,
        **fields: Any,
    ) -> Steps[Answer]:
        """Ask, and make question and answer a part of the session; never sent again after a lost connection."""
        asked = content(messages, text, input_ids)
        more = {"sampling_params": sampling_params, "if_version": if_version, **fields}
        return self._saw_answer((yield from send(self._question("turn", asked, memory, **more))))

    @Streaming
    def stream(
        self,
        /,
        messages: Messages | None = None,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        memory: Mapping[str, Any] | None = None,
        if_version: int | None = None,
        **fields: Any,
    ) -> StreamCall[Answer]:
        """``query``, piece by piece."""
        asked = content(messages, text, input_ids)
        more = {"sampling_params": sampling_params, "if_version": if_version, **fields, "stream": True}
        return StreamCall(self._question("query", asked, memory, **more), AnswerDecoder)

    @Streaming
    def stream_turn(
        self,
        /,
        messages: Messages | None = None,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        memory: Mapping[str, Any] | None = None,
        if_version: int | None = None,
        **fields: Any,
    ) -> StreamCall[Answer]:
        """``turn``, piece by piece; leaving the stream early leaves the session as it was."""
        asked = content(messages, text, input_ids)
        more = {"sampling_params": sampling_params, "if_version": if_version, **fields, "stream": True}
        return StreamCall(self._question("turn", asked, memory, **more), AnswerDecoder, self._saw_answer)

    @Operation
    def fork(self, *, version: int | None = None, **options: Unpack[ForkOptions]) -> Steps[H]:
        """Open another session with the same content, or with that of an earlier ``version``."""
        body = {"owner": self.owner, **given(version=version), **options}
        return self._handle((yield from send(Call("POST", self._at("fork"), of_session, body=body))))

    @Operation
    def rewind(self, version: int, *, if_version: int | None = None) -> Steps[SessionInfo]:
        """Go back to the content of an earlier version, as a new one."""
        return (yield from self._change("rewind", version=version, if_version=if_version))

    @Operation
    def pin(self, *, on_full: str | None = None) -> Steps[SessionInfo]:
        """Ask for its KV to be kept. Raises ``PinRefused``."""
        return (yield from self._change("pin", on_full=on_full))

    @Operation
    def unpin(self) -> Steps[SessionInfo]:
        """Let its KV go where memory is needed."""
        return (yield from self._change("unpin"))

    @Operation
    def refresh(self) -> Steps[SessionInfo]:
        """Begin its idle time anew, and prefill what the pool has lost."""
        return (yield from self._change("refresh"))

    @Operation
    def reload(self) -> Steps[SessionInfo]:
        """Look at it once more."""
        return self._saw((yield from send(self._look())))

    @Operation
    def close(self) -> Steps[SessionInfo]:
        """Close it; what runs on it ends. A second time raises ``SessionClosed``."""
        return self._saw((yield from closing(self.id, self.owner, self.info)))


class Session(SyncSide, SessionOperations["Session"]):
    """A session of a ``Client``; as a context manager it closes the session, which may have ended before.

    Attributes
    ----------
    flash, entries
        Its registered questions, and what its next requests will begin with.
    """

    def __init__(self, sender: Sender, info: SessionInfo) -> None:
        self._sender = sender
        self.flash = Flash(sender, info.id, info.owner)
        self.entries = Entries(sender, info.id, info.owner)
        self._begin(info)

    def _handle(self, info: SessionInfo) -> Session:
        return Session(self._sender, info)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except SessionNotFound:
            return  # closed or expired: what was to be has been
        except ClientError:
            if error is None:  # else the caller has a more urgent one
                raise


class AsyncSession(AsyncSide, SessionOperations["AsyncSession"]):
    """A session of an ``AsyncClient``; ``async with`` closes the session, which may have ended before.

    Attributes
    ----------
    flash, entries
        Its registered questions, and what its next requests will begin with.
    """

    def __init__(self, sender: AsyncSender, info: SessionInfo) -> None:
        self._sender = sender
        self.flash = AsyncFlash(sender, info.id, info.owner)
        self.entries = AsyncEntries(sender, info.id, info.owner)
        self._begin(info)

    def _handle(self, info: SessionInfo) -> AsyncSession:
        return AsyncSession(self._sender, info)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except SessionNotFound:
            return
        except ClientError:
            if error is None:
                raise
