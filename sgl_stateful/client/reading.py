"""Values out of JSON: known fields into dataclasses, unknown ones ignored, the JSON itself kept as ``raw``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

T = TypeVar("T")


class Unreadable(ValueError):
    """The JSON is not of the shape that is read; the sender tells the caller as ``UnexpectedReply``."""


def mapping(data: Any) -> Mapping[str, Any]:
    """JSON that is an object. Raises ``Unreadable`` where it is not."""
    if not isinstance(data, Mapping):
        raise Unreadable(f"an object was expected, not {data!r:.200}")
    return data


def part(data: Any, name: str) -> Any:
    """A field of an object. Raises ``Unreadable`` where it is missing."""
    found = mapping(data)
    if name not in found:
        raise Unreadable(f"{name!r} is missing from {data!r:.200}")
    return found[name]


def each(data: Any, read: Callable[[Any], T]) -> tuple[T, ...]:
    """The elements of an array, read. Raises ``Unreadable`` where it is none."""
    if not isinstance(data, Sequence) or isinstance(data, str):
        raise Unreadable(f"an array was expected, not {data!r:.200}")
    return tuple(read(item) for item in data)


def value(kind: type[T], data: Any, **read: Any) -> T:
    """A dataclass from an object; ``read`` has the fields that were read already.

    Raises
    ------
    Unreadable
        A field without a default is missing, or ``data`` is not an object.
    """
    given = mapping(data)
    known = [field for field in fields(kind) if field.init and field.name != "raw"]  # type: ignore[arg-type]
    found = {field.name: given[field.name] for field in known if field.name in given} | read
    needed = [field.name for field in known if field.default is MISSING and field.default_factory is MISSING]
    missing = [name for name in needed if name not in found]
    if missing:
        raise Unreadable(f"{', '.join(missing)} is missing from {data!r:.200}")
    build: Callable[..., T] = kind
    return build(**found, raw=given)


def optional(data: Any, read: Callable[[Any], T]) -> T | None:
    """What may be null."""
    return None if data is None else read(data)
