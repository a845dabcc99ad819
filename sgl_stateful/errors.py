"""Errors of sgl_stateful, one tree.

StatefulError
├── IncompatibleServer     this SGLang, model or flag cannot be served; raised at start-up
├── UnverifiedSplice       the start-up self-test failed
├── MemoryDisabled         a request asks for memory on a server that has none
├── BadMemoryRequest       a request that cannot be understood (HTTP 400)
│   └── ForgedDirective    a caller set a key that is the server's own
└── SessionError           a session cannot do what it was asked to, and was not changed
    ├── SessionNotFound            unknown, or another owner's (404)
    │   ├── SessionClosed
    │   └── SessionExpired
    ├── SessionVersionConflict     it has another version by now (409)
    ├── TurnInProgress             (409)
    ├── SessionOfAnotherModel      (409)
    ├── SessionTooLong             for the model's context or for the pool (413)
    ├── BadSessionRequest          (422)
    ├── AppendQueueFull            (429)
    ├── SessionNotSaved            a turn was answered, but not logged (503)
    ├── PinRefused                 the pin does not fit, with the numbers (429)
    └── FlashError                 of registered questions
        ├── FlashNotFound              no question of that name (404)
        ├── FlashExists                the name, or the very question, is taken (409)
        ├── FlashNotReady              it has no answer that may be served (409)
        ├── FlashLimitReached          with the numbers (429)
        ├── FlashReadersFull           too many follow the session's changes (429)
        ├── FlashReaderTooSlow         the end of a stream that was not read in time
        └── BadFlashRequest            (422)
            ├── EmptyFlashQuestion
            ├── FlashSlotMissing           a slot of a template without data, or data without a slot
            ├── FlashNeedsMemory           semantic matching on a server without a memory
            └── FlashChoicesAlike          choices that begin with the same token
"""

from __future__ import annotations

from dataclasses import dataclass


class StatefulError(Exception):
    """Base of every error that this package raises."""


class IncompatibleServer(StatefulError):
    """This SGLang version, model or flag cannot be served; the message names it and what to change."""


class UnverifiedSplice(StatefulError):
    """The start-up self-test found spliced KV that differs from full prefill."""


class MemoryDisabled(StatefulError, ValueError):
    """A request asks for memory, but the server was started without one."""


class BadMemoryRequest(StatefulError, ValueError):
    """A memory request that cannot be served as written.

    It is a ``ValueError`` because SGLang's routes answer that with HTTP 400 and its message.
    """


class ForgedDirective(BadMemoryRequest):
    """A caller put a value under the key through which the server talks to its own scheduler."""


class SessionError(StatefulError, ValueError):
    """A session cannot do what it was asked to; it is what it was before.

    Attributes
    ----------
    status_code
        HTTP status.
    retry_after_s
        When a repetition may succeed; None: not by waiting.
    """

    status_code = 400
    retry_after_s: int | None = None


class SessionNotFound(SessionError):
    """There is no such session of this owner."""

    status_code = 404


class SessionClosed(SessionNotFound):
    """The session has been closed."""


class SessionExpired(SessionNotFound):
    """The session's idle time or age has come to its end."""


class SessionVersionConflict(SessionError):
    """The session does not have the version that the caller expects."""

    status_code = 409


class TurnInProgress(SessionError):
    """Another turn of the session is running; a turn needs the answer before it."""

    status_code = 409
    retry_after_s = 1


class SessionOfAnotherModel(SessionError):
    """The session's token ids belong to another model or tokenizer."""

    status_code = 409


class SessionTooLong(SessionError):
    """The session would not fit the model's context, or the pool, beside an answer."""

    status_code = 413


class BadSessionRequest(SessionError):
    """The request cannot be served as written."""

    status_code = 422


class AppendQueueFull(SessionError):
    """Too many appends of the session are waiting."""

    status_code = 429
    retry_after_s = 1


