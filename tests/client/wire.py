"""A client on a transport that answers as a test says, and keeps what was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx

from sgl_stateful import AsyncClient, Client

Step = httpx.Response | Exception

SESSION: dict[str, Any] = {
    "id": "s1",
    "owner": "ana",
    "state": "open",
    "version": 2,
    "tokens": 51,
    "pin": {"state": "pinned", "cells": 51, "reason": None},
    "ttl_s": 3600,
    "max_age_s": None,
    "created_at": 1790000000.0,
    "used_at": 1790000012.5,
    "expires_at": 1790003612.5,
    "priority": 0,
    "reserve_tokens": 0,
    "on_full": "refuse",
    "window": None,
    "queue": {"waiting": 0, "dropped": 0},
    "parent": None,
}


class Wire:
    """Hands each request to ``answer``, which returns a response or raises what a transport would."""

    def __init__(self, answer: Callable[[httpx.Request], httpx.Response]) -> None:
        self.requests: list[httpx.Request] = []
        self._answer = answer

    def _take(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return self._answer(request)

    def client(self, **options: Any) -> Client:
        """A blocking client."""
        return Client("http://server", transport=httpx.MockTransport(self._take), **options)

    def async_client(self, **options: Any) -> AsyncClient:
        """One for asyncio."""
        return AsyncClient("http://server", transport=httpx.MockTransport(self._take), **options)


def refusal(status: int, kind: str, *, retry_after: str | None = None, **numbers: int) -> httpx.Response:
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    error = {"message": "no", "type": kind, "code": status, **numbers}
    return httpx.Response(status, json={"error": error}, headers=headers)


def script(*steps: Step) -> Wire:
    """A wire that answers in this order."""
    left: Iterator[Step] = iter(steps)

    def answer(request: httpx.Request) -> httpx.Response:
        step = next(left)
        if isinstance(step, Exception):
            raise step
        return step

    return Wire(answer)
