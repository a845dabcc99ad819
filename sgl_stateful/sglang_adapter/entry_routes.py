"""``/v1/sessions/{id}/entries`` on SGLang's own HTTP application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, FastAPI

from sgl_stateful.flash.service import FlashService

from .entry_bodies import EntryBody, RegisterEntryBody
from .session_routes import SessionRoute


def add_entry_routes(app: FastAPI, ready: Callable[[], Awaitable[FlashService]]) -> None:
    """Add the routes; one by one, for the same reason as those of the memory (``routes.add_routes``).

    Parameters
    ----------
    ready
        The registered questions and entries, once the sessions have started.
    """
    router = APIRouter(prefix="/v1/sessions/{session_id}/entries", tags=["entries"], route_class=SessionRoute)

    @router.post("", status_code=201)
    async def register(session_id: str, body: RegisterEntryBody) -> Any:
        flash = await ready()
        return await flash.entries.register(session_id, body.owner, body.entry(body.name, flash.sessions.renderer))

    @router.get("")
    async def list_entries(session_id: str, owner: str) -> Any:
        return {"entries": await (await ready()).entries.show_all(session_id, owner)}

    @router.get("/{name}")
    async def get(session_id: str, name: str, owner: str) -> Any:
        return await (await ready()).entries.show(session_id, owner, name)

    @router.put("/{name}")
    async def update(session_id: str, name: str, body: EntryBody) -> Any:
        flash = await ready()
        return await flash.entries.update(session_id, body.owner, body.entry(name, flash.sessions.renderer))

    @router.delete("/{name}")
    async def delete(session_id: str, name: str, owner: str) -> Any:
        return {"deleted": await (await ready()).entries.delete(session_id, owner, name)}

    app.router.routes.extend(router.routes)