@dataclass(frozen=True, slots=True)
class PinNumbers:
    """Why a pin does not fit, in cells; a cell is one token slot of the KV pool.

    Attributes
    ----------
    needed
        By this pin, beyond what it has.
    pinned, budget
        By all sessions, and how many they may have.
    owner_pinned, quota
        The same of the owner.
    """

    needed: int
    pinned: int
    budget: int
    owner_pinned: int
    quota: int


class PinRefused(SessionError):
    """The pin does not fit into the budget of all sessions, or if it does, into the owner's quota (``is_of_owner``)."""

    status_code = 429
    retry_after_s: int | None = 2

    def __init__(self, numbers: PinNumbers) -> None:
        self.numbers = numbers
        fits_budget = numbers.pinned + numbers.needed <= numbers.budget
        never_fits = numbers.needed > min(numbers.budget, numbers.quota)
        self.is_of_owner = fits_budget and numbers.owner_pinned + numbers.needed > numbers.quota
        if never_fits:
            self.is_of_owner = numbers.quota < numbers.budget
        have, may = (numbers.owner_pinned, numbers.quota) if self.is_of_owner else (numbers.pinned, numbers.budget)
        whose = " by this owner" if self.is_of_owner else ""
        if never_fits:
            # Nothing that ends makes room for it: it is not to be asked for again.
            self.status_code, self.retry_after_s = 413, None
            super().__init__(
                f"{numbers.needed} more cells never fit: no more than {may} may be pinned{whose}; ask for fewer, or"
                " with on_full 'demote'"
            )
        else:
            super().__init__(
                f"{numbers.needed} more cells do not fit: {have} of {may} are pinned{whose}; close or unpin a session,"
                " or ask with on_full 'demote'"
            )


class SessionNotSaved(SessionError):
    """The turn was answered, but the log could not be written: question and answer are not part of the session."""

    status_code = 503
    retry_after_s = 2


class FlashError(SessionError):
    """A registered question cannot do what it was asked to; it and its session are what they were before."""


class FlashNotFound(FlashError):
    """The session has no question of that name."""

    status_code = 404


class FlashExists(FlashError):
    """The session has a question of that name, or this very question under another."""

    status_code = 409


class FlashNotReady(FlashError):
    """The question has no answer that may be served now; the message says why."""

    status_code = 409
    retry_after_s: int | None = 1


@dataclass(frozen=True, slots=True)
class FlashNumbers:
    """How many questions are registered, and how many may be.

    Attributes
    ----------
    registered, limit
        Of all owners.
    owner_registered, owner_limit
        Of the owner, over all of their sessions.
    """

    registered: int
    limit: int
    owner_registered: int
    owner_limit: int


class FlashLimitReached(FlashError):
    """No more questions may be registered, by this owner or by anybody."""

    status_code = 429

    def __init__(self, numbers: FlashNumbers, noun: str = "question") -> None:
        self.numbers = numbers
        nouns = "entries" if noun == "entry" else f"{noun}s"
        if numbers.owner_registered >= numbers.owner_limit:
            have, may, whose = numbers.owner_registered, numbers.owner_limit, " by this owner"
        else:
            have, may, whose = numbers.registered, numbers.limit, ""
        super().__init__(f"{have} of {may} {nouns} are registered{whose}: delete some")


class FlashReadersFull(FlashError):
    """Too many follow the changes of one session."""

    status_code = 429
    retry_after_s = 2


class FlashReaderTooSlow(FlashError):
    """Changes came faster than a follower read them, and were no longer kept for it."""

    status_code = 429


class BadFlashRequest(FlashError):
    """A question cannot be registered as written."""

    status_code = 422


class EmptyFlashQuestion(BadFlashRequest):
    """There is nothing to ask: the question has no tokens."""


class FlashSlotMissing(BadFlashRequest):
    """A template names a slot for which there is no data, or there is data that no slot takes."""


class FlashNeedsMemory(BadFlashRequest):
    """Semantic matching on a server without a memory, whose embedder it needs."""


class FlashChoicesAlike(BadFlashRequest):
    """Two choices begin with the same token, so that the next token does not tell them apart."""
