"""Replies and failures of the transport, as results and errors."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx

from sgl_stateful.client.call import Call
from sgl_stateful.client.errors import (
    ClientError,
    InvalidCall,
    Refusal,
    Refused,
    UnexpectedReply,
    Unreachable,
    refused,
)
from sgl_stateful.client.reading import Unreadable

T = TypeVar("T")

# The request had no connection to travel on.
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


def result(call: Call[T], response: httpx.Response) -> T:
    """What a reply that was read says.

    Raises
    ------
    Refused, UnexpectedReply
    """
    if response.is_error:
        raise refusal(response)
    try:
        return call.read(response.json())
    except (Unreadable, ValueError) as error:
        raise UnexpectedReply(f"{call.method} {call.path}: {error}") from error


def refusal(response: httpx.Response) -> Refused:
    """The error of an error reply that was read."""
    try:
        body = response.json()
    except ValueError:  # a proxy's page
        body = {}
    return refused_by(body, response.status_code, headers=response.headers, otherwise=response.text[:500])


def refused_by(body: Any, status: int, *, headers: Mapping[str, str] | None = None, otherwise: str = "") -> Refused:
    """The error that a JSON body tells: under ``error`` (ours, ``/generate``), ``detail`` or bare."""
    found = body if isinstance(body, Mapping) else {}
    error = found.get("error") or found.get("detail") or found
    fields = error if isinstance(error, Mapping) else {"message": str(error)}
    message = fields.get("message") or otherwise or httpx.codes.get_reason_phrase(status) or "no reason was given"
    kind = fields.get("type")
    return refused(
        Refusal(
            status=status,
            type=kind if isinstance(kind, str) else "",
            message=f"{message} (HTTP {status})",
            retry_after_s=_retry_after_s((headers or {}).get("Retry-After")),
            raw=fields,
        )
    )


def _retry_after_s(header: str | None) -> float | None:
    """Seconds, or a date as HTTP writes it; None for neither."""
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        return max(parsedate_to_datetime(header).timestamp() - time.time(), 0.0)
    except ValueError:
        return None


def transport_failure(error: httpx.RequestError) -> ClientError:
    """What the transport's failure means for the caller."""
    reason = str(error) or type(error).__name__
    request = f"{error.request.method} {error.request.url}"
    if isinstance(error, (httpx.UnsupportedProtocol, httpx.LocalProtocolError)):
        return InvalidCall(f"{request}: {reason}")
    if not isinstance(error, httpx.TransportError):
        return UnexpectedReply(f"{request}: {reason}")
    was_sent = not isinstance(error, _NOT_SENT)
    return Unreachable(f"{request}: {reason}", was_sent=was_sent)


def event_of(data: bytes) -> Any:
    """The JSON of one event of a stream. Raises ``Unreadable``."""
    try:
        return json.loads(data)
    except ValueError as error:
        raise Unreadable(f"an event is not JSON: {data!r:.200}") from error
