"""What the routes of ``/v1/memory`` answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from memstore import (
    Addition,
    BlobStoreError,
    BlobStoreFull,
    Change,
    DuplicateFact,
    EmbedderMismatch,
    EmbeddingError,
    Fact,
    FactNotFound,
    FactSuperseded,
    FeedGap,
    IdempotencyConflict,
    InvalidInput,
    MemStoreError,
    PurgeReceipt,
    StoreBusy,
    StoreFull,
    StoreReadOnly,
    StoreRefused,
    StoreTLSError,
    StoreUnreachable,
    VersionConflict,
)
from sgl_stateful.errors import BadMemoryRequest, StatefulError

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 2


def fact_json(fact: Fact) -> dict[str, Any]:
    """A fact as the API shows it."""
    return {
        "id": fact.id,
        "owner": fact.owner,
        "text": fact.text,
        "stream": fact.stream,
        "speaker": fact.speaker,
        "time": fact.time,
        "metadata": dict(fact.metadata),
        "state": fact.state,
        "version": fact.version,
        "created_at": fact.created_at,
        "updated_at": fact.updated_at,
        "event_at": fact.event_at,
        "expires_at": fact.expires_at,
        "supersedes": fact.supersedes,
    }


def addition_json(addition: Addition) -> dict[str, Any]:
    """An added fact, and what a caller may want to look at."""
    near = [{"id": hit.fact.id, "score": hit.score, "text": hit.fact.text} for hit in addition.near_duplicates]
    return {
        **fact_json(addition.fact),
        "created": addition.created,
        "near_duplicates": near,
        "chunks": addition.chunks,
    }


def change_json(change: Change) -> dict[str, Any]:
    """An entry of the change feed."""
    return change._asdict()


def receipt_json(receipt: PurgeReceipt) -> dict[str, Any]:
    """What a purge removed."""
    return {
        "owner": receipt.owner,
        "at": receipt.at,
        **receipt.records._asdict(),
        "encodings": receipt.encodings,
        "kv_remains": receipt.kv_remains,
        "sessions": receipt.sessions,
    }


def error_response(error: Exception) -> JSONResponse:
    """One clear JSON error for whatever the store or the service raised."""
    status, headers = 500, None
    match error:
        case FactNotFound():
            status = 404
        case DuplicateFact() | FactSuperseded() | IdempotencyConflict() | VersionConflict():
            status = 409
        case FeedGap():
            status = 410
        case InvalidInput() | BadMemoryRequest() | RequestValidationError():
            status = 400
        case EmbeddingError() if error.position is not None:
            status = 400  # of this text; without one, nothing can be embedded
        case StoreFull() | BlobStoreFull():
            status = 507
        case StoreBusy() | StoreUnreachable() | StoreRefused() | StoreTLSError() | BlobStoreError():
            status, headers = 503, {"Retry-After": str(_RETRY_AFTER_S)}
        case EmbedderMismatch() | StoreReadOnly():
            status = 503  # until somebody does something about it
        case HTTPException():
            status = error.status_code
    message = _message(error).encode("utf-8", "backslashreplace").decode()
    body = {"error": {"message": message, "type": type(error).__name__, "code": status}}
    return JSONResponse(body, status_code=status, headers=headers)


def _message(error: Exception) -> str:
    if isinstance(error, HTTPException):
        return str(error.detail)
    if not isinstance(error, RequestValidationError):
        return str(error)
    return "; ".join(f"{'.'.join(map(str, problem['loc'][1:]))}: {problem['msg']}" for problem in error.errors())


class MemoryRoute(APIRoute):
    """A route whose failures, those of a body included, are answered by ``error_response``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of the route, with its failures caught."""
        handle = super().get_route_handler()

        async def handle_or_say_why(request: Request) -> Response:
            try:
                return await handle(request)
            except (MemStoreError, StatefulError, RequestValidationError, HTTPException) as error:
                return error_response(error)
            except Exception as error:
                # The serving boundary: a bug of ours must not look like one of SGLang's.
                logger.exception("%s %s failed", request.method, request.url.path)
                return error_response(error)

        return handle_or_say_why
