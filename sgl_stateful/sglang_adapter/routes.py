"""``/v1/memory``: facts and status, on SGLang's own HTTP application."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from memstore import Fact, FactNotFound, InvalidInput, MemStoreError, NewFact, StoreBusy, StoreFull
from sgl_stateful.errors import BadMemoryRequest, StatefulError
from sgl_stateful.service import MemoryService

_MAX_LISTED = 1000
_MAX_ADDED = 10_000


class FactBody(BaseModel):
    """One fact to add."""

    model_config = ConfigDict(extra="forbid")

    text: str
    stream: str = ""
    speaker: str | None = None
    time: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class AddBody(FactBody):
    """One fact, or many under ``facts``; ``wait`` answers once their KV exists."""

    text: str | None = None  # type: ignore[assignment]
    owner: str
    facts: list[FactBody] | None = Field(None, min_length=1, max_length=_MAX_ADDED)
    wait: bool = False

    def new_facts(self) -> list[NewFact]:
        """The facts of the body.

        Raises
        ------
        BadMemoryRequest
            Both forms at once, or neither.
        """
        if (self.text is None) == (self.facts is None):
            raise BadMemoryRequest("send either 'text' or 'facts'")
        if self.facts is not None and (beside := sorted(self.model_fields_set & FactBody.model_fields.keys())):
            raise BadMemoryRequest(f"with 'facts', {', '.join(beside)} belongs into each of them")
        single = self.facts is None
        bodies = (
            [FactBody.model_validate(self.model_dump(include=set(FactBody.model_fields)))] if single else self.facts
        )
        return [NewFact(**body.model_dump()) for body in bodies or []]


class SearchBody(BaseModel):
    """A search without a prompt."""

    model_config = ConfigDict(extra="forbid")

    owner: str
    query: str
    k: int = Field(10, ge=0, le=_MAX_LISTED)
    min_score: float | None = None


def fact_json(fact: Fact) -> dict[str, Any]:
    """A fact as the API shows it."""
    return {
        "id": fact.id,
        "owner": fact.owner,
        "text": fact.text,
        "stream": fact.stream,
        "speaker": fact.speaker,
        "time": fact.time,
        "metadata": dict(fact.metadata),
        "version": fact.version,
        "created_at": fact.created_at,
        "updated_at": fact.updated_at,
    }


def error_response(error: Exception) -> JSONResponse:
    """One clear JSON error for whatever the store or the service raised."""
    status = 500
    match error:
        case FactNotFound():
            status = 404
        case InvalidInput() | BadMemoryRequest():
            status = 400
        case StoreBusy():
            status = 503
        case StoreFull():
            status = 507
    message = str(error).encode("utf-8", "backslashreplace").decode()
    body = {"error": {"message": message, "type": type(error).__name__, "code": status}}
    return JSONResponse(body, status_code=status)


def memory_router(service: MemoryService) -> APIRouter:
    """The routes of one server's memory."""
    router = APIRouter(prefix="/v1/memory", tags=["memory"])

    @router.post("/facts")
    async def add_facts(body: AddBody) -> Any:
        try:
            facts = await asyncio.to_thread(service.add, body.owner, body.new_facts())
            service.notify(body.owner)
            pending = [fact.id for fact in facts]
            if body.wait:
                pending = await service.wait_for_kv(body.owner, pending)
        except (MemStoreError, StatefulError) as error:
            return error_response(error)
        return {"facts": [fact_json(fact) for fact in facts], "kv_pending": pending}

    @router.get("/facts")
    async def list_facts(
        owner: str,
        stream: str | None = None,
        limit: Annotated[int, Query(ge=1, le=_MAX_LISTED)] = 100,
        after: Annotated[int, Query(ge=0, lt=2**63, description="'next' of the page before")] = 0,
    ) -> Any:
        try:
            facts = await asyncio.to_thread(service.store.list, owner, stream=stream, limit=limit, after_seq=after)
        except MemStoreError as error:
            return error_response(error)
        more = len(facts) == limit
        return {"facts": [fact_json(fact) for fact in facts], "next": facts[-1].seq if more else None}

    @router.get("/facts/{fact_id}")
    async def get_fact(fact_id: str, owner: str) -> Any:
        try:
            return fact_json(await asyncio.to_thread(service.store.get, owner, fact_id))
        except MemStoreError as error:
            return error_response(error)

    @router.delete("/facts/{fact_id}")
    async def delete_fact(fact_id: str, owner: str) -> Any:
        try:
            return {"deleted": fact_json(await service.delete(owner, fact_id))}
        except MemStoreError as error:
            return error_response(error)

    @router.post("/search")
    async def search(body: SearchBody) -> Any:
        def find() -> list[dict[str, Any]]:
            hits = service.store.search(body.owner, body.query, k=body.k, min_score=body.min_score)
            return [{"score": hit.score, "fact": fact_json(hit.fact)} for hit in hits]

        try:
            return {"hits": await asyncio.to_thread(find)}
        except MemStoreError as error:
            return error_response(error)

    @router.get("/status")
    async def status() -> Any:
        try:
            return await service.status()
        except (MemStoreError, StatefulError, RuntimeError) as error:
            return error_response(error)

    return router
