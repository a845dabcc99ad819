"""What a session that refuses answers over HTTP."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from memstore import InvalidInput
from sgl_stateful.errors import BadSessionRequest, FlashLimitReached, PinRefused, SessionError

from .replies import error_response


def session_error(error: Exception) -> Response:
    """One clear JSON error for whatever a session, its log or the engine raised."""
    if isinstance(error, RequestValidationError | InvalidInput):
        error = BadSessionRequest(_problems(error))
    if not isinstance(error, SessionError):
        return error_response(error)
    body = {"message": str(error), "type": type(error).__name__, "code": error.status_code}
    if isinstance(error, PinRefused | FlashLimitReached):
        body |= asdict(error.numbers)
    headers = None if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return JSONResponse({"error": body}, status_code=error.status_code, headers=headers)


def _problems(error: Exception) -> str:
    if not isinstance(error, RequestValidationError):
        return str(error)
    text = "; ".join(f"{'.'.join(map(str, p['loc'][1:])) or p['loc'][0]}: {p['msg']}" for p in error.errors())
    return text.encode("utf-8", "backslashreplace").decode()
