"""Entries of a session: ``session.entries``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

from sgl_stateful.client.call import Call, Steps, path, send
from sgl_stateful.client.content import Messages, content
from sgl_stateful.client.entry_results import Entry, of_deleted_entry
from sgl_stateful.client.operation import AsyncSide, Operation, SyncSide
from sgl_stateful.client.reading import each, part
from sgl_stateful.client.senders import AsyncSender, Sender

SESSIONS = "/v1/sessions"


class EntryOptions(TypedDict, total=False):
    """How an entry is decoded ahead; see ``docs/flash.md``."""

    max_tokens: int
    until: Sequence[str | int]
    sampling_params: Mapping[str, Any]
    choices: Sequence[str]
    gate: Mapping[str, Any]
    audit_target: float
    priority: int


class EntryOperations:
    """Operations on the entries of one session. Each raises the ``ClientError`` tree."""

    _session_id: str
    _owner: str

    def _at(self, *more: str) -> str:
        return SESSIONS + path(self._session_id, "entries", *more)

    def _look(self, *more: str) -> dict[str, Any]:
        return {"path": self._at(*more), "params": {"owner": self._owner}, "is_repeatable": True}

    @Operation
    def register(
        self,
        name: str,
        messages: Messages | None = None,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        **options: Unpack[EntryOptions],
    ) -> Steps[Entry]:
        """Register what the next request will begin with; a string is one user message and the answer's header.

        Raises ``FlashExists``, ``FlashLimitReached``, ``BadFlashRequest``.
        """
        body = {"name": name, "owner": self._owner, **content(messages, text, input_ids), **options}
        return (yield from send(Call("POST", self._at(), Entry.of, body=body)))

    @Operation
    def update(
        self,
        name: str,
        messages: Messages | None = None,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        **options: Unpack[EntryOptions],
    ) -> Steps[Entry]:
        """Put another entry under the name; what is not given is as by default, not as before."""
        body = {"owner": self._owner, **content(messages, text, input_ids), **options}
        return (yield from send(Call("PUT", self._at(name), Entry.of, body=body, is_repeatable=True)))

    @Operation
    def get(self, name: str) -> Steps[Entry]:
        """One entry. Raises ``FlashNotFound``."""
        return (yield from send(Call("GET", read=Entry.of, **self._look(name))))

    @Operation
    def list(self) -> Steps[tuple[Entry, ...]]:
        """All of them, by name."""
        return (yield from send(Call("GET", read=_read_entries, **self._look())))

    @Operation
    def delete(self, name: str) -> Steps[Entry]:
        """End a registration; the entry as it was."""
        params = {"owner": self._owner}
        return (yield from send(Call("DELETE", self._at(name), of_deleted_entry, params=params)))


def _read_entries(reply: Any) -> tuple[Entry, ...]:
    return each(part(reply, "entries"), Entry.of)


class Entries(SyncSide, EntryOperations):
    """``Session.entries``."""

    def __init__(self, sender: Sender, session_id: str, owner: str) -> None:
        self._sender = sender
        self._session_id, self._owner = session_id, owner


class AsyncEntries(AsyncSide, EntryOperations):
    """``AsyncSession.entries``."""

    def __init__(self, sender: AsyncSender, session_id: str, owner: str) -> None:
        self._sender = sender
        self._session_id, self._owner = session_id, owner
