"""``/v1/memory``: facts, their changes, and status, on SGLang's own HTTP application."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Query
from sglang.srt.utils.auth import AuthLevel, auth_level

from memstore import FactId
from sgl_stateful.errors import BadMemoryRequest
from sgl_stateful.service import MemoryService

from .bodies import MAX_LISTED, AddBody, SearchBody, SupersedeBody, UpdateBody
from .replies import MemoryRoute, addition_json, change_json, fact_json, receipt_json


def add_routes(app: FastAPI, service: MemoryService) -> None:
    """Add the routes of one server's memory.

    One by one, as if each had been declared on ``app``: SGLang looks for an endpoint's ``auth_level`` among the routes
    of the application itself and does not see into a router that was included.
    """
    app.router.routes.extend([*_fact_routes(service).routes, *_store_routes(service).routes])


def _router() -> APIRouter:
    return APIRouter(prefix="/v1/memory", tags=["memory"], route_class=MemoryRoute)


async def _pending(service: MemoryService, owner: str, fact_ids: Sequence[FactId], *, wait: bool) -> Sequence[FactId]:
    return await service.wait_for_kv(owner, fact_ids) if wait else fact_ids


def _fact_routes(service: MemoryService) -> APIRouter:
    router, store = _router(), service.store

    @router.post("/facts")
    async def add_facts(body: AddBody, idempotency_key: Annotated[str | None, Header()] = None) -> Any:
        key = body.key(idempotency_key)
        additions = await service.facts.add(body.owner, body.new_facts(), idempotency_key=key)
        ids = [addition.fact.id for addition in additions]
        pending = await _pending(service, body.owner, ids, wait=body.wait)
        return {"facts": [addition_json(addition) for addition in additions], "kv_pending": pending}

    @router.get("/facts")
    async def list_facts(
        owner: str,
        stream: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 100,
        after: Annotated[int, Query(ge=0, lt=2**63, description="'next' of the page before")] = 0,
        superseded: bool = False,
    ) -> Any:
        facts = await service.in_thread(
            store.list, owner, stream=stream, limit=limit, after_seq=after, superseded=superseded
        )
        more = len(facts) == limit
        return {"facts": [fact_json(fact) for fact in facts], "next": facts[-1].seq if more else None}

    @router.get("/facts/{fact_id}")
    async def get_fact(fact_id: str, owner: str) -> Any:
        return fact_json(await service.in_thread(store.get, owner, fact_id))

    @router.patch("/facts/{fact_id}")
    async def update_fact(fact_id: str, body: UpdateBody) -> Any:
        fact = await service.facts.update(body.owner, fact_id, body.fields())
        return {"fact": fact_json(fact), "kv_pending": await _pending(service, body.owner, [fact.id], wait=body.wait)}

    @router.delete("/facts/{fact_id}")
    async def delete_fact(fact_id: str, owner: str) -> Any:
        return {"deleted": fact_json(await service.facts.delete(owner, fact_id))}

    @router.post("/facts/{fact_id}/supersede")
    async def supersede_fact(fact_id: str, body: SupersedeBody) -> Any:
        fact = await service.facts.supersede(body.owner, fact_id, body.text, body.fields())
        return {"fact": fact_json(fact), "kv_pending": await _pending(service, body.owner, [fact.id], wait=body.wait)}

    @router.get("/facts/{fact_id}/history")
    async def history(fact_id: str, owner: str) -> Any:
        versions = await service.in_thread(store.history, owner, fact_id)
        return {"versions": [fact_json(fact) for fact in versions]}

    @router.post("/search")
    async def search(body: SearchBody) -> Any:
        hits = await service.in_thread(
            store.search, body.owner, body.query, k=body.k, min_score=body.min_score, where=body.where, mode=body.mode
        )
        return {"hits": [{"score": hit.score, "unboosted": hit.unboosted, "fact": fact_json(hit.fact)} for hit in hits]}

    return router


def _store_routes(service: MemoryService) -> APIRouter:
    router = _router()

    @router.delete("/owners/{owner:path}")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
    async def purge_owner(owner: str, confirm: Annotated[str, Query(description="the owner once more")]) -> Any:
        if confirm != owner:
            raise BadMemoryRequest("confirm is not the owner: a purge cannot be undone, so write the owner twice")
        return receipt_json(await service.purge(owner))

    @router.get("/changes")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]  # it names every owner
    async def changes(
        since: Annotated[int, Query(ge=0, lt=2**63, description="'next' of the page before")] = 0,
        owner: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 100,
    ) -> Any:
        found = await service.in_thread(service.store.changes, since, owner=owner, limit=limit)
        return {
            "changes": [change_json(change) for change in found],
            "next": found[-1].position if found else since,
        }

    @router.get("/status")
    async def status() -> Any:
        return await service.status()

    return router
