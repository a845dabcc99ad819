"""Which questions are registered, by session and name, and how many there may be."""

from __future__ import annotations

from collections import Counter

from sgl_stateful.errors import FlashExists, FlashLimitReached, FlashNotFound, FlashNumbers

from .entry import Entry
from .question import Prompt, Question


class Registrations:
    """Entries of all sessions.

    Parameters
    ----------
    limit, owner_limit
        How many there may be in all, and of one owner.
    noun
        What they are, in messages.
    """

    def __init__(self, *, limit: int, owner_limit: int, noun: str = "question") -> None:
        self._noun = noun
        self._limit = limit
        self._owner_limit = owner_limit
        self._sessions: dict[str, dict[str, Entry]] = {}
        self._prompts: dict[str, dict[Prompt, list[Entry]]] = {}
        self._owners: Counter[str] = Counter()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def everyone(self) -> list[Entry]:
        """All entries."""
        return [entry for entries in self._sessions.values() for entry in entries.values()]

    def of_session(self, session_id: str) -> list[Entry]:
        """A session's entries, by name."""
        return sorted(self._sessions.get(session_id, {}).values(), key=lambda entry: entry.name)

    def of_owner(self, owner: str) -> list[Entry]:
        """An owner's entries, over all sessions."""
        return [entry for entry in self.everyone() if entry.owner == owner]

    def get(self, session_id: str, name: str) -> Entry:
        """One entry; raises ``FlashNotFound``."""
        if (entry := self._sessions.get(session_id, {}).get(name)) is None:
            raise FlashNotFound(f"the session has no {self._noun} {name!r}")
        return entry

    def has(self, entry: Entry) -> bool:
        """Whether this very entry is registered."""
        return self._sessions.get(entry.session_id, {}).get(entry.name) is entry

    def has_session(self, session_id: str) -> bool:
        """Whether the session has any."""
        return session_id in self._sessions

    def asked(self, session_id: str, prompt: Prompt) -> list[Entry]:
        """Entries whose question has these token ids."""
        return self._prompts.get(session_id, {}).get(prompt, [])

    def check(self, session_id: str, owner: str, question: Question) -> None:
        """Refuse a question that cannot be added.

        Raises
        ------
        FlashExists, FlashLimitReached
        """
        if question.name in self._sessions.get(session_id, {}):
            raise FlashExists(
                f"the session has a {self._noun} {question.name!r} already: update it, or delete it first"
            )
        self.check_new(session_id, question)
        if self._count >= self._limit or self._owners[owner] >= self._owner_limit:
            numbers = FlashNumbers(self._count, self._limit, self._owners[owner], self._owner_limit)
            raise FlashLimitReached(numbers, self._noun)

    def check_new(self, session_id: str, question: Question) -> None:
        """Refuse a question that another of the session is, token by token; raises ``FlashExists``."""
        for is_first in (False, True):
            ask = question.ask(is_first=is_first)
            for other in self.asked(session_id, ask.prompt):
                if other.name != question.name and other.question.ask(is_first=is_first) == ask:
                    raise FlashExists(f"{self._noun} {other.name!r} of the session is the very same")

    def add(self, entry: Entry) -> None:
        """Add an entry; ``check`` has passed."""
        self._sessions.setdefault(entry.session_id, {})[entry.name] = entry
        self._owners[entry.owner] += 1
        self._count += 1
        self._index(entry)

    def replace(self, entry: Entry, question: Question) -> None:
        """Give an entry another question of the same name."""
        assert question.name == entry.name, (question.name, entry.name)
        self._unindex(entry)
        entry.question = question
        self._index(entry)

    def remove(self, entry: Entry) -> None:
        """Remove an entry."""
        self._unindex(entry)
        entries = self._sessions[entry.session_id]
        del entries[entry.name]
        if not entries:
            del self._sessions[entry.session_id]
        self._owners[entry.owner] -= 1
        if not self._owners[entry.owner]:
            del self._owners[entry.owner]
        self._count -= 1

    def _index(self, entry: Entry) -> None:
        prompts = self._prompts.setdefault(entry.session_id, {})
        for prompt in {entry.question.behind, entry.question.first}:
            prompts.setdefault(prompt, []).append(entry)

    def _unindex(self, entry: Entry) -> None:
        prompts = self._prompts[entry.session_id]
        for prompt in {entry.question.behind, entry.question.first}:
            prompts[prompt].remove(entry)
            if not prompts[prompt]:
                del prompts[prompt]
        if not prompts:
            del self._prompts[entry.session_id]
