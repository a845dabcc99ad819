"""``sgl-stateful session`` and SGLang's ``/metrics`` on the real server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
from engines import RunningServer
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.engine

LOG = "08:00 bed 3: 31 C, soil dry. 09:00 bed 4: 24 C, soil wet. 10:00 bed 5: 27 C, the fan is on."


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=300) as client:
        yield client


@pytest.fixture
def owner() -> str:
    return f"greenhouse-{uuid4().hex}"


@pytest.fixture
def opened(http: httpx.Client, owner: str) -> Iterator[Callable[..., dict[str, Any]]]:
    """Open sessions of the owner, which are closed after the test."""
    ids: list[str] = []

    def open_one(**fields: Any) -> dict[str, Any]:
        reply = http.post("/v1/sessions", json={"owner": owner, "text": LOG, "ttl_s": 600, **fields})
        assert reply.status_code == 201, reply.text
        session: dict[str, Any] = reply.json()
        ids.append(session["id"])
        return session

    yield open_one
    for id in ids:
        http.delete(f"/v1/sessions/{id}", params={"owner": owner})


@pytest.fixture
def sessions(server: RunningServer) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command in a process of its own, as a shell does."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sgl_stateful.cli", "session", *arguments, "--url", server.url]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    return run


Shell = Callable[..., subprocess.CompletedProcess[str]]
Open = Callable[..., dict[str, Any]]


def document(run: subprocess.CompletedProcess[str]) -> Any:
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def samples(http: httpx.Client) -> dict[tuple[str, tuple[str, ...]], float]:
    """Our samples by name and label values; SGLang's own labels, if any, are none of ours."""
    families = text_string_to_metric_families(http.get("/metrics", follow_redirects=True).text)
    return {
        (sample.name.removeprefix("sgl_stateful_session_"), tuple(sorted(sample.labels.values()))): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("sgl_stateful_session_")
    }


def test_the_shell_shows_what_the_routes_show(http: httpx.Client, owner: str, opened: Open, sessions: Shell) -> None:
    first, second = opened(), opened(priority=7)
    mine = document(sessions("list", "--owner", owner, "--json"))
    assert mine == http.get("/v1/sessions", params={"owner": owner}).json()["sessions"]
    assert {session["id"] for session in mine} == {first["id"], second["id"]}
    everyone = document(sessions("list", "--limit", "1000", "--json"))
    assert {session["id"] for session in everyone if session["owner"] == owner} == {first["id"], second["id"]}
    shown = document(sessions("show", second["id"], "--json"))
    assert (shown["id"], shown["owner"], shown["priority"], shown["pin"]["state"]) == (second["id"], owner, 7, "pinned")
    table = sessions("list", "--owner", owner).stdout
    assert first["id"] in table
    assert "\tpinned\t" in table


def test_pins_go_and_come_back_and_a_session_ends(
    http: httpx.Client, owner: str, opened: Open, sessions: Shell
) -> None:
    session = opened()
    path, params = f"/v1/sessions/{session['id']}", {"owner": owner}
    assert document(sessions("unpin", session["id"], "--json"))["pin"]["state"] == "unpinned"
    assert http.get(path, params=params).json()["pin"]["cells"] == 0
    pinned = document(sessions("pin", session["id"], "--owner", owner, "--json"))["pin"]
    assert pinned == {"state": "pinned", "cells": session["tokens"], "reason": None}
    assert http.get(path, params=params).json()["pin"] == pinned
    assert document(sessions("close", session["id"], "--json"))["closed"]["id"] == session["id"]
    assert http.get(path, params=params).status_code == 404
    again = sessions("close", session["id"], "--owner", owner)
    assert (again.returncode, again.stdout) == (1, "")
    assert "SessionClosed" in again.stderr
    assert len(again.stderr.splitlines()) == 1


def test_a_pin_that_does_not_fit_is_refused_with_the_numbers(opened: Open, sessions: Shell) -> None:
    session = opened(reserve_tokens=4000, on_full="demote")  # the budget is half of 6,000
    assert session["pin"]["state"] == "unpinned"
    run = sessions("pin", session["id"], "--on-full", "refuse")
    assert run.returncode == 1
    assert "(PinRefused)" in run.stderr
    assert "3000" in run.stderr
    assert "is unpinned, 0 cells" in sessions("pin", session["id"], "--on-full", "demote").stdout


def test_top_counts_the_cells_of_the_pool(owner: str, opened: Open, sessions: Shell) -> None:
    before = document(sessions("top", "--once", "--json"))
    session = opened(text=" ".join(f"{LOG} {number}" for number in range(5)) + owner)
    after = document(sessions("top", "--once", "--json", "--owner", owner))
    assert (after["cells"]["pool"], after["cells"]["budget"]) == (6000, 3000)
    # Not all of it: the pool may have had the beginning pinned for another session.
    assert 0 < after["cells"]["pinned"] - before["cells"]["pinned"] <= session["tokens"]
    assert sum(after["cells"][state] for state in ("pinned", "evictable", "free")) <= 6000
    assert after["sessions"]["open"] == before["sessions"]["open"] + 1
    assert [row["id"] for row in after["rows"]] == [session["id"]]
    plain = sessions("top", "--once", "--owner", owner)
    assert plain.returncode == 0, plain.stderr
    assert "pool 6000  pinned " in plain.stdout
    assert "budget 3000  quota 3000" in plain.stdout
    assert session["id"] in plain.stdout


def test_metrics_of_sessions_are_among_those_of_sglang(
    http: httpx.Client, owner: str, opened: Open, sessions: Shell
) -> None:
    session = opened(text=f"{owner}: {LOG}")
    before = samples(http)
    path = f"/v1/sessions/{session['id']}"
    appended = http.post(f"{path}/append", json={"owner": owner, "text": " 11:00 bed 6: 29 C."}).json()
    question = {
        "owner": owner,
        "text": " Which bed is dry?",
        "sampling_params": {"max_new_tokens": 2, "temperature": 0},
    }
    assert http.post(f"{path}/query", json=question).status_code == 200
    stats = document(sessions("top", "--once", "--json"))  # the gauges are of when somebody last looked
    after = samples(http)

    def more(name: str, *labels: str) -> float:
        return after[name, labels] - before.get((name, labels), 0.0)

    assert more("ms_count", "append") == 1
    assert more("ms_count", "query") == 1
    assert more("ms_sum", "append") == pytest.approx(appended["ms"], abs=1.0)
    assert more("tokens_total", "prefilled") > appended["prefilled_tokens"] > 0
    assert more("tokens_total", "cached") >= appended["cached_tokens"] + session["tokens"] - 1
    for state in ("pinned", "evictable", "free"):
        assert after["cells", (state,)] == stats["cells"][state]
    assert after["open", ()] == stats["sessions"]["open"]
    assert after["cells_by_owner_class", ("other",)] == stats["cells"]["by_owner_class"]["other"] > 0
    assert after["admissions_total", ()] == stats["totals"]["admissions"] > 0
    for reason, count in stats["totals"]["refusals"].items():
        assert after["refusals_total", (reason,)] == count
