"""The two senders: the only code of the client that exists twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import httpx

from sgl_stateful.client.call import Call, Steps
from sgl_stateful.client.errors import ClientError, InvalidCall
from sgl_stateful.client.replies import refusal, result, transport_failure
from sgl_stateful.client.retry import Attempts, RetryPolicy

T = TypeVar("T")


def _request(http: httpx.Client | httpx.AsyncClient, call: Call[Any]) -> httpx.Request:
    try:
        content = call.content()
        headers = {} if content is None else {"Content-Type": "application/json"}
        return http.build_request(call.method, call.path, params=call.params, content=content, headers=headers)
    except (TypeError, ValueError, httpx.InvalidURL) as error:
        raise InvalidCall(f"{call.method} {call.path}: {error}") from error


@contextmanager
def _while_open(http: httpx.Client | httpx.AsyncClient) -> Generator[None]:
    """Tell of a closed client what httpx tells by ``RuntimeError``."""
    try:
        yield
    except RuntimeError as error:
        if not http.is_closed:
            raise
        raise InvalidCall("the client is closed") from error


class Sender:
    """Sends calls and waits for them; thread-safe."""

    def __init__(
        self,
        http: httpx.Client,
        policy: RetryPolicy,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.http = http
        self._policy = policy
        self._clock = clock
        self._sleep = sleep

    def run(self, steps: Steps[T]) -> T:
        """Run an operation to its end. Raises ``ClientError``."""
        try:
            call = next(steps)
            while True:
                try:
                    answer = self.send(call)
                except ClientError as error:
                    call = steps.throw(error)
                else:
                    call = steps.send(answer)
        except StopIteration as stop:
            finished: T = stop.value
            return finished

    def send(self, call: Call[T]) -> T:
        """One call, with its repetitions. Raises ``ClientError``."""
        request = _request(self.http, call)
        attempts = Attempts(self._policy, is_repeatable=call.is_repeatable, clock=self._clock)
        while True:
            try:
                with _while_open(self.http):
                    response = self.http.send(request)
                return result(call, response)
            except httpx.RequestError as error:
                failure = transport_failure(error)
                failure.__cause__ = error
            except ClientError as error:
                failure = error
            self._sleep(attempts.wait_s(failure))

    @contextmanager
    def open(self, call: Call[Any]) -> Generator[httpx.Response]:
        """A reply whose body is still to be read; repeated only as long as there is none. Raises ``ClientError``."""
        request = _request(self.http, call)
        attempts = Attempts(self._policy, is_repeatable=call.is_repeatable, clock=self._clock)
        while True:
            try:
                with _while_open(self.http):
                    response = self.http.send(request, stream=True)
                if not response.is_error:
                    break
                response.read()
                failure: ClientError = refusal(response)
            except httpx.RequestError as error:
                failure = transport_failure(error)
                failure.__cause__ = error
            self._sleep(attempts.wait_s(failure))
        try:
            yield response
        finally:
            response.close()


class AsyncSender:
    """``Sender`` for asyncio."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        policy: RetryPolicy,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.http = http
        self._policy = policy
        self._clock = clock
        self._sleep = sleep

    async def run(self, steps: Steps[T]) -> T:
        """Run an operation to its end. Raises ``ClientError``."""
        try:
            call = next(steps)
            while True:
                try:
                    answer = await self.send(call)
                except ClientError as error:
                    call = steps.throw(error)
                else:
                    call = steps.send(answer)
        except StopIteration as stop:
            finished: T = stop.value
            return finished

    async def send(self, call: Call[T]) -> T:
        """One call, with its repetitions. Raises ``ClientError``."""
        request = _request(self.http, call)
        attempts = Attempts(self._policy, is_repeatable=call.is_repeatable, clock=self._clock)
        while True:
            try:
                with _while_open(self.http):
                    response = await self.http.send(request)
                return result(call, response)
            except httpx.RequestError as error:
                failure = transport_failure(error)
                failure.__cause__ = error
            except ClientError as error:
                failure = error
            await self._sleep(attempts.wait_s(failure))

    @asynccontextmanager
    async def open(self, call: Call[Any]) -> AsyncGenerator[httpx.Response]:
        """A reply whose body is still to be read; repeated only as long as there is none. Raises ``ClientError``."""
        request = _request(self.http, call)
        attempts = Attempts(self._policy, is_repeatable=call.is_repeatable, clock=self._clock)
        while True:
            try:
                with _while_open(self.http):
                    response = await self.http.send(request, stream=True)
                if not response.is_error:
                    break
                await response.aread()
                failure: ClientError = refusal(response)
            except httpx.RequestError as error:
                failure = transport_failure(error)
                failure.__cause__ = error
            await self._sleep(attempts.wait_s(failure))
        try:
            yield response
        finally:
            await response.aclose()
