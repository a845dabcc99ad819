"""Methods that are written once and belong to both clients.

Each is a method that says what is to be sent. Looked up on an object of ``Client`` it sends and waits; on one of
``AsyncClient`` it gives something to await, or to iterate with ``async for``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import wraps
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from sgl_stateful.client.call import PageCalls, Steps, StreamCall
from sgl_stateful.client.senders import AsyncSender, Sender
from sgl_stateful.client.streams import AsyncStream, Stream

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")


class SyncSide:
    """What belongs to a ``Client``."""

    _sender: Sender


class AsyncSide:
    """What belongs to an ``AsyncClient``."""

    _sender: AsyncSender


class Operation(Generic[S, P, T]):
    """A method that sends calls, one after another, and returns a result."""

    def __init__(self, steps: Callable[Concatenate[S, P], Steps[T]]) -> None:
        self._steps = steps
        self.__doc__ = steps.__doc__

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(self, instance: SyncSide, owner: type | None = None) -> Callable[P, T]: ...
    @overload
    def __get__(self, instance: AsyncSide, owner: type | None = None) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        steps = MethodType(self._steps, instance)

        @wraps(steps)
        def run(*args: P.args, **kwargs: P.kwargs) -> Any:
            return instance._sender.run(steps(*args, **kwargs))

        return run


class Streaming(Generic[S, P, T]):
    """A method whose answer arrives in pieces."""

    def __init__(self, streamed: Callable[Concatenate[S, P], StreamCall[T]]) -> None:
        self._streamed = streamed
        self.__doc__ = streamed.__doc__

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(self, instance: SyncSide, owner: type | None = None) -> Callable[P, Stream[T]]: ...
    @overload
    def __get__(self, instance: AsyncSide, owner: type | None = None) -> Callable[P, AsyncStream[T]]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        streamed = MethodType(self._streamed, instance)
        kind: Any = Stream if isinstance(instance, SyncSide) else AsyncStream

        @wraps(streamed)
        def open_stream(*args: P.args, **kwargs: P.kwargs) -> Any:
            return kind(instance._sender, streamed(*args, **kwargs))

        return open_stream


class Listing(Generic[S, P, T]):
    """A method that iterates a list, one page after another."""

    def __init__(self, pages: Callable[Concatenate[S, P], PageCalls[T]]) -> None:
        self._pages = pages
        self.__doc__ = pages.__doc__

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(self, instance: SyncSide, owner: type | None = None) -> Callable[P, Iterator[T]]: ...
    @overload
    def __get__(self, instance: AsyncSide, owner: type | None = None) -> Callable[P, AsyncIterator[T]]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        pages = MethodType(self._pages, instance)
        walk: Any = _walk if isinstance(instance, SyncSide) else _async_walk

        @wraps(pages)
        def iterate(*args: P.args, **kwargs: P.kwargs) -> Any:
            return walk(instance._sender, pages(*args, **kwargs))

        return iterate


def _walk(sender: Sender, pages: PageCalls[T]) -> Iterator[T]:
    page = sender.send(pages(None))
    yield from page.items
    while page.next is not None:
        page = sender.send(pages(page.next))
        yield from page.items


async def _async_walk(sender: AsyncSender, pages: PageCalls[T]) -> AsyncIterator[T]:
    page = await sender.send(pages(None))
    for item in page.items:
        yield item
    while page.next is not None:
        page = await sender.send(pages(page.next))
        for item in page.items:
            yield item
