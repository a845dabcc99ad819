"""Answers that arrive in pieces."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import httpx

from sgl_stateful.client.call import Decoder, StreamCall
from sgl_stateful.client.errors import ClientError, StreamCut, UnexpectedReply
from sgl_stateful.client.events import EventReader
from sgl_stateful.client.reading import Unreadable
from sgl_stateful.client.replies import event_of
from sgl_stateful.client.senders import AsyncSender, Sender

T = TypeVar("T")


class _Reading(Generic[T]):
    """One stream without its I/O."""

    def __init__(self, streamed: StreamCall[T]) -> None:
        self.streamed = streamed
        self.decoder: Decoder[T] = streamed.decoder()
        self._events = EventReader()
        self.last: Any = None

    def pieces(self, chunk: bytes) -> Iterator[str]:
        """Text that a chunk adds; empty for an event without any."""
        try:
            for data in self._events.feed(chunk):
                self.last = event_of(data)
                yield self.decoder.feed(self.last)
        except Unreadable as error:
            raise UnexpectedReply(str(error)) from error

    def cut(self, error: httpx.RequestError) -> StreamCut:
        return StreamCut(f"the stream was cut: {str(error) or type(error).__name__}", text=self.decoder.text)

    def finish(self) -> T:
        if not self._events.has_ended:
            raise StreamCut("the stream ended before its end", text=self.decoder.text)
        try:
            whole = self.decoder.result()
        except Unreadable as error:
            raise UnexpectedReply(str(error)) from error
        if self.streamed.on_result is not None:
            self.streamed.on_result(whole)
        return whole


class _Outcome(Generic[T]):
    """What both kinds of stream know."""

    def __init__(self, reading: _Reading[T]) -> None:
        self._reading = reading
        self._result: T | None = None

    @property
    def text(self) -> str:
        """What has arrived so far."""
        return self._reading.decoder.text

    @property
    def last_event(self) -> Any:
        """The JSON of the event that arrived last."""
        return self._reading.last

    @property
    def result(self) -> T:
        """The whole answer, once the stream has been read to its end. Raises ``ClientError`` before."""
        if self._result is None:
            raise ClientError("the stream has not been read to its end")
        return self._result


class Stream(_Outcome[T]):
    """Iterates the pieces of an answer's text as they arrive; the request is sent by the first.

    The pieces joined are the text of ``result``. Leaving it before its end, by ``with`` or ``close``, ends the
    generation on the server.

    Raises
    ------
    ClientError
        From iterating. Never repeated once the reply has begun: ``StreamCut`` has the text so far.
    """

    def __init__(self, sender: Sender, streamed: StreamCall[T]) -> None:
        super().__init__(_Reading(streamed))
        self._sender = sender
        self._pieces = self._read()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it where it is."""
        self._pieces.close()

    def read(self) -> T:
        """Read what is left and return the whole."""
        for _ in self._pieces:
            pass
        return self.result

    def _read(self) -> Generator[str]:
        with self._sender.open(self._reading.streamed.call) as response:
            try:
                for chunk in response.iter_bytes():
                    for piece in self._reading.pieces(chunk):
                        if piece:
                            yield piece
            except httpx.RequestError as error:
                raise self._reading.cut(error) from error
        self._result = self._reading.finish()


class AsyncStream(_Outcome[T]):
    """``Stream`` for asyncio: ``async for``, ``async with``, ``aclose``."""

    def __init__(self, sender: AsyncSender, streamed: StreamCall[T]) -> None:
        super().__init__(_Reading(streamed))
        self._sender = sender
        self._pieces = self._read()

    def __aiter__(self) -> AsyncIterator[str]:
        return self._pieces

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End it where it is."""
        await self._pieces.aclose()

    async def read(self) -> T:
        """Read what is left and return the whole."""
        async for _ in self._pieces:
            pass
        return self.result

    async def _read(self) -> AsyncGenerator[str]:
        async with self._sender.open(self._reading.streamed.call) as response:
            try:
                async for chunk in response.aiter_bytes():
                    for piece in self._reading.pieces(chunk):
                        if piece:
                            yield piece
            except httpx.RequestError as error:
                raise self._reading.cut(error) from error
        self._result = self._reading.finish()
