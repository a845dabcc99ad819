"""Server-sent events with names and ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class NamedEvent(NamedTuple):
    """One event; ``id`` is empty where it has none."""

    id: str
    kind: str
    data: bytes


class NamedEventReader:
    """Cuts a body into its events, whatever the pieces are that it arrives in; each has one line of data."""

    def __init__(self) -> None:
        self._rest = b""
        self._fields: dict[bytes, bytes] = {}

    def feed(self, chunk: bytes) -> Iterator[NamedEvent]:
        """The events that a chunk completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if line:
                name, _, value = line.partition(b":")
                self._fields[name] = value.strip()
            elif fields := self._taken():
                name, kind = fields.get(b"id", b""), fields.get(b"event", b"message")
                yield NamedEvent(name.decode(), kind.decode(), fields[b"data"])

    def _taken(self) -> dict[bytes, bytes]:
        """The fields of the event that has ended; none where it was a comment."""
        fields, self._fields = self._fields, {}
        return fields if b"data" in fields else {}
