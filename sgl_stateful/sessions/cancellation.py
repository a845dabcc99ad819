"""Work that a caller who goes away must not leave half done."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for the work, and when cancelled wait all the same: what it holds is not to be let go before."""
    task = asyncio.get_running_loop().create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        task.exception()  # nobody is left to be told
        raise cancelled
    task.result()
