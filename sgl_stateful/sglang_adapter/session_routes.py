"""``/v1/sessions`` on SGLang's own HTTP application."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.utils.auth import AuthLevel, auth_level
from starlette.exceptions import HTTPException

from memstore import MemStoreError
from sgl_stateful.errors import BadSessionRequest, StatefulError
from sgl_stateful.sessions.params import SessionParams
from sgl_stateful.sessions.service import SessionService
from sgl_stateful.sessions.use import Mode

from .replies import error_response
from .requests import require_service
from .sampling import check_sampling
from .session_bodies import (
    AppendBody,
    AskBody,
    CreateBody,
    ForkBody,
    OwnerBody,
    PinBody,
    RewindBody,
)
from .session_errors import session_error
from .session_questions import ask as ask_session
from .session_questions import with_facts
from .session_requests import ASKED

logger = logging.getLogger(__name__)

MAX_LISTED = 1000


class SessionRoute(APIRoute):
    """A route whose failures, those of a body included, are answered by ``session_error``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of the route, with its failures caught."""
        handle = super().get_route_handler()

        async def handle_or_say_why(request: Request) -> Response:
            try:
                return await handle(request)
            except (MemStoreError, StatefulError, RequestValidationError, HTTPException) as error:
                return session_error(error)
            except ValueError as error:
                # SGLang's own way to refuse a request.
                return session_error(BadSessionRequest(str(error)))
            except Exception as error:
                # The serving boundary: a bug of ours must not look like one of SGLang's.
                logger.exception("%s %s failed", request.method, request.url.path)
                return error_response(error)

        return handle_or_say_why


def add_session_routes(
    app: FastAPI,
    tokenizer_manager: Any,
    ready: Callable[[], Awaitable[SessionService]],
    *,
    default_ttl_s: float,
) -> None:
    """Add the routes; one by one, for the same reason as those of the memory (``routes.add_routes``).

    Parameters
    ----------
    ready
        The sessions, once they have started.
    """
    routers = [_life_routes(ready, default_ttl_s), _change_routes(ready), _ask_routes(ready, tokenizer_manager)]
    app.router.routes.extend(route for router in routers for route in router.routes)


def _router() -> APIRouter:
    return APIRouter(prefix="/v1/sessions", tags=["sessions"], route_class=SessionRoute)


Ready = Callable[[], Awaitable[SessionService]]


def _life_routes(ready: Ready, default_ttl_s: float) -> APIRouter:
    router = _router()

    @router.post("", status_code=201)
    async def create(body: CreateBody) -> Any:
        sessions = await ready()
        content = body.content() if body.has_content() else None
        session = await sessions.create(body.owner, content, body.options(default_ttl_s))
        return sessions.shown(session)

    @router.get("")
    async def list_sessions(
        owner: str, limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 100, after: str = ""
    ) -> Any:
        sessions = await ready()
        found = [s for s in await sessions.sessions_of(owner) if s.header.id > after]
        page = found[:limit]
        return {"sessions": await sessions.show(page), "next": page[-1].header.id if len(found) > limit else None}

    @router.get("/stats")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]  # it names every owner
    async def stats(sessions: Annotated[int, Query(ge=0, le=MAX_LISTED)] = 0) -> Any:
        return await (await ready()).stats(sessions=sessions)

    @router.get("/{session_id}")
    async def get(session_id: str, owner: str) -> Any:
        sessions = await ready()
        return (await sessions.show([await sessions.find(session_id, owner)]))[0]

    @router.delete("/{session_id}")
    async def close(session_id: str, owner: str) -> Any:
        sessions = await ready()
        return {"closed": sessions.shown(await sessions.close(session_id, owner))}

    return router


def _change_routes(ready: Ready) -> APIRouter:
    router = _router()

    @router.post("/{session_id}/append")
    async def append(session_id: str, body: AppendBody) -> Any:
        sessions = await ready()
        if not body.wait:
            if body.if_version is not None:
                raise BadSessionRequest("if_version needs an answer: leave out 'wait: false'")
            session, queued = await sessions.queue(session_id, body.owner, body.content())
            return JSONResponse({"session": sessions.shown(session), "queued": queued}, status_code=202)
        made = await sessions.append(session_id, body.owner, body.content(), if_version=body.if_version)
        return {
            "session": sessions.shown(made.session),
            "version": made.change.entry.version,
            "appended_tokens": made.change.appended_tokens,
            "prefilled_tokens": made.prefilled_tokens,
            "cached_tokens": made.cached_tokens,
            "dropped_messages": made.change.dropped_messages,
            "ms": round(made.ms, 3),
        }

    @router.post("/{session_id}/fork", status_code=201)
    async def fork(session_id: str, body: ForkBody) -> Any:
        sessions = await ready()
        made = await sessions.fork(session_id, body.owner, version=body.version, options=body.options)
        return sessions.shown(made)

    @router.post("/{session_id}/rewind")
    async def rewind(session_id: str, body: RewindBody) -> Any:
        sessions = await ready()
        return sessions.shown(await sessions.rewind(session_id, body.owner, body.version, if_version=body.if_version))

    @router.post("/{session_id}/pin")
    async def pin(session_id: str, body: PinBody) -> Any:
        sessions = await ready()
        return sessions.shown(await sessions.pin(session_id, body.owner, on_full=body.on_full))

    @router.post("/{session_id}/unpin")
    async def unpin(session_id: str, body: OwnerBody) -> Any:
        sessions = await ready()
        return sessions.shown(await sessions.unpin(session_id, body.owner))

    @router.post("/{session_id}/refresh")
    async def refresh(session_id: str, body: OwnerBody) -> Any:
        sessions = await ready()
        return sessions.shown(await sessions.refresh(session_id, body.owner))

    return router


def _ask_routes(ready: Ready, tokenizer_manager: Any) -> APIRouter:
    router = _router()

    async def ask(session_id: str, body: AskBody, mode: Mode, request: Request) -> Response:
        check_sampling(body.sampling_params)
        sessions = await ready()
        params = SessionParams(
            id=session_id[:256],
            owner=body.owner,
            mode=mode,
            if_version=body.if_version,
            fresh=body.fresh,
            max_staleness_s=body.max_staleness_s,
        )
        asked = await ask_session(sessions, params, body.content(), body.memory)
        if body.memory is not None:
            asked = await with_facts(require_service(tokenizer_manager), asked)
        generate = GenerateReqInput(
            input_ids=[*asked.head, *asked.tail],  # until the session comes in front
            sampling_params=body.sampling_params,
            stream=body.stream,
            return_logprob=body.return_logprob,
            top_logprobs_num=body.top_logprobs_num,
            token_ids_logprob=body.token_ids_logprob,
            return_text_in_logprobs=body.return_text_in_logprobs,
        )
        setattr(generate, ASKED, asked)
        replies = tokenizer_manager.generate_request(generate, request)
        first = await anext(replies)
        if not body.stream:
            await replies.aclose()
            return JSONResponse(_reply(first))
        return StreamingResponse(
            _events(first, replies),
            media_type="text/event-stream",
            background=tokenizer_manager.create_abort_task(generate),
        )

    @router.post("/{session_id}/query")
    async def query(session_id: str, body: AskBody, request: Request) -> Response:
        return await ask(session_id, body, "query", request)

    @router.post("/{session_id}/turn")
    async def turn(session_id: str, body: AskBody, request: Request) -> Response:
        return await ask(session_id, body, "turn", request)

    return router


def _reply(item: Any) -> Any:
    """A reply of SGLang with the versions of the session beside it."""
    if isinstance(item, list):
        return [_reply(one) for one in item]
    session = item["meta_info"].get("session")
    if session is None:
        return item
    versions = {"data_version": session["data_version"]}
    if session["version"] is not None:
        versions["version"] = session["version"]
    if (served_from := session.get("served_from")) is not None:
        versions["served_from"] = served_from
    return {**item, **versions}


async def _events(first: Any, replies: Any) -> AsyncIterator[str]:
    async with aclosing(replies):
        try:
            yield f"data: {json.dumps(_reply(first))}\n\n"
            async for reply in replies:
                yield f"data: {json.dumps(_reply(reply))}\n\n"
        except Exception as error:
            # The status has been sent.
            told = BadSessionRequest(str(error)) if type(error) is ValueError else error
            if not isinstance(told, StatefulError):
                logger.exception("a stream of a session broke off")
            yield f"data: {bytes(session_error(told).body).decode()}\n\n"
    yield "data: [DONE]\n\n"
