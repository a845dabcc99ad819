"""When a call is sent once more.

=============================  ==================  ==========================================================
what happened                  repeatable call     any other
=============================  ==================  ==========================================================
it was not sent (no connection)  again             again
no answer, or half of one      again               never: it may have been done
429                            again               again: it was refused before anything was done
503                            again               where the server says when, except ``StoreUnreachable`` and
                                                   ``SessionNotSaved``: what was written may have reached the store
502, 504                       again               never
anything else                  never               never
=============================  ==================  ==========================================================

The last failure is raised. Where one before it may have been done, it has that one as ``earlier``, and an
``Unreachable`` says ``was_sent``: the request was, though not with the last attempt.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from sgl_stateful.client.errors import ClientError, Refused, Unreachable

_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 8.0
_MAY_BE_WRITTEN = {"", "StoreUnreachable", "SessionNotSaved"}  # without a type it is a proxy's


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long a call is repeated.

    Attributes
    ----------
    retries
        How many times after the first.
    deadline_s
        No repetition begins later than this after the first attempt did.
    """

    retries: int = 3
    deadline_s: float = 60.0


def may_repeat(error: ClientError, *, is_repeatable: bool) -> bool:
    """Whether a call that failed like this may be sent once more."""
    match error:
        case Unreachable():
            return is_repeatable or not error.was_sent
        case Refused(status=429):
            return True
        case Refused(status=503):
            said_when = error.retry_after_s is not None and error.refusal.type not in _MAY_BE_WRITTEN
            return is_repeatable or said_when
        case Refused(status=502 | 504):
            return is_repeatable
    return False


class Attempts:
    """The attempts of one call; ``clock`` in seconds."""

    def __init__(self, policy: RetryPolicy, *, is_repeatable: bool, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._is_repeatable = is_repeatable
        self._clock = clock
        self._until = clock() + policy.deadline_s
        self._failed = 0
        self._unsure: ClientError | None = None

    def wait_s(self, error: ClientError) -> float:
        """Seconds to wait before the call is repeated.

        Raises
        ------
        ClientError
            ``error``: it is not repeated, or not in time.
        """
        self._failed += 1
        if self._unsure is not None:
            error.earlier = self._unsure
            if isinstance(error, Unreachable):
                error.was_sent = True
        if not may_repeat(error, is_repeatable=self._is_repeatable) or self._failed > self._policy.retries:
            raise error
        wait_s = error.retry_after_s if isinstance(error, Refused) else None
        if wait_s is None:
            # Spread out, so that the clients of a server that comes back do not all come at once.
            wait_s = min(_FIRST_WAIT_S * 2 ** (self._failed - 1), _LONGEST_WAIT_S) * random.uniform(0.5, 1)
        if self._clock() + wait_s > self._until:
            raise error
        if _may_be_done(error):
            self._unsure = error
        return wait_s


def _may_be_done(error: ClientError) -> bool:
    if isinstance(error, Unreachable):
        return error.was_sent
    return isinstance(error, Refused) and error.status != httpx.codes.TOO_MANY_REQUESTS
