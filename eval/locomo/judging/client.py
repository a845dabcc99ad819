"""Chat completions of an OpenAI-compatible endpoint, asked again with patience where it is busy or breaks off."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import NamedTuple

import httpx

from locomo.errors import JudgeRefused, JudgeUnanswered

_BUSY = frozenset({408, 409, 425, 429})
# Of the request as such, not of what one prompt says: every other request would meet the same.
_REFUSALS = frozenset({401, 402, 403, 404, 405})
_SHOWN_CHARACTERS = 300
_log = logging.getLogger(__name__)

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Patience:
    """How often a request is tried, and the waits between.

    They begin with ``first_wait_s`` and double up to ``longest_wait_s``. A ``Retry-After`` of the endpoint lengthens
    a wait, to ``longest_retry_after_s`` at most.
    """

    attempts: int = 6
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    longest_retry_after_s: float = 300.0

    def wait_s(self, failures: int, retry_after_s: float) -> float:
        """Return how long to wait after so many failed attempts in a row, seconds."""
        own = min(self.first_wait_s * 2.0 ** (failures - 1), self.longest_wait_s)
        return max(own, min(retry_after_s, self.longest_retry_after_s))


class Reply(NamedTuple):
    """The text of a completion, and the model that the endpoint says gave it."""

    text: str
    model: str


class ChatClient:
    """One model behind one endpoint, at temperature 0; calls may come from several threads.

    What an endpoint says of its refusals may repeat the prompt, and with it the data: it is logged, once for each
    status, and is in no error's message.

    Parameters
    ----------
    base_url
        Up to and without ``/chat/completions``: ``https://host/v1``.
    model
        The model's full name, sent as it is.
    api_key
        Bearer token, if the endpoint wants one.
    max_tokens
        Longest reply, tokens.
    timeout_s
        Of connecting, and of each wait for bytes.
    transport
        In place of the network.
    sleep, now
        The waits between attempts, and the wall clock that a ``Retry-After`` date is read against; seconds.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        max_tokens: int = 512,
        timeout_s: float = 60.0,
        patience: Patience | None = None,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], object] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.model = model
        self.base_url = base_url.rstrip("/")
        self._url = f"{self.base_url}/chat/completions"
        self._told: set[str] = set()
        self._http = httpx.Client(headers=headers, timeout=timeout_s, transport=transport)
        self._max_tokens = max_tokens
        self._patience = Patience() if patience is None else patience
        assert self._patience.attempts > 0, self._patience
        self._abandoned = threading.Event()
        self._sleep = self._abandoned.wait if sleep is None else sleep
        self._now = now

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def abandon(self) -> None:
        """End the waits of calls in other threads; no request is tried again from now on."""
        self._abandoned.set()

    def complete(self, messages: Sequence[Message]) -> Reply:
        """Ask for one completion.

        Raises
        ------
        JudgeUnanswered
            Every attempt met a timeout, a broken connection, 429, 5xx or a body that is no completion; or the endpoint
            refuses this one prompt.
        JudgeRefused
            The key, the address or the model is refused, so that asking anything is of no use.
        """
        failures = 0
        while True:
            outcome, retry_after_s = self._attempt(messages)
            if isinstance(outcome, Reply):
                return outcome
            failures += 1
            if failures == self._patience.attempts or self._abandoned.is_set():
                raise JudgeUnanswered(f"{outcome}, after {failures} attempts")
            self._sleep(self._patience.wait_s(failures, retry_after_s))

    def _attempt(self, messages: Sequence[Message]) -> tuple[Reply | str, float]:
        """A reply, or why there is none this time with the seconds that the endpoint asks to wait."""
        body = {
            "model": self.model,
            "messages": [dict(message) for message in messages],
            "temperature": 0,
            "max_tokens": self._max_tokens,
        }
        try:
            response = self._http.post(self._url, json=body)
        except httpx.UnsupportedProtocol as error:
            self._tell("no address", str(error))
            raise JudgeRefused("what was given is no address of a judge") from error
        except httpx.TimeoutException:
            return "timed out", 0.0
        except httpx.RequestError as error:
            self._tell(type(error).__name__, str(error))
            return type(error).__name__, 0.0
        status = response.status_code
        if status in _BUSY or status >= 500:
            return f"answered {status}", self._retry_after_s(response)
        if status in _REFUSALS or response.is_redirect:
            self._tell(f"answered {status}", response.text)
            raise JudgeRefused(f"the judge refused with {status}")
        if not response.is_success:
            self._tell(f"answered {status}", response.text)
            raise JudgeUnanswered(f"refused with {status}")
        try:
            completion = response.json()
            text = completion["choices"][0]["message"]["content"]
            model = completion.get("model") or self.model
        except (ValueError, LookupError, TypeError, AttributeError):
            return "answered with what is no completion", 0.0
        return Reply(text if isinstance(text, str) else "", str(model)), 0.0

    def _tell(self, what: str, said: str) -> None:
        if what not in self._told:
            self._told.add(what)
            _log.warning("judge %s: %s: %s", self._url, what, said[:_SHOWN_CHARACTERS])

    def _retry_after_s(self, response: httpx.Response) -> float:
        value = response.headers.get("Retry-After", "").strip()
        with suppress(ValueError):  # seconds, or else a date
            return max(0.0, float(value))
        try:
            return max(0.0, parsedate_to_datetime(value).timestamp() - self._now())
        except ValueError:
            return 0.0
