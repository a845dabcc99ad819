"""Facts: ``client.facts``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

from sgl_stateful.client.call import Call, Page, PageCalls, Steps, given, path, send
from sgl_stateful.client.content import owner_of
from sgl_stateful.client.fact_results import AddedFact, ChangedFact, Fact, Hit, MemoryStatus, PurgeReceipt, added
from sgl_stateful.client.operation import AsyncSide, Listing, Operation, SyncSide
from sgl_stateful.client.reading import each, part
from sgl_stateful.client.senders import AsyncSender, Sender

_FACTS = "/v1/memory/facts"
_PAGE = 1000


class FactFields(TypedDict, total=False):
    """What a fact may have beside its text; ``expires_at`` in seconds since 1970."""

    stream: str
    speaker: str | None
    time: str | None
    metadata: Mapping[str, Any]
    expires_at: float | None


class FactChanges(FactFields, total=False):
    """What an update may change; None clears ``speaker``, ``time`` and ``expires_at``."""

    text: str


class NewFact(FactChanges):
    """A fact to add: at least its ``text``."""


class FactOperations:
    """Operations on the facts of an owner. Each raises the ``ClientError`` tree."""

    _default_owner: str | None

    @Operation
    def add(
        self,
        text: str,
        *,
        owner: str | None = None,
        wait: bool = False,
        idempotency_key: str | None = None,
        **fields: Unpack[FactFields],
    ) -> Steps[AddedFact]:
        """Add one fact.

        Parameters
        ----------
        wait
            Answer once its KV exists.
        idempotency_key
            Adds once, however often it is sent; only with one is an add repeated after a lost connection.
        """
        body = {"owner": owner_of(owner, self._default_owner), "text": text, "wait": wait, **fields}
        return (yield from send(_adding(body, idempotency_key)))[0]

    @Operation
    def add_many(
        self,
        facts: Sequence[str | NewFact],
        *,
        owner: str | None = None,
        wait: bool = False,
        idempotency_key: str | None = None,
    ) -> Steps[tuple[AddedFact, ...]]:
        """Add facts, all or none, in this order; a string is a fact with nothing but text."""
        items = [{"text": fact} if isinstance(fact, str) else dict(fact) for fact in facts]
        body = {"owner": owner_of(owner, self._default_owner), "facts": items, "wait": wait}
        return (yield from send(_adding(body, idempotency_key)))

    @Listing
    def list(self, *, owner: str | None = None, stream: str | None = None, superseded: bool = False) -> PageCalls[Fact]:
        """Iterate the facts in the order of their arrival; ``superseded``: with those that others replaced."""
        name = owner_of(owner, self._default_owner)
        fixed = {**given(owner=name, stream=stream), "limit": _PAGE} | ({"superseded": "true"} if superseded else {})

        def page(after: str | int | None) -> Call[Page[Fact]]:
            return Call("GET", _FACTS, _read_page, params=fixed | given(after=after), is_repeatable=True)

        return page

    @Operation
    def get(self, fact_id: str, *, owner: str | None = None) -> Steps[Fact]:
        """One fact. Raises ``FactNotFound``."""
        params = {"owner": owner_of(owner, self._default_owner)}
        return (yield from send(Call("GET", _fact(fact_id), Fact.of, params=params, is_repeatable=True)))

    @Operation
    def update(
        self, fact_id: str, *, owner: str | None = None, wait: bool = False, **changes: Unpack[FactChanges]
    ) -> Steps[ChangedFact]:
        """Change what is given and keep the rest. Raises ``FactNotFound``, ``FactSuperseded``."""
        body = {"owner": owner_of(owner, self._default_owner), "wait": wait, **changes}
        return (yield from send(Call("PATCH", _fact(fact_id), ChangedFact.of, body=body)))

    @Operation
    def supersede(
        self, fact_id: str, text: str, *, owner: str | None = None, wait: bool = False, **fields: Unpack[FactFields]
    ) -> Steps[ChangedFact]:
        """Put a new fact in another's place, which stays in its history."""
        body = {"owner": owner_of(owner, self._default_owner), "text": text, "wait": wait, **fields}
        return (yield from send(Call("POST", f"{_fact(fact_id)}/supersede", ChangedFact.of, body=body)))

    @Operation
    def delete(self, fact_id: str, *, owner: str | None = None) -> Steps[Fact]:
        """Delete a fact and return what it was. Raises ``FactNotFound``."""
        params = {"owner": owner_of(owner, self._default_owner)}
        call = Call("DELETE", _fact(fact_id), lambda reply: Fact.of(part(reply, "deleted")), params=params)
        return (yield from send(call))

    @Operation
    def history(self, fact_id: str, *, owner: str | None = None) -> Steps[tuple[Fact, ...]]:
        """Every version of a fact, and of those before it, oldest first."""
        params = {"owner": owner_of(owner, self._default_owner)}
        where = f"{_fact(fact_id)}/history"
        return (yield from send(Call("GET", where, _read_versions, params=params, is_repeatable=True)))

    @Operation
    def search(
        self,
        query: str,
        *,
        owner: str | None = None,
        k: int = 10,
        min_score: float | None = None,
        where: Mapping[str, Any] | None = None,
        mode: Literal["vector", "keyword", "hybrid"] = "hybrid",
    ) -> Steps[tuple[Hit, ...]]:
        """Up to ``k`` facts, the best first; ``where`` filters as in ``custom_params.memory``.

        ``min_score`` leaves out hits whose ``unboosted`` score is lower.
        """
        name = owner_of(owner, self._default_owner)
        body = {"owner": name, "query": query, "k": k, "mode": mode, **given(min_score=min_score, where=where)}
        return (yield from send(Call("POST", "/v1/memory/search", _read_hits, body=body, is_repeatable=True)))

    @Operation
    def purge(self, owner: str) -> Steps[PurgeReceipt]:
        """Remove everything of an owner; it cannot be undone, and the client's own owner is not assumed.

        It wants the admin key where the server has one.
        """
        where = "/v1/memory/owners" + path(owner)
        return (yield from send(Call("DELETE", where, PurgeReceipt.of, params={"confirm": owner})))

    @Operation
    def status(self) -> Steps[MemoryStatus]:
        """Store, self-test, policies, encoder."""
        return (yield from send(Call("GET", "/v1/memory/status", MemoryStatus.of, is_repeatable=True)))


def _fact(fact_id: str) -> str:
    return _FACTS + path(fact_id)


def _adding(body: dict[str, Any], key: str | None) -> Call[tuple[AddedFact, ...]]:
    # The body carries the key: a header could not hold every one.
    return Call("POST", _FACTS, added, body=body | given(idempotency_key=key), is_repeatable=key is not None)


def _read_page(reply: Any) -> Page[Fact]:
    return Page(each(part(reply, "facts"), Fact.of), part(reply, "next"))


def _read_versions(reply: Any) -> tuple[Fact, ...]:
    return each(part(reply, "versions"), Fact.of)


def _read_hits(reply: Any) -> tuple[Hit, ...]:
    return each(part(reply, "hits"), Hit.of)


class Facts(SyncSide, FactOperations):
    """``Client.facts``."""

    def __init__(self, sender: Sender, owner: str | None) -> None:
        self._sender = sender
        self._default_owner = owner


class AsyncFacts(AsyncSide, FactOperations):
    """``AsyncClient.facts``."""

    def __init__(self, sender: AsyncSender, owner: str | None) -> None:
        self._sender = sender
        self._default_owner = owner
