"""What of ``sampling_params`` reaches SGLang from the routes that build its requests themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sglang.srt.entrypoints.api_contract import generate_contract_error

from sgl_stateful.errors import BadSessionRequest
from sgl_stateful.params import MEMORY_KEY
from sgl_stateful.sessions.params import SESSION_KEY

MAX_ANSWERS = 128
_INT64_MAX = 2**63 - 1


def check_sampling(params: Mapping[str, Any]) -> None:
    """Refuse by name what SGLang would take from a request made in its process, and fail on later.

    ``/generate`` checks the types of a body as it reads it. A value of another type that comes past that check is met
    where nothing catches it: in the detokenizer, whose end is the server's.

    Raises
    ------
    BadSessionRequest
        An unknown field, a value of another type or out of range, or one that a session route has a place of its own
        for.
    """
    # The ids stand for the question, which was checked with the rest of the body.
    if (error := generate_contract_error({"input_ids": [0], "sampling_params": dict(params)})) is not None:
        raise BadSessionRequest(f"sampling_params: {error}")
    if not _fits(params):
        raise BadSessionRequest("sampling_params: a number is out of range")
    answers = params.get("n")
    if answers is not None and not 1 <= answers <= MAX_ANSWERS:
        raise BadSessionRequest(f"sampling_params.n has to be in [1, {MAX_ANSWERS}], not {answers}")
    given = params.get("stop_regex") or ()
    for pattern in [given] if isinstance(given, str) else given:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise BadSessionRequest(f"sampling_params.stop_regex: {pattern!r} is no regular expression") from error
    custom = params.get("custom_params")
    if custom is not None and not isinstance(custom, Mapping):
        raise BadSessionRequest("sampling_params.custom_params has to be an object")
    if custom and (named := sorted(custom.keys() & {SESSION_KEY, MEMORY_KEY})):
        raise BadSessionRequest(
            f"sampling_params.custom_params.{named[0]}: this route has the session in its path and takes memory beside"
            " sampling_params"
        )


def _fits(value: Any) -> bool:
    """Whether every integer fits 64 bits, as what carries the request to the scheduler has them."""
    if isinstance(value, Mapping):
        return all(map(_fits, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_fits, value))
    return not isinstance(value, int) or -_INT64_MAX <= value <= _INT64_MAX
