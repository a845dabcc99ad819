"""A server with its facts encoded, and the gate before any timing."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locomo.arms.stateful import StatefulServer
from locomo.connection import ServerConnection
from locomo.errors import ServerFailed
from locomo.server import ServerProcess

from .gate import Divergence, RedGate, diverge, require_near, spread
from .output import say
from .subject import Subject

DEFAULT_POLICY = "ladder:live+4+32"
SPLICE = f"splice/{DEFAULT_POLICY}/tail"
TEXT = "text/tail"


@dataclass(frozen=True, slots=True)
class Setting:
    """A ready server with one conversation encoded.

    Attributes
    ----------
    owner
        Of the facts.
    policy
        Under which they are spliced.
    add_s
        What it took to add them: to embed and to store them.
    status
        The server's word when all were encoded, before it was asked anything.
    divergence
        By the gate.
    """

    url: str
    owner: str
    policy: str
    add_s: float
    status: Mapping[str, Any]
    divergence: Divergence


@contextmanager
def serving(
    subject: Subject, *, pool_tokens: int, policy: str = DEFAULT_POLICY, flags: Sequence[str] = ()
) -> Iterator[Setting]:
    """Start a server, encode the conversation, and pass the gate.

    The divergence of policies other than the default is measured and not judged: some are known to be far from full
    prefill, and what they cost is of interest all the same.

    Raises
    ------
    RedGate
        The server's self-test failed, a fact was not encoded, an answer was not spliced, or splicing changes the
        model's answer by more than it may (see `gate.require_near`).
    ServerFailed
        The server did not start or ended; the message holds the end of its log.
    """
    with started(subject.model, pool_tokens=pool_tokens, policy=policy, flags=flags) as (url, server):
        yield opened(url, server, subject, policy)


@contextmanager
def started(
    model: Path, *, pool_tokens: int, policy: str, flags: Sequence[str] = ()
) -> Iterator[tuple[str, StatefulServer]]:
    """Start a server on an empty store, and give its address and a client of it.

    Raises
    ------
    ServerFailed
        It did not start or ended; the message holds the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="memory-bench-") as folder:
        own = ["--policy", policy, "--max-total-tokens", str(pool_tokens), "--enable-metrics", *flags]
        process = ServerProcess(model, Path(folder) / "memory", flags=own, log=Path(folder) / "server.log")
        say(f"a server starts with {policy}; that takes a minute or so")
        with process, StatefulServer(process.url, model, max_tokens=1) as server:
            try:
                yield process.url, server
            except ServerFailed as error:
                raise ServerFailed(f"{error}\nthe server's log ends:\n{process.log_tail()}") from error


def status_of(url: str) -> dict[str, Any]:
    """``/v1/memory/status``.

    Raises
    ------
    ServerFailed
        The server cannot be reached, or answers with an error.
    """
    with ServerConnection(url) as connection:
        return connection.status()


def opened(url: str, server: StatefulServer, subject: Subject, policy: str) -> Setting:
    """Encode the conversation, and pass the gate; errors as of `serving`."""
    add_s, status = encode(url, server, subject)
    divergence = diverge(server, spread(subject.questions), policy)
    near = ", ".join(f"{kl:.3f} {what}" for what, kl in divergence._asdict().items())
    say(f"gate: mean KL to full prefill at the first token {near}")
    if policy == DEFAULT_POLICY:
        require_near(divergence)
    return Setting(url, server.owner, policy, add_s, status, divergence)


def encode(url: str, server: StatefulServer, subject: Subject, *, already: int = 0) -> tuple[float, dict[str, Any]]:
    """Add a conversation's facts and wait for their KV: how long adding them took, s, and the server's status then.

    Parameters
    ----------
    already
        Facts of other conversations that the server has encoded.

    Raises
    ------
    RedGate
        The server's self-test failed, or a fact was not encoded.
    """
    if not status_of(url)["verified"]:
        raise RedGate("the server's self-test failed")
    say(f"encoding {len(subject.units)} facts")
    add_s, started_s = 0.0, time.perf_counter()

    def added(done: int, total: int) -> None:
        """Is first called when all facts have been added."""
        nonlocal add_s
        add_s = add_s or time.perf_counter() - started_s

    server.open(subject.conversation, subject.units, added)
    status, facts = status_of(url), already + len(subject.units)
    for name, counts in status["encoder"]["policies"].items():
        if counts["failures"] or counts["facts"] < facts:
            raise RedGate(f"{name}: {counts['facts']} of {facts} facts encoded, {counts['failures']} failed")
    return add_s, status
