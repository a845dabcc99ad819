"""The prompt of a registered question on its session as it is now, and all that its answer will depend on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Protocol

from sgl_stateful.errors import BadSessionRequest, SessionNotFound, SessionTooLong
from sgl_stateful.params import MemoryParams
from sgl_stateful.planner import Prepared
from sgl_stateful.promotion import Promoter
from sgl_stateful.retrieval import Retrieved
from sgl_stateful.sessions.service import SessionService
from sgl_stateful.sessions.session import Session

from .answers import FactVersions, Present
from .port import EnginePrompt
from .question import Question

LOW_PRIORITY = -1000  # below that of any session


class Memory(Protocol):
    """The part of a ``MemoryService`` that questions with facts need."""

    @property
    def promoter(self) -> Promoter | None: ...

    async def retrieve(self, params: MemoryParams, query: str) -> Retrieved: ...

    def prepare_ids(
        self,
        params: MemoryParams,
        *,
        head: list[int],
        tail: tuple[int, ...],
        query: str,
        reserve_tokens: int,
        retrieved: Retrieved | None = None,
    ) -> Prepared: ...


@dataclass(frozen=True, slots=True)
class FlashPrompt:
    """A prompt, and what its answer depends on beside the question."""

    present: Present
    facts: FactVersions
    prompt: EnginePrompt


class MemoryFails(RuntimeError):
    """The facts of a question cannot be had, and without them it is another question."""


class FlashPrompts:
    """Makes prompts. Of the event loop.

    Parameters
    ----------
    memory
        None: this server has none.
    """

    def __init__(self, sessions: SessionService, memory: Memory | None) -> None:
        self._sessions = sessions
        self._memory = memory

    @property
    def is_paused(self) -> bool:
        """Whether the weights are being updated, so that nothing can be answered."""
        return self._sessions.weights.current is None

    def present(self, session: Session) -> Present:
        """What answers depend on beside the question and its facts."""
        epoch, weights = self._sessions.epoch(session.header.owner), self._sessions.weights.current
        return Present(session.version, epoch, weights, session.num_tokens == 0)

    async def facts(self, question: Question) -> FactVersions:
        """What the memory has for a question now; raises ``MemoryFails``."""
        return fact_versions(await self._retrieved(question))

    async def of(self, session_id: str, question: Question, *, version: int | None = None) -> FlashPrompt:
        """The prompt of a question now, or on an earlier version of its session.

        Raises
        ------
        SessionNotFound
            The session has ended.
        SessionTooLong
            It leaves no room for question and answer.
        BadSessionRequest
            The version is not kept.
        MemoryFails, StoreError
        """
        session = self._sessions.table.get(session_id, owner=None)
        retrieved = await self._retrieved(question)
        behind = await self._sessions.answering.behind(session, priority=LOW_PRIORITY, version=version)
        # From here on nothing is waited for: all of this is of one moment.
        if not self._sessions.table.is_here(session):
            raise SessionNotFound("the session has ended")
        is_first = not behind.token_ids
        present = Present(behind.data_version, behind.owner_epoch, behind.weight_version, is_first)
        asked = question.first if is_first else question.behind
        self.check_room(len(behind.token_ids), question)
        hold, head = behind.hold, [*behind.token_ids, *asked.head]
        if question.memory is None or retrieved is None:
            return FlashPrompt(present, (), EnginePrompt([*head, *asked.tail], behind.salt, hold))
        assert self._memory is not None, "facts without a memory"
        prepared = await asyncio.to_thread(
            self._memory.prepare_ids,
            question.memory,
            head=head,
            tail=asked.tail,
            query=question.query,
            reserve_tokens=question.max_tokens,
            retrieved=retrieved,
        )
        # Whoever asks this session in other words, or for these facts anew, finds them prefilled exactly.
        if version is None and prepared.report.block is not None and self._memory.promoter is not None:
            self._memory.promoter.expect(replace(prepared.report.block, salt=behind.salt))
        hold = replace(hold, tokens=len(behind.token_ids))
        prompt = EnginePrompt(prepared.token_ids, behind.salt, hold, prepared.directive)
        return FlashPrompt(present, fact_versions(retrieved), prompt)

    def check_room(self, session_tokens: int, question: Question) -> None:
        """Raise ``SessionTooLong`` where question and answer do not fit behind a session of that many tokens."""
        asked = max(len(question.behind), len(question.first))
        room = self._sessions.table.max_tokens - session_tokens - asked
        if room < question.max_tokens:
            raise SessionTooLong(
                f"{session_tokens} tokens of session and {asked} of question leave room for {max(room, 0)} of an"
                f" answer, and {question.max_tokens} are asked for"
            )

    async def _retrieved(self, question: Question) -> Retrieved | None:
        if question.memory is None:
            return None
        if self._memory is None:
            raise BadSessionRequest("this server has no memory")
        retrieved = await self._memory.retrieve(question.memory, question.query)
        if retrieved.failure is not None:
            raise MemoryFails(f"the facts cannot be had: {retrieved.failure}")
        return retrieved


def fact_versions(retrieved: Retrieved | None) -> FactVersions:
    """Facts that were found, with their versions."""
    return () if retrieved is None else tuple((hit.fact.id, hit.fact.version) for hit in retrieved.hits)
