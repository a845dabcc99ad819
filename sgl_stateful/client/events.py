"""Server-sent events, as SGLang writes them: ``data: JSON``, blank line, and ``data: [DONE]`` last."""

from __future__ import annotations

from collections.abc import Iterator

_FIELD = b"data:"
_END = b"[DONE]"


class EventReader:
    """Cuts a body into the data of its events, whatever the pieces are that it arrives in.

    Lines end at line feeds alone: text of a model may hold what Unicode too calls the end of a line.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.has_ended = False

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The data of the events that a chunk completes; nothing after the last."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if self.has_ended:
                return
            if not line.startswith(_FIELD):  # a blank line, or a comment that keeps the connection alive
                continue
            data = line.removeprefix(_FIELD).strip()
            if data == _END:
                self.has_ended = True
                return
            yield data
