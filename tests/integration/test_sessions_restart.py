"""Sessions on servers of their own: one that is killed and started again, one that retracts all the time."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from sessions_http import KnownSession, fresh, new_owner

from locomo.server import ServerProcess

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

FLAGS = ("--dtype", "float32", "--max-total-tokens", "3000", "--arena-mib", "64")


def ids(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 40_000), k=count)


def test_a_killed_servers_sessions_go_on(model_dir: Path, tmp_path: Path) -> None:
    owner, memory = new_owner(), tmp_path / "memory"
    with (
        ServerProcess(model_dir, memory, flags=FLAGS, log=tmp_path / "first.log") as process,
        httpx.Client(base_url=process.url, timeout=120) as http,
    ):
        session = KnownSession.open(http, owner, ids(200, 1), max_age_s=3600.0, window_tokens=400)
        session.append(ids(50, 2))
        assert session.ask("turn", ids(6, 3))["version"] == 3
        assert KnownSession.open(http, owner, ids(10, 4)).close().status_code == 200
        process.kill()
    with (
        ServerProcess(model_dir, memory, flags=FLAGS, log=tmp_path / "second.log") as process,
        httpx.Client(base_url=process.url, timeout=120) as http,
    ):
        session.http = http
        shown = session.show()
        assert (shown["version"], shown["tokens"], shown["pin"]["state"]) == (3, len(session.token_ids), "lost")
        assert (shown["max_age_s"], shown["window"]["tokens"]) == (3600.0, 400)
        listed = http.get("/v1/sessions", params={"owner": owner}).json()["sessions"]
        assert [one["id"] for one in listed] == [session.id]
        again = session.ask("query", ids(5, 5))
        assert again["output_ids"] == fresh(http, [*session.token_ids, *ids(5, 5)])["output_ids"]
        assert again["data_version"] == 3
        assert session.show()["pin"]["state"] == "pinned"
        assert session.append(ids(7, 6))["version"] == 4
        assert session.post("rewind", version=2).json()["tokens"] == 250


def test_turns_that_are_retracted_answer_as_undisturbed_ones(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case S5: SGLang's own switch takes every running request but one off the pool, again and again."""
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "true")
    owner = new_owner()
    with (
        ServerProcess(model_dir, tmp_path / "memory", flags=FLAGS, log=tmp_path / "server.log") as process,
        httpx.Client(base_url=process.url, timeout=300) as http,
    ):
        sessions = [KnownSession.open(http, owner, ids(60 + 10 * n, 10 + n)) for n in range(3)]
        with ThreadPoolExecutor(3) as threads:
            turns = list(threads.map(lambda one: one.ask("turn", ids(5, 20), max_new_tokens=16), sessions))
        assert sum(turn["meta_info"]["num_retractions"] for turn in turns) > 0
        for n, session in enumerate(sessions):
            prompt = session.token_ids[: 65 + 10 * n]
            assert session.token_ids[len(prompt) :] == fresh(http, prompt, max_new_tokens=16)["output_ids"]
            shown = session.show()
            assert (shown["version"], shown["tokens"]) == (2, len(prompt) + 16)
        cells = http.get("/v1/sessions/stats").json()["cells"]
        # Of each the last token has no KV yet.
        assert cells["pinned"] == sum(len(session.token_ids) - 1 for session in sessions)
        assert cells["free"] + cells["evictable"] + cells["pinned"] == cells["pool"]
