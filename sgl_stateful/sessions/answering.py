"""Queries and turns: what a request needs of its session, and what an answer does to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from typing import Any

from memstore import MemStoreError
from sgl_stateful.errors import (
    SessionClosed,
    SessionExpired,
    SessionNotSaved,
    SessionTooLong,
    SessionVersionConflict,
    TurnInProgress,
)

from .behind import Behind
from .chain import token_ids
from .content import Renderer
from .keeper import SessionKeeper
from .segments import segments_of
from .session import Session
from .use import Answer, Mode, Use


class Answering:
    """Begins and ends uses of sessions. Of the event loop.

    Parameters
    ----------
    alone
        Waits until nobody else changes a session, and what came before a turn has been added.
    """

    def __init__(
        self,
        keeper: SessionKeeper,
        renderer: Renderer,
        *,
        alone: Callable[[Session], AbstractAsyncContextManager[None]],
    ) -> None:
        self._keeper = keeper
        self._alone = alone
        self._renderer = renderer
        self._turns: dict[Use, AsyncExitStack] = {}

    async def begin(self, session_id: str, owner: str | None, mode: Mode, *, if_version: int | None = None) -> Use:
        """Fix what a request is answered on; to be followed by ``end`` or ``drop``, whatever happens.

        A query never waits for changes. A turn waits for appends that came before it, and is refused beside another.

        Raises
        ------
        SessionError, StoreError
        """
        session = await self._keeper.get(session_id, owner)
        salt = await self._keeper.salt(session.header.owner)
        stack = AsyncExitStack()
        if mode == "turn":
            if session.turning:
                raise TurnInProgress("another turn of this session is being answered: wait for its end")
            session.turning = True
            stack.callback(setattr, session, "turning", False)
        try:
            if mode == "turn":
                await stack.enter_async_context(self._alone(session))
            elif self._keeper.table.get(session_id, owner=owner) is not session:
                raise SessionVersionConflict("another server has changed the session: repeat")
            if if_version not in (None, session.version):
                raise SessionVersionConflict(f"the session has version {session.version}, not {if_version}")
        except BaseException:
            await stack.aclose()
            raise
        tokens: int | None = session.num_tokens
        fence = session.fence
        if mode == "turn":
            tokens, fence = None, self._keeper.pins.next_fence()
        use = Use(
            session=session,
            mode=mode,
            data_version=session.version,
            head=session.head,
            token_ids=session.token_ids(),
            salt=salt,
            hold=self._keeper.hold(session, tokens, pin=session.is_pinned, fence=fence),
        )
        session.uses += 1
        self._keeper.uses.setdefault(session.header.id, set()).add(use)
        self._keeper.touch(session)
        self._turns[use] = stack
        return use

    async def behind(self, session: Session, *, priority: int, version: int | None = None) -> Behind:
        """What a request of the server's own needs of a session; is no use of it, and moves no pin.

        Parameters
        ----------
        priority
            Of the request.
        version
            Another than the present one.

        Raises
        ------
        BadSessionRequest
            That version is not kept.
        StoreError
        """
        keeper = self._keeper
        salt = await keeper.salt(session.header.owner)
        at = session.version if version is None else version
        ids = session.token_ids() if at == session.version else token_ids(keeper.table.at(session, at)).tolist()
        hold = keeper.hold(session, len(ids), pin=False, fence=session.fence)
        return Behind(
            data_version=at,
            token_ids=ids,
            owner_epoch=keeper.epoch(session.header.owner),
            weight_version=keeper.weights.current,
            salt=salt,
            hold=replace(hold, priority=priority),
        )

    def admit(self, use: Use, question_ids: Sequence[int], max_new_tokens: int | None) -> int:
        """Check that question and answer fit; returns the room for the answer, tokens.

        For a turn, whose answer is to become part of the session, its cells are claimed now.

        Raises
        ------
        SessionTooLong, PinRefused
        """
        table = self._keeper.table
        closing = len(self._renderer.closing_ids()) if use.is_chat and use.mode == "turn" else 0
        room = table.max_tokens - len(use.token_ids) - len(question_ids) - closing
        needed = 1 if max_new_tokens is None else max(max_new_tokens, 1)
        if room < needed:
            raise SessionTooLong(
                f"{len(use.token_ids)} tokens of session and {len(question_ids)} of question leave room for"
                f" {max(room, 0)} of an answer, and {needed} are asked for"
            )
        if use.mode == "query":
            return room
        use.question_ids = question_ids
        growth = len(question_ids) + (room if max_new_tokens is None else max_new_tokens) + closing
        with self._keeper.counting_refusals():
            demoted = table.reserve(use.session, growth)
        if demoted is not None:
            use.hold = replace(use.hold, pin=False)
        return room

    async def end(self, use: Use, answer: Answer) -> dict[str, Any]:
        """What the reply says about the session; for a turn, once question and answer are part of it.

        Raises
        ------
        SessionClosed
            The session has ended under the turn.
        SessionError, StoreError
            The turn did not become part of it.
        """
        session, keeper = use.session, self._keeper
        report = (answer.scheduler or {}).get("session")
        keeper.pins.saw(report)
        rebuilt = keeper.snapshots.saw(session, report)
        version: int | None = None
        try:
            if report is not None and session.version == use.data_version:
                session.lost = None
            if use.mode == "turn":
                self.check(use)
                if not answer.aborted:
                    version = await self._commit(use, answer)
        except MemStoreError as error:
            raise SessionNotSaved(f"the answer did not become part of the session: {error}") from error
        finally:
            await self.drop(use)
        prefilled = answer.prompt_tokens - answer.cached_tokens
        if use.first_token_ms is not None:
            keeper.metrics.observe(
                use.mode, ms=use.first_token_ms, cached_tokens=answer.cached_tokens, prefilled_tokens=prefilled
            )
        return {
            "id": session.header.id,
            "data_version": use.data_version,
            "version": version,
            "tokens": session.num_tokens,
            "pin": session.pin_state,
            "cached_tokens": answer.cached_tokens,
            "prefilled_tokens": prefilled,
            "rebuilt": rebuilt,
        }

    async def _commit(self, use: Use, answer: Answer) -> int:
        ids = self._renderer.answer(answer.token_ids, answer.text, stopped_by=answer.stopped_by, is_chat=use.is_chat)
        table, session = self._keeper.table, use.session
        with self._keeper.counting_refusals():
            change = table.append(session, segments_of([[*use.question_ids, *ids]], "data"))
        made = await self._keeper.make(change, self._keeper.logging(change), is_in_pool=True)
        if made.change.dropped_messages:
            session.lost = "window moved"
        elif use.hold.tokens is not None or not use.hold.pin:
            session.lost = "not prefilled yet"  # facts stood before it, or its pin did not fit when it began
        return change.entry.version

    @staticmethod
    def check(use: Use) -> None:
        """Raise where the session has ended under a use.

        Raises
        ------
        SessionClosed, SessionExpired
        """
        state = use.session.state
        if state != "open":
            raise (SessionClosed if state == "closed" else SessionExpired)("the session has ended under this request")

    async def drop(self, use: Use) -> None:
        """The request has come to its end, one way or another; harmless when repeated."""
        if use.is_ended:
            return
        use.is_ended = True
        session = use.session
        session.uses -= 1
        uses = self._keeper.uses[session.header.id]
        uses.discard(use)
        if not uses:
            del self._keeper.uses[session.header.id]
        if use.mode == "turn":
            self._keeper.table.settle(session)
            self._keeper.renew(session)
        if session.state == "open":
            self._keeper.touch(session)
        await self._turns.pop(use).aclose()
