"""Changes of a session's answers as server-sent events, to readers that may not read."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing

from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from sgl_stateful.errors import FlashReaderTooSlow
from sgl_stateful.flash.events import Event
from sgl_stateful.flash.followers import Follower
from sgl_stateful.flash.service import FlashService

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 10.0


class FlashStream(StreamingResponse):
    """A stream that ends with its session, its reader's going away, or its reader's not reading.

    Parameters
    ----------
    patience_s
        A reader that takes nothing of what is sent for so long is let go.
    """

    def __init__(self, flash: FlashService, follower: Follower, *, patience_s: float) -> None:
        super().__init__(self._body(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._flash = flash
        self._follower = follower
        self._patience_s = patience_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, each part of it within the patience that there is."""

        async def send_in_time(message: Message) -> None:
            try:
                await asyncio.wait_for(send(message), self._patience_s)
            except TimeoutError:
                raise FlashReaderTooSlow(f"nothing was taken for {self._patience_s:g} s") from None

        try:
            await super().__call__(scope, receive, send_in_time)
        except* FlashReaderTooSlow as slow:
            # It cannot be told, as it does not read. Without an end of the reply the connection is closed.
            self._let_go(slow.exceptions[0])
        finally:
            self._flash.followers.remove(self._follower)

    async def _body(self) -> AsyncIterator[str]:
        # Something at once, so that the reader knows that it follows.
        yield ": following\n\n"
        try:
            async with aclosing(self._follower.events(patience_s=_KEEP_ALIVE_S)) as events:
                async for event in events:
                    yield ": \n\n" if event is None else _text(event)
        except FlashReaderTooSlow as slow:
            self._let_go(slow)
            body = {"message": str(slow), "type": type(slow).__name__, "code": slow.status_code}
            yield f"event: dropped\ndata: {json.dumps({'error': body})}\n\n"

    def _let_go(self, why: BaseException) -> None:
        self._flash.metrics.dropped_reader()
        logger.warning("a follower of session %s is let go: %s", self._follower.session_id, why)


def _text(event: Event) -> str:
    name = f"id: {event.id}\n" if event.id else ""
    return f"{name}event: {event.kind}\ndata: {json.dumps(dict(event.data))}\n\n"
