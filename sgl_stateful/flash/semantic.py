"""Questions in other words: answered by what is stored for one that means the same, as far as audits bear that out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from sgl_stateful.errors import BadFlashRequest, FlashNeedsMemory
from sgl_stateful.sessions.content import Content
from sgl_stateful.sessions.session import Session

from .choices import leading
from .entry import Entry
from .metrics import FlashMetrics
from .outcomes import Hit
from .prompts import FlashPrompts
from .question import Ask, Question
from .table import FlashTable
from .wording import Vector, Wording, nearest, words_of

Embed = Callable[[str], Awaitable[Vector | None]]
"""The direction of a text; None of one that is longer than the embedder reads."""


class SemanticMatcher:
    """Finds the registered question that means what is asked. Of the event loop.

    Parameters
    ----------
    embed
        None: this server has no embedder.
    audit_every
        One in so many hits is decoded for real, with the words that were asked.
    """

    def __init__(
        self,
        table: FlashTable,
        prompts: FlashPrompts,
        metrics: FlashMetrics,
        *,
        embed: Embed | None,
        audit_every: int,
    ) -> None:
        self._table = table
        self._prompts = prompts
        self._metrics = metrics
        self._embed = embed
        self._audit_every = audit_every

    async def worded(self, question: Question, content: Content) -> Question:
        """The question as it can be matched by others; as it is where it is not to be.

        Parameters
        ----------
        content
            With data in its slots.

        Raises
        ------
        FlashNeedsMemory
            The server has no embedder.
        BadFlashRequest
            It is not in words, or in too many.
        EmbeddingError
        """
        if question.semantic is None:
            return question
        if self._embed is None:
            raise FlashNeedsMemory(
                "semantic matching needs the memory's embedder: start the server with --memory, or leave it out"
            )
        if (words := words_of(content)) is None:
            raise BadFlashRequest("semantic matching needs a question of words: text, or messages of role and text")
        if (vector := await self._embed(words.text)) is None:
            raise BadFlashRequest("semantic matching: the question is longer than the embedder reads")
        return replace(question, wording=Wording.of(words, vector))

    async def wording(self, session: Session, ask: Ask, content: Content | None) -> Wording | None:
        """What is asked, in the form that is compared; None where no question of the session may be meant by it."""
        if content is None or self._embed is None or not self._candidates(session, ask):
            return None
        if self._table.registrations.asked(session.header.id, ask.prompt) or (words := words_of(content)) is None:
            return None
        vector = await self._embed(words.text)
        return None if vector is None else Wording.of(words, vector)

    def find(self, session: Session, ask: Ask, wording: Wording, *, max_staleness_s: float = 0.0) -> Hit | None:
        """The answer of the question that is meant, where it holds now; counts it, and by chance has it audited."""
        entries = self._candidates(session, ask)
        alike = nearest(wording, [(e.question.wording, e.question.semantic) for e in entries])  # type: ignore[misc]
        if alike is None:
            return None
        present = self._prompts.present(session)
        found = self._table.look(entries[alike.place], present=present, max_staleness_s=max_staleness_s)
        if not isinstance(found, Hit):
            self._metrics.missed(found.cause)
            return None
        hit = found._replace(similarity=alike.similarity)
        assert hit.entry.alike is not None, hit.entry.name
        hit.entry.alike.hits += 1
        self._table.served(hit, asked=ask.prompt, audit_every=self._audit_every)
        self._metrics.semantic_hit()
        return hit

    def _candidates(self, session: Session, ask: Ask) -> list[Entry]:
        entries = self._table.registrations.of_session(session.header.id)
        return [entry for entry in entries if entry.is_alike_served and (ask.sampling, ask.memory) == _how(entry)]


def _how(entry: Entry) -> tuple[str, str]:
    ask = entry.question.ask(is_first=False)
    return ask.sampling, ask.memory


def says_the_same(question: Question, served: str, decoded: str) -> bool:
    """Whether a text that was decoded for other words answers as the one that was served.

    With choices by the choice that each begins with; else by equal text, white space around it aside.
    """
    mine, theirs = leading(question.choices, served), leading(question.choices, decoded)
    return mine == theirs if mine is not None else served.strip() == decoded.strip()
