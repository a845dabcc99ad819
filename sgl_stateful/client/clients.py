"""The two clients."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

import httpx

from sgl_stateful.client.answers import ChatAnswer, ChatDecoder
from sgl_stateful.client.call import Call, StreamCall
from sgl_stateful.client.chat import Mode, SessionRef, chat_call, seen_by
from sgl_stateful.client.content import Messages
from sgl_stateful.client.errors import InvalidCall
from sgl_stateful.client.facts import AsyncFacts, Facts
from sgl_stateful.client.operation import AsyncSide, SyncSide
from sgl_stateful.client.retry import RetryPolicy
from sgl_stateful.client.senders import AsyncSender, Sender
from sgl_stateful.client.sessions import AsyncSessions, Sessions
from sgl_stateful.client.streams import AsyncStream, Stream

DEFAULT_TIMEOUT_S = 300.0
_CONNECT_TIMEOUT_S = 10.0
# A connection that the server closes while a request is on its way to it loses that request. SGLang's server closes
# one that has been idle for 5 s, and so would httpx at that very moment. The numbers are httpx's own.
LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=2.0)
_POLICY = RetryPolicy()

T = TypeVar("T")


def _options(base_url: str, api_key: str | None, timeout: float | None) -> dict[str, Any]:
    if not base_url.startswith(("http://", "https://")):
        raise InvalidCall(f"base_url is {base_url!r}: it begins with http:// or https://")
    connect_s = _CONNECT_TIMEOUT_S if timeout is None else min(timeout, _CONNECT_TIMEOUT_S)
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    timeouts = httpx.Timeout(timeout, connect=connect_s)
    return {"base_url": base_url, "timeout": timeouts, "limits": LIMITS, "headers": headers}


class Client(SyncSide):
    """A server with sessions and memory.

    Thread-safe, and a context manager that closes the connections.

    Parameters
    ----------
    base_url
        Such as ``http://localhost:30000``, without ``/v1``.
    owner
        Whose sessions and facts, where a call does not say.
    api_key
        The server's key; its admin key for ``facts.purge`` and ``sessions.stats`` where it has one.
    timeout
        Seconds without a byte from the server after which an attempt is given up; None: never.
    retries, deadline_s
        How often a call is repeated where that is safe (``sgl_stateful.client.retry``), and until when.
    transport
        httpx's own seam: for tests, proxies, unix sockets.

    Attributes
    ----------
    sessions, facts
        What is done with them.

    Raises
    ------
    ClientError
        From every call.
    """

    def __init__(
        self,
        base_url: str,
        *,
        owner: str | None = None,
        api_key: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        retries: int = _POLICY.retries,
        deadline_s: float = _POLICY.deadline_s,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        http = httpx.Client(**_options(base_url, api_key, timeout), transport=transport)
        self._sender = Sender(http, RetryPolicy(retries, deadline_s))
        self.owner = owner
        self.sessions = Sessions(self._sender, owner)
        self.facts = Facts(self._sender, owner)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; sessions stay open on the server."""
        self._sender.http.close()

    def send(self, call: Call[T]) -> T:
        """Send a call to a route that has no method here."""
        return self._sender.send(call)

    def stream(self, streamed: StreamCall[T]) -> Stream[T]:
        """The same, where the reply arrives in pieces."""
        return Stream(self._sender, streamed)

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        memory: Mapping[str, Any] | None = None,
        session: SessionRef | None = None,
        mode: Mode = "query",
        stream: Literal[False] = False,
        model: str = "default",
        **fields: Any,
    ) -> ChatAnswer: ...
    @overload
    def chat(
        self,
        messages: Messages,
        *,
        memory: Mapping[str, Any] | None = None,
        session: SessionRef | None = None,
        mode: Mode = "query",
        stream: Literal[True],
        model: str = "default",
        **fields: Any,
    ) -> Stream[ChatAnswer]: ...
    def chat(
        self,
        messages: Messages,
        *,
        memory: Mapping[str, Any] | None = None,
        session: SessionRef | None = None,
        mode: Mode = "query",
        stream: bool = False,
        model: str = "default",
        **fields: Any,
    ) -> ChatAnswer | Stream[ChatAnswer]:
        """Ask on the OpenAI-compatible route; further keywords are fields of its body, such as ``max_tokens``.

        Parameters
        ----------
        memory
            As ``custom_params.memory``; ``{}`` for the client's owner and the defaults.
        session, mode
            Messages come behind this session; with ``turn`` the exchange becomes a part of it.
        fields
            ``custom_params`` among them goes beside what ``memory`` and ``session`` say.
        stream
            Give the answer in pieces.
        """
        call = chat_call(
            messages,
            owner=self.owner,
            memory=memory,
            session=session,
            mode=mode,
            is_streamed=stream,
            fields={"model": model, **fields},
        )
        return self.stream(StreamCall(call, ChatDecoder, partial(seen_by, session))) if stream else self.send(call)


class AsyncClient(AsyncSide):
    """``Client`` for asyncio: the same, to be awaited."""

    def __init__(
        self,
        base_url: str,
        *,
        owner: str | None = None,
        api_key: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        retries: int = _POLICY.retries,
        deadline_s: float = _POLICY.deadline_s,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        http = httpx.AsyncClient(**_options(base_url, api_key, timeout), transport=transport)
        self._sender = AsyncSender(http, RetryPolicy(retries, deadline_s))
        self.owner = owner
        self.sessions = AsyncSessions(self._sender, owner)
        self.facts = AsyncFacts(self._sender, owner)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections; sessions stay open on the server."""
        await self._sender.http.aclose()

    def send(self, call: Call[T]) -> Coroutine[Any, Any, T]:
        """Send a call to a route that has no method here."""
        return self._sender.send(call)

    def stream(self, streamed: StreamCall[T]) -> AsyncStream[T]:
        """The same, where the reply arrives in pieces."""
        return AsyncStream(self._sender, streamed)

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        memory: Mapping[str, Any] | None = None,
        session: SessionRef | None = None,
        mode: Mode = "query",
        stream: Literal[False] = False,
        model: str = "default",
        **fields: Any,
    ) -> Coroutine[Any, Any, ChatAnswer]: ...
    @overload
    def chat(
        self,
        messages: Messages,
        *,
        memory: Mapping[str, Any] | None = None,
        session: SessionRef | None = None,
        mode: Mode = "query",
        stream: Literal[True],
        model: str = "default",
        **fields: Any,
    ) -> AsyncStream[ChatAnswer]: ...
    def chat(
        self,
        messages: Messages,
        *,
        memory: Mapping[str, Any] | None = None,
        session: SessionRef | None = None,
        mode: Mode = "query",
        stream: bool = False,
        model: str = "default",
        **fields: Any,
    ) -> Coroutine[Any, Any, ChatAnswer] | AsyncStream[ChatAnswer]:
        """``Client.chat``: to be awaited, or with ``stream`` iterated by ``async for``."""
        call = chat_call(
            messages,
            owner=self.owner,
            memory=memory,
            session=session,
            mode=mode,
            is_streamed=stream,
            fields={"model": model, **fields},
        )
        return self.stream(StreamCall(call, ChatDecoder, partial(seen_by, session))) if stream else self.send(call)
