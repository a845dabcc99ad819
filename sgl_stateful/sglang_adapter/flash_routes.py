"""``/v1/sessions/{id}/flash`` on SGLang's own HTTP application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Query, Response
from sglang.srt.utils.auth import AuthLevel, auth_level

from sgl_stateful.flash.service import FlashService

from .flash_bodies import QuestionBody, RegisterBody
from .flash_stream import FlashStream
from .session_routes import MAX_LISTED, SessionRoute

Staleness = Annotated[float, Query(ge=0, le=86400, allow_inf_nan=False)]


def add_flash_routes(app: FastAPI, ready: Callable[[], Awaitable[FlashService]], *, reader_s: float) -> None:
    """Add the routes; one by one, for the same reason as those of the memory (``routes.add_routes``).

    Parameters
    ----------
    ready
        The registered questions, once the sessions have started.
    reader_s
        A follower that takes nothing for so long is let go.
    """
    app.router.routes.extend([*_server_routes(ready).routes, *_session_routes(ready, reader_s).routes])


def _server_routes(ready: Callable[[], Awaitable[FlashService]]) -> APIRouter:
    router = APIRouter(prefix="/v1/flash", tags=["flash"], route_class=SessionRoute)

    @router.get("/stats")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]  # it names every owner
    async def stats(rows: Annotated[int, Query(ge=0, le=MAX_LISTED)] = 0) -> Any:
        flash = await ready()
        return {**flash.stats(rows=rows), "entries": await flash.entries.stats(rows=rows)}

    return router


def _session_routes(ready: Callable[[], Awaitable[FlashService]], reader_s: float) -> APIRouter:
    router = APIRouter(prefix="/v1/sessions/{session_id}/flash", tags=["flash"], route_class=SessionRoute)

    @router.post("", status_code=201)
    async def register(session_id: str, body: RegisterBody) -> Any:
        flash = await ready()
        question = body.question(body.name, flash.sessions.renderer)
        return await flash.register(session_id, body.owner, await flash.semantic.worded(question, body.filled()))

    @router.get("")
    async def list_questions(session_id: str, owner: str) -> Any:
        return {"questions": await (await ready()).show_all(session_id, owner)}

    @router.get("/events")
    async def events(
        session_id: str,
        owner: str,
        last_event_id: Annotated[str | None, Header()] = None,
        after: Annotated[str | None, Query(alias="last_event_id")] = None,  # of whoever cannot set a header
    ) -> Response:
        flash = await ready()
        follower = await flash.follow(session_id, owner, last_event_id=last_event_id or after)
        return FlashStream(flash, follower, patience_s=reader_s)

    @router.get("/{name}")
    async def get(session_id: str, name: str, owner: str) -> Any:
        return await (await ready()).show(session_id, owner, name)

    @router.get("/{name}/answer")
    async def answer(session_id: str, name: str, owner: str, max_staleness_s: Staleness = 0.0) -> Any:
        return await (await ready()).answer(session_id, owner, name, max_staleness_s=max_staleness_s)

    @router.put("/{name}")
    async def update(session_id: str, name: str, body: QuestionBody) -> Any:
        flash = await ready()
        question = body.question(name, flash.sessions.renderer)
        return await flash.update(session_id, body.owner, await flash.semantic.worded(question, body.filled()))

    @router.delete("/{name}")
    async def delete(session_id: str, name: str, owner: str) -> Any:
        return {"deleted": await (await ready()).delete(session_id, owner, name)}

    return router
