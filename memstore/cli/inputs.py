"""Reading what was typed: text from stdin, JSON objects, points in time."""

import contextlib
import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from memstore.errors import InvalidInput


def read_text(text: str | None, file: Path | None = None) -> str:
    """Return `text`, or what is in `file`; `-` is stdin. Of those two, one line break at the end is left out.

    Raises
    ------
    InvalidInput
        Where both are given or none is, or what was read is not UTF-8.
    """
    if (text is None) == (file is None):
        raise InvalidInput("pass the text, - for stdin, or --file: one of them")
    if text is not None and text != "-":
        return text
    try:
        read = sys.stdin.buffer.read() if file is None or str(file) == "-" else file.read_bytes()
        return read.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"the text is not UTF-8: byte {error.start} belongs to no character") from error


def json_object(option: str, text: str) -> Mapping[str, object]:
    """Return a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{option} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidInput(f"{option} is JSON, but no object: write {{...}}")
    return value


def unix_seconds(option: str, text: str) -> float:
    """Return a point in time, given in Unix seconds or in ISO 8601; without a zone it is in UTC."""
    with contextlib.suppress(ValueError):
        return float(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(
            f"{option} is {text!r}: write Unix seconds or ISO 8601, such as 2030-05-08T12:00Z"
        ) from error
    return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
