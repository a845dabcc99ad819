"""Many sessions, many clients, anything in any order: every answer is that of a fresh prefill, and nothing is left."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx
import pytest
from engines import RunningServer
from sessions_http import GREEDY, KnownSession, new_owner

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

# SGL_STATEFUL_CHAOS=64x20 is the whole of it: some ten minutes on two cores.
SESSIONS, TURNS = map(int, os.environ.get("SGL_STATEFUL_CHAOS", "16x10").split("x"))
CLIENTS, SEED = 8, 20_261
DEADLINE_S = 120.0
BATCH = 16


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client:
        yield client


@dataclass
class Client:
    """One of the clients: its own sessions, its own order of things, and what it has been answered.

    Attributes
    ----------
    answers
        Prompt and output ids of each.
    """

    http: httpx.Client
    random: random.Random
    sessions: list[KnownSession] = field(default_factory=list)
    contents: dict[str, dict[int, list[int]]] = field(default_factory=dict)  # by session and version
    answers: list[tuple[list[int], list[int]]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def ids(self, least: int, most: int) -> list[int]:
        return self.random.choices(range(1000, 40_000), k=self.random.randint(least, most))

    def open(self, owner: str, **more: Any) -> None:
        ids = self.ids(10, 30)
        session = KnownSession.open(self.http, owner, ids, on_full="demote", **more)
        self.sessions.append(session)
        self.contents[session.id] = {1: list(ids)}

    def step(self, session: KnownSession) -> None:
        what = self.random.choices(
            ["query", "turn", "append", "abort", "rewind", "fork", "close", "unpin", "pin", "give_up"],
            [20, 30, 20, 8, 6, 4, 3, 3, 3, 3],
        )[0]
        self.counts[what] = self.counts.get(what, 0) + 1
        getattr(self, what)(session)

    def version(self, session: KnownSession) -> int:
        return max(self.contents[session.id])

    def note(self, session: KnownSession, version: int) -> None:
        assert version == self.version(session) + 1
        self.contents[session.id][version] = list(session.token_ids)

    def query(self, session: KnownSession) -> None:
        question = self.ids(2, 6)
        answer = session.ask("query", question, max_new_tokens=3)
        assert answer["data_version"] == self.version(session)
        self.answers.append(([*session.token_ids, *question], answer["output_ids"]))

    def turn(self, session: KnownSession) -> None:
        question, before = self.ids(2, 6), list(session.token_ids)
        answer = session.ask("turn", question, max_new_tokens=3)
        self.answers.append(([*before, *question], answer["output_ids"]))
        self.note(session, answer["version"])

    def append(self, session: KnownSession) -> None:
        self.note(session, session.append(self.ids(3, 12), if_version=self.version(session))["version"])

    def abort(self, session: KnownSession) -> None:
        """A turn whose caller goes away: it may have become part of the session, or not."""
        sampling = {"max_new_tokens": 30, "ignore_eos": True, **GREEDY}
        body = {"owner": session.owner, "input_ids": self.ids(2, 6), "sampling_params": sampling, "stream": True}
        with self.http.stream("POST", f"/v1/sessions/{session.id}/turn", json=body) as reply:
            assert reply.status_code == 200, reply.read()
            lines = reply.iter_lines()
            for _ in range(self.random.randint(1, 6)):
                next(lines)
        self.back(session)

    def give_up(self, session: KnownSession) -> None:
        """A query whose caller does not wait for the first token."""
        body = {"owner": session.owner, "input_ids": self.ids(2, 6), "sampling_params": {"max_new_tokens": 30}}
        with suppress(httpx.TimeoutException):
            self.http.post(f"/v1/sessions/{session.id}/query", json=body, timeout=0.005)

    def back(self, session: KnownSession) -> None:
        """Go back to the last version that is known."""
        known = self.version(session)
        done = session.post("rewind", version=known)  # waits for what is under way
        assert done.status_code == 200, done.text
        self.contents[session.id][done.json()["version"]] = list(session.token_ids)

    def rewind(self, session: KnownSession) -> None:
        version = self.random.choice(sorted(self.contents[session.id]))
        done = session.post("rewind", version=version)
        assert done.status_code == 200, done.text
        session.token_ids = list(self.contents[session.id][version])
        self.note(session, done.json()["version"])

    def fork(self, session: KnownSession) -> None:
        version = self.random.choice(sorted(self.contents[session.id]))
        done = session.post("fork", version=version)
        assert done.status_code == 201, done.text
        content = list(self.contents[session.id][version])
        fork = KnownSession(self.http, session.owner, done.json()["id"], content)
        self.contents[fork.id] = {1: list(content)}
        self.turn(fork)
        self.sessions.append(fork)

    def close(self, session: KnownSession) -> None:
        assert session.close().status_code == 200
        assert session.post("append", input_ids=[5]).json()["error"]["type"] == "SessionClosed"
        self.sessions.remove(session)

    def unpin(self, session: KnownSession) -> None:
        assert session.post("unpin").status_code == 200

    def pin(self, session: KnownSession) -> None:
        assert session.post("pin", on_full="demote").status_code == 200


def test_many_sessions_of_many_turns(server: RunningServer, http: httpx.Client) -> None:
    owners = [new_owner() for _ in range(4)]
    assert http.post("/flush_cache", params={"timeout": 60}).status_code == 200

    def run(number: int) -> Client:
        with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as own:
            client = Client(own, random.Random(SEED + number))
            for n in range(SESSIONS // CLIENTS):
                client.open(owners[(number + n) % len(owners)], priority=n % 3)
            for _ in range(TURNS * SESSIONS // CLIENTS):
                if not client.sessions:
                    client.open(owners[number % len(owners)])
                client.step(client.random.choice(client.sessions))
        return client

    with ThreadPoolExecutor(CLIENTS) as threads:
        clients = list(threads.map(run, range(CLIENTS)))

    counts = sum((Counter(client.counts) for client in clients), Counter[str]())
    assert sum(counts.values()) == SESSIONS * TURNS
    answers = [answer for client in clients for answer in client.answers]
    for start in range(0, len(answers), BATCH):
        check(http, answers[start : start + BATCH])

    # Every session holds what its client knows, and nothing is left when they are closed.
    for client in clients:
        for session in client.sessions:
            known = KnownSession(http, session.owner, session.id, session.token_ids)
            shown = known.show()
            assert (shown["tokens"], shown["queue"]["waiting"]) == (len(session.token_ids), 0)
            assert shown["version"] == client.version(session)
            assert known.close().status_code == 200
    for owner in owners:
        assert http.get("/v1/sessions", params={"owner": owner}).json()["sessions"] == []
    cells = settled_cells(http)
    assert (cells["pinned"], cells["admitted"]) == (0, 0)
    assert http.post("/flush_cache", params={"timeout": 60}).status_code == 200
    cells = http.get("/v1/sessions/stats").json()["cells"]
    assert (cells["free"], cells["evictable"]) == (cells["pool"], 0)


def check(http: httpx.Client, answers: list[tuple[list[int], list[int]]]) -> None:
    """Hold answers against those to prompts of which nothing is cached: nobody has had their cache salts before."""
    body = {
        "input_ids": [prompt for prompt, _ in answers],
        "sampling_params": {"max_new_tokens": 3, "ignore_eos": True, **GREEDY},
        "cache_salt": [uuid4().hex for _ in answers],
    }
    reply = http.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    for (prompt, output), right in zip(answers, reply.json(), strict=True):
        assert right["meta_info"]["cached_tokens"] == 0
        assert output == right["output_ids"], len(prompt)


def settled_cells(http: httpx.Client) -> dict[str, int]:
    """Cells once nothing runs any more: then free, evictable and pinned ones are all."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        cells: dict[str, int] = http.get("/v1/sessions/stats").json()["cells"]
        if cells["free"] + cells["evictable"] + cells["pinned"] == cells["pool"]:
            return cells
        assert time.monotonic() < deadline, cells
        time.sleep(0.2)
