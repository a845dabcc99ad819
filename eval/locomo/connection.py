"""One connection to a server: what it answers, or one of two errors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx

from locomo.errors import RequestRefused, ServerFailed
from locomo.judging.client import Patience

_TIMEOUT_S = 600.0
_FLUSH_TIMEOUT_S = 30.0
_SHOWN_CHARACTERS = 500
# Less than the 5 s after which a server closes an idle connection, so that none is used as it closes.
_LIMITS = httpx.Limits(keepalive_expiry=2.0)
# Nothing was computed, and the same request may be answered later.
_BUSY = frozenset({408, 425, 429, 502, 503, 504})
# Of the key, the address or the model, not of what one request says: every other request would meet the same.
_OF_EVERY_REQUEST = frozenset({401, 402, 403, 404, 405, 407})
_STATUS_PARTS = frozenset({"model", "policies", "encoder"})


class Event(NamedTuple):
    """One object of a stream, and the seconds from sending the request until it came."""

    elapsed_s: float
    data: dict[str, Any]


class ServerConnection:
    """Requests to one server; a context manager.

    Parameters
    ----------
    url
        Up to the paths of the requests: ``http://host:30000``, ``https://host/v1``.
    patience
        With which a request is sent again that was answered with 408, 425, 429, 502, 503 or 504.
    transport
        In place of the network.
    sleep
        The waits between attempts, seconds.

    Raises
    ------
    RequestRefused
        From every request: it is refused for what it says (400, 413, 422 and the like), others may be answered.
    ServerFailed
        From every request: the server cannot be reached, breaks off, is busy after every attempt, refuses whoever
        asks, or answers with an error of its own or with what is no JSON.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = _TIMEOUT_S,
        patience: Patience | None = None,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        try:
            address = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ServerFailed(f"this is no address of a server: {error}") from error
        self._http = httpx.Client(
            base_url=address.copy_with(query=None, fragment=None),
            params=address.params,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=timeout_s,
            limits=_LIMITS,
            transport=transport,
        )
        self._patience = Patience() if patience is None else patience
        self._sleep = sleep

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    @property
    def shown_url(self) -> str:
        """The address without what may be secret in it: user, password and query."""
        return str(self._http.base_url.copy_with(username="", password=""))

    def json(self, method: str, path: str, **kwargs: Any) -> Any:
        """Send a request; what it is answered, None where that is empty. ``kwargs`` as httpx has them."""
        response = self._request(method, path, **kwargs)
        return _parsed(response.text, self._named(method, path)) if response.content.strip() else None

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[Event]:
        """Send a request whose answer is a stream of server-sent events; every object that comes, up to ``[DONE]``.

        Seconds count from the attempt that is answered.
        """
        failures, what = 0, self._named("POST", path)
        while True:
            started = time.perf_counter()
            try:
                with self._http.stream("POST", path, json=body) as response:
                    if response.is_success:
                        yield from _events(response, what, started)
                        return
                    response.read()
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise _broken(what, error) from error
            failures += 1
            self._wait_or_raise(response, what, failures)

    def status(self) -> dict[str, Any]:
        """``/v1/memory/status``."""
        found = self.json("GET", "/v1/memory/status")
        if not (isinstance(found, dict) and found.keys() >= _STATUS_PARTS):
            raise ServerFailed("/v1/memory/status is not that of a server with memory")
        return found

    def pending(self) -> int:
        """How many encodings the server has still to make."""
        return int(self.status()["encoder"]["pending"])

    def flush_cache(self) -> None:
        """Empty the radix cache and the arena, once the server has nothing to do."""
        self._request("POST", "/flush_cache", params={"timeout": _FLUSH_TIMEOUT_S})

    def _named(self, method: str, path: str) -> str:
        return f"{method} {self.shown_url.rstrip('/')}/{path.lstrip('/')}"

    def _request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        failures, what = 0, self._named(method, path)
        while True:
            try:
                response = self._http.request(method, path, **kwargs)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise _broken(what, error) from error
            if response.is_success:
                return response
            failures += 1
            self._wait_or_raise(response, what, failures)

    def _wait_or_raise(self, response: httpx.Response, what: str, failures: int) -> None:
        status, said = response.status_code, response.text[:_SHOWN_CHARACTERS]
        if status not in _BUSY:
            raise _error_of(status, f"{what} answered {status}: {said}")
        if failures >= self._patience.attempts:
            raise ServerFailed(f"{what} answered {status}, after {failures} attempts: {said}")
        self._sleep(self._patience.wait_s(failures, _retry_after_s(response)))


def _events(response: httpx.Response, what: str, started: float) -> Iterator[Event]:
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        elapsed_s = time.perf_counter() - started
        payload = line.removeprefix("data:").strip()
        if payload == "[DONE]":
            return
        data = _parsed(payload, what)
        if not isinstance(data, dict):
            raise ServerFailed(f"{what} streams what is no object: {payload[:_SHOWN_CHARACTERS]}")
        if error := data.get("error"):
            code = error.get("code") if isinstance(error, dict) else None
            raise _error_of(code, f"{what} ended with {error}")
        yield Event(elapsed_s, data)
    raise ServerFailed(f"{what}: the stream broke off before [DONE]")


def _error_of(status: object, message: str) -> RequestRefused | ServerFailed:
    is_of_this_request = isinstance(status, int) and 400 <= status < 500 and status not in _BUSY | _OF_EVERY_REQUEST
    return RequestRefused(message) if is_of_this_request else ServerFailed(message)


def _broken(what: str, error: Exception) -> ServerFailed:
    return ServerFailed(f"{what}: {type(error).__name__}: {error}")


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ServerFailed(f"{what} answered with what is no JSON: {text[:_SHOWN_CHARACTERS]}") from error


def _retry_after_s(response: httpx.Response) -> float:
    """Seconds that a busy server asks to wait, 0 where it says nothing."""
    value = response.headers.get("Retry-After", "").strip()
    with suppress(ValueError):  # seconds, or else a date
        return max(0.0, float(value))
    with suppress(ValueError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0
