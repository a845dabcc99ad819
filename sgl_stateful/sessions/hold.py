"""What a request of a session tells the scheduler, carried in ``custom_params`` beside the directive.

Callers can never set it: the HTTP process refuses the key.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

HOLD_KEY = "sgl_stateful_session"


@dataclass(frozen=True, slots=True)
class Readback:
    """A snapshot that holds the KV of the first tokens of a request.

    Attributes
    ----------
    name
        Its file.
    tokens
        How many tokens it holds.
    least_tokens
        It is read where the pool lacks at least that many of them: then that is expected to be faster than prefill.
    """

    name: str
    tokens: int
    least_tokens: int


@dataclass(frozen=True, slots=True)
class Hold:
    """A request of a session.

    Attributes
    ----------
    session_id
        The session. It has one pin, and a new one takes the place of the former.
    tokens
        How many leading tokens of the request belong to the session, and are pinned once it has finished. None: all
        whose KV exists then, answer included (a turn).
    pin
        False: the session is not pinned; the request only takes part in ordering.
    fence
        Counts up with every request and every unpin of the server; a request older than its session's last unpin pins
        nothing.
    priority
        Of the session: higher goes first, and is the last to lose its pin when memory runs out.
    group
        Requests of one group begin with the same tokens, as far as they do; those are prefilled once.
    snapshot
        Where the session's KV can be read from, if it is not in the pool.
    entry
        What of the session is pinned, where that is not the session itself; gone with the session's own pin.
    ahead
        The first tokens of the answer, which are known: the request begins behind them.
    """

    session_id: str
    tokens: int | None
    pin: bool
    fence: int
    priority: int = 0
    group: str = ""
    snapshot: Readback | None = None
    entry: str | None = None
    ahead: tuple[int, ...] = ()

    @property
    def pin_name(self) -> str:
        """The pin's name."""
        return self.session_id if self.entry is None else entry_pin(self.session_id, self.entry)


def entry_pin(session_id: str, entry: str) -> str:
    """Name of the pin of something of a session; neither part has a slash."""
    return f"{session_id}/{entry}"


def dump_hold(hold: Hold) -> str:
    """The JSON string that travels under ``HOLD_KEY``."""
    return json.dumps(asdict(hold), separators=(",", ":"))


def parse_hold(custom_params: Any) -> Hold | None:
    """Read a request's hold; None where it belongs to no session."""
    raw = custom_params.get(HOLD_KEY) if isinstance(custom_params, dict) else None
    if raw is None:
        return None
    hold = Hold(**json.loads(raw))
    snapshot = Readback(**hold.snapshot) if isinstance(hold.snapshot, dict) else hold.snapshot
    return replace(hold, snapshot=snapshot, ahead=tuple(hold.ahead))
