"""What a caller asks of a session in one request: ``custom_params: {"session": {...}}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sgl_stateful.errors import BadSessionRequest, ForgedDirective

from .hold import HOLD_KEY
from .use import Mode

SESSION_KEY = "session"


class SessionParams(BaseModel):
    """The session in front of a prompt.

    Attributes
    ----------
    id
        Which.
    owner
        Whose it has to be; by default whoever knows its id may use it.
    mode
        ``query`` leaves it as it is; ``turn`` makes question and answer part of it.
    if_version
        Refuse to answer on another version.
    fresh
        Decode for real, whatever is stored for a registered question.
    max_staleness_s
        For how long at most the version of a stored answer may have been out of date; 0: not at all.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(max_length=256)
    owner: str | None = None
    mode: Mode = "query"
    if_version: int | None = Field(None, ge=1, strict=True)
    fresh: bool = False
    max_staleness_s: float = Field(0.0, ge=0, le=86400, allow_inf_nan=False, strict=True)


def parse_session_params(custom_params: Mapping[str, Any] | None) -> SessionParams | None:
    """Read a request's session parameters; None where it asks for none.

    Raises
    ------
    ForgedDirective
        The caller set the server's internal key.
    BadSessionRequest
        A field is unknown, missing or out of range; the message names each.
    """
    if not isinstance(custom_params, Mapping):
        return None
    if HOLD_KEY in custom_params:
        raise ForgedDirective(f"custom_params.{HOLD_KEY} is reserved for the server; remove it")
    raw = custom_params.get(SESSION_KEY)
    if raw is None:
        return None
    try:
        return SessionParams.model_validate(raw)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or SESSION_KEY}: {problem['msg']}" for problem in error.errors()
        )
        raise BadSessionRequest(f"custom_params.session is not valid: {problems}") from error
