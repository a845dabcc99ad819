"""A session's KV on disk and back, on the real engine in fp32, and over a restart of a server."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from engines import RunningEngine
from redis_server import wait_until
from sessions_http import KnownSession, fresh, new_owner

from locomo.server import ServerProcess
from memstore import EncodingId
from memstore.kv.session_files import FOLDER
from sgl_stateful.directive import Span, Splice
from sgl_stateful.sessions.hold import HOLD_KEY, Hold, Readback, dump_hold
from sgl_stateful.sessions.snapshot_file import read_header, read_layers
from sgl_stateful.sglang_adapter.engine import INTERNAL, scheduler_report

pytestmark = pytest.mark.engine

_DEADLINE_S = 120.0
_SALT = "snapshots"
_fences = itertools.count(1_000_000)
_seeds = itertools.count(77_001)


def words(count: int) -> list[int]:
    """Token ids that no other call returns."""
    return [int(i) for i in np.random.default_rng(next(_seeds)).integers(100, 40_000, count)]


class Snapshots:
    """Requests of one session, and its snapshot."""

    def __init__(self, engine: RunningEngine) -> None:
        self.engine = engine
        self.session = uuid.uuid4().hex
        self.name = f"{'0' * 32}-{self.session}.kv"
        self.path: Path = engine.service.settings.kv_path() / FOLDER / self.name

    def whole(self, tokens: int) -> int:
        return tokens // self.engine.page_size * self.engine.page_size

    def hold(self, ids: list[int], *, snapshot: int | None = None) -> Hold:
        readback = None if snapshot is None else Readback(self.name, snapshot, 1)
        return Hold(self.session, len(ids), pin=True, fence=next(_fences), snapshot=readback)

    def control(self, op: str, **payload: Any) -> Mapping[str, Any]:
        return self.engine.run(self.engine.port.control(op, payload))

    def write(self, ids: list[int], name: str | None = None) -> Mapping[str, Any]:
        """Write a snapshot of tokens in the pool; what became of it."""
        name = name or self.name
        state = self.control("snapshot_write", name=name, token_ids=ids, salt=_SALT, least_tokens=1)
        deadline = time.monotonic() + _DEADLINE_S
        while state["state"] == "writing":
            assert time.monotonic() < deadline
            state = self.control("snapshot_state", name=name)
        return state

    def flush(self) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not self.engine.engine.flush_cache().success:
            assert time.monotonic() < deadline, "the cache is never idle"

    def generate(self, ids: list[int], hold: Hold | None = None, *, salt: str = _SALT) -> dict[str, Any]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        sampling: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
        if hold is not None:
            sampling["custom_params"] = {HOLD_KEY: dump_hold(hold)}
        request = GenerateReqInput(
            rid=uuid.uuid4().hex, input_ids=ids, sampling_params=sampling, return_logprob=True, cache_salt=salt
        )
        setattr(request, INTERNAL, True)

        async def last() -> dict[str, Any]:
            async with aclosing(self.engine.engine.tokenizer_manager.generate_request(request, None)) as replies:
                return [reply async for reply in replies][-1]

        return self.engine.run(last())


@pytest.fixture
def snapshots(engine: RunningEngine) -> Iterator[Snapshots]:
    engine.run(engine.service.start())
    driver = Snapshots(engine)
    driver.flush()
    yield driver
    driver.control("unpin", session_ids={driver.session: next(_fences)})
    table = driver.control("pins", session_ids=None)
    assert table["available"] + table["evictable"] + table["protected"] == table["pool_tokens"]
    assert table["protected"] == table["pinned_cells"]


def assert_same_answer(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine["output_ids"] == theirs["output_ids"]
    for got, wanted in zip(
        mine["meta_info"]["output_token_logprobs"], theirs["meta_info"]["output_token_logprobs"], strict=True
    ):
        assert got[1] == wanted[1]
        assert got[0] == pytest.approx(wanted[0], abs=1e-4)


def report_of(reply: dict[str, Any]) -> dict[str, Any]:
    report = scheduler_report(reply["meta_info"])
    assert report is not None
    told: dict[str, Any] = report["session"]
    return told


def test_what_was_prefilled_is_read_back_bit_by_bit(snapshots: Snapshots) -> None:
    ids, question = words(720), words(9)
    snapshots.generate(ids, snapshots.hold(ids))
    written = snapshots.write(ids)
    assert (written["state"], written["shape"][1]) == ("written", 720)
    first = [(k.clone(), v.clone()) for k, v in read_layers(snapshots.path)]
    snapshots.flush()

    answer = snapshots.generate([*ids, *question], snapshots.hold(ids, snapshot=720))
    assert answer["meta_info"]["cached_tokens"] == 720
    told = report_of(answer)
    assert (told["snapshot"]["state"], told["snapshot"]["tokens"], told["lost"]) == ("read", 720, "flushed")
    assert told["snapshot"]["bytes"] == read_header(snapshots.path).payload_bytes
    assert told["pinned_tokens"] == 720
    assert_same_answer(answer, snapshots.generate([*ids, *question], salt=uuid.uuid4().hex))

    # It is in the tree under the real ids: for who has the salt, session or not, and for a snapshot of the pool.
    plain = snapshots.generate([*ids, *words(9)])
    assert plain["meta_info"]["cached_tokens"] == 720
    assert snapshots.generate([*ids, 5], salt="another")["meta_info"]["cached_tokens"] == 0
    again = f"{'0' * 32}-again.kv"
    assert snapshots.write(ids, again)["tokens_digest"] == written["tokens_digest"]
    for got, wanted in zip(read_layers(snapshots.path.with_name(again)), first, strict=True):
        assert all(bool((mine == theirs).all()) for mine, theirs in zip(got, wanted, strict=True))


def test_what_the_pool_still_has_is_not_read_again(snapshots: Snapshots) -> None:
    ids = words(720)
    snapshots.generate(ids, snapshots.hold(ids))
    assert snapshots.write(ids)["state"] == "written"
    snapshots.flush()
    snapshots.generate(ids[:400])
    answer = snapshots.generate([*ids, 5, 6], snapshots.hold(ids, snapshot=720))
    assert answer["meta_info"]["cached_tokens"] == 720
    assert report_of(answer)["snapshot"]["tokens"] == 720 - snapshots.whole(400)
    assert_same_answer(answer, snapshots.generate([*ids, 5, 6], salt=uuid.uuid4().hex))
    assert "snapshot" not in report_of(snapshots.generate([*ids, 7], snapshots.hold(ids, snapshot=720)))


def test_too_little_to_be_worth_it_is_prefilled(snapshots: Snapshots) -> None:
    ids = words(320)
    snapshots.generate(ids, snapshots.hold(ids))
    assert snapshots.write(ids)["state"] == "written"
    snapshots.flush()
    hold = Hold(snapshots.session, 320, pin=True, fence=next(_fences), snapshot=Readback(snapshots.name, 320, 321))
    answer = snapshots.generate([*ids, 5], hold)
    assert answer["meta_info"]["cached_tokens"] == 0
    assert "snapshot" not in report_of(answer)


@pytest.mark.parametrize("damage", ["absent", "damaged", "other_tokens", "other_fingerprint"])
def test_what_cannot_be_read_is_prefilled(snapshots: Snapshots, damage: str) -> None:
    ids = words(400)
    snapshots.generate(ids, snapshots.hold(ids))
    assert snapshots.write(ids)["state"] == "written"
    if damage == "absent":
        snapshots.path.unlink()
    elif damage == "damaged":  # in the last layer's values, when all others are in the pool
        with snapshots.path.open("r+b") as file:
            file.seek(-3, 2)
            byte = file.read(1)
            file.seek(-3, 2)
            file.write(bytes([byte[0] ^ 1]))
    elif damage == "other_tokens":
        ids = [*ids[:399], ids[399] ^ 1]
    else:
        snapshots.control("snapshot_fence", weights="+others")
    snapshots.flush()
    try:
        answer = snapshots.generate([*ids, 5], snapshots.hold(ids, snapshot=400))
    finally:
        snapshots.control("snapshot_fence", weights="")
    told = report_of(answer)
    assert told["snapshot"] == {"state": "missed", "reason": damage}
    assert (answer["meta_info"]["cached_tokens"], told["pinned_tokens"]) == (0, 400)
    assert_same_answer(answer, snapshots.generate([*ids, 5], salt=uuid.uuid4().hex))


def test_what_is_dropped_while_it_is_written_never_appears(snapshots: Snapshots) -> None:
    ids = words(720)
    snapshots.generate(ids, snapshots.hold(ids))
    # One after the other: the second is still to be written when it is dropped, or being written.
    first, second = f"{'0' * 32}-first.kv", snapshots.name
    for name in (first, second):
        snapshots.control("snapshot_write", name=name, token_ids=ids, salt=_SALT, least_tokens=1)
    snapshots.control("snapshot_drop", names=[second])
    assert snapshots.write(ids, f"{'0' * 32}-third.kv")["state"] == "written"  # files are written in order
    assert snapshots.control("snapshot_state", name=second)["state"] == "dropped"
    # Where it was through before it was dropped it is there whole, and whoever has dropped it removes it now.
    parts = [file.name for file in snapshots.path.parent.glob("*.part")]
    assert parts == []


def test_tokens_that_are_not_in_the_pool_are_not_written(snapshots: Snapshots) -> None:
    assert snapshots.write(words(300)) == {"state": "not_in_pool"}
    assert not snapshots.path.exists()


def test_a_request_with_facts_does_without(snapshots: Snapshots) -> None:
    ids = words(400)
    snapshots.generate(ids, snapshots.hold(ids))
    assert snapshots.write(ids)["state"] == "written"
    snapshots.flush()
    facts = Splice((Span(EncodingId("0" * 32), 400, 440),), fingerprint="unknown")
    hold = snapshots.hold(ids, snapshot=400)
    prefill = snapshots.engine.port.prefill([*ids, *words(50)], salt=_SALT, directive=facts, hold=hold)
    result = snapshots.engine.run(prefill)
    assert result.cached_tokens == 0
    assert "snapshot" not in result.scheduler["session"]
    assert result.scheduler["session"]["pinned_tokens"] == 400


# ---- over a restart ----


def snapshot_counts(http: httpx.Client) -> dict[str, int]:
    counts: dict[str, int] = http.get("/v1/sessions/stats").json()["totals"]["snapshots"]
    return counts


@pytest.mark.timeout(900)  # two servers start
def test_a_session_is_read_back_after_a_restart(model_dir: Path, tmp_path: Path) -> None:
    memory, owner = tmp_path / "memory", new_owner()
    flags = ["--dtype", "float32", "--max-total-tokens", "3000", "--arena-mib", "64"]
    ids, other, question = words(600), words(300), words(8)
    folder = memory / "kv" / FOLDER

    with (
        ServerProcess(model_dir, memory, flags=flags, log=tmp_path / "first.log") as server,
        httpx.Client(base_url=server.url, timeout=300) as http,
    ):
        session = KnownSession.open(http, owner, ids)
        purged = KnownSession.open(http, new_owner(), other)
        ended = KnownSession.open(http, owner, other)
        wait_until(lambda: snapshot_counts(http)["written"] == 3, "the third snapshot", deadline_s=_DEADLINE_S)
        assert len(list(folder.iterdir())) == 3
        assert ended.close().status_code == 200
        assert len(list(folder.iterdir())) == 2
        confirm = {"confirm": purged.owner}
        assert http.delete(f"/v1/memory/owners/{purged.owner}", params=confirm).status_code == 200
        (kept,) = folder.iterdir()
        assert kept.name.endswith(f"-{session.id}.kv")
        wanted = fresh(http, [*ids, *question], return_logprob=True)
    (folder / kept.name.replace(session.id, "0" * 32)).write_bytes(kept.read_bytes())

    with (
        ServerProcess(model_dir, memory, flags=flags, log=tmp_path / "second.log") as server,
        httpx.Client(base_url=server.url, timeout=300) as http,
    ):
        session.http = http
        assert session.show()["pin"] == {"state": "lost", "cells": 0, "reason": "restarted"}
        answer = session.ask("query", question, return_logprob=True)
        told = answer["meta_info"]["session"]
        assert (told["rebuilt"], told["cached_tokens"], told["prefilled_tokens"]) == ("snapshot", 600, 8)
        assert_same_answer(answer, wanted)
        assert session.show()["pin"] == {"state": "pinned", "cells": 600, "reason": None}
        assert session.ask("query", question)["meta_info"]["session"]["rebuilt"] is None
        assert snapshot_counts(http) == {"written": 0, "read": 1, "missed": 0}
        wait_until(lambda: list(folder.iterdir()) == [kept], "the end of a file of no session", deadline_s=_DEADLINE_S)
