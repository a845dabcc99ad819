import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from speaking_engine import SpeakingEngine
from words import ByteTokenizer

from memstore import KVBlobs, NewFact
from sgl_stateful.directive import Splice
from sgl_stateful.faithfulness import gate as gate_module
from sgl_stateful.faithfulness.cached import result_path, write_result
from sgl_stateful.faithfulness.choice import Target
from sgl_stateful.faithfulness.conversations import built_in
from sgl_stateful.faithfulness.gate import QUESTIONS_AT, REPAIRS, FaithfulnessGate, State
from sgl_stateful.faithfulness.table import FLOOR, WITHOUT, Row, Table
from sgl_stateful.params import MemoryParams
from sgl_stateful.planner import Prepared
from sgl_stateful.service import MemoryService

pytestmark = pytest.mark.anyio

Make = Callable[..., MemoryService]
NEAR, FAR = 0.1, 0.4


def table(**kl: float) -> Table:
    """At 5 facts, the floor at 0.2 and the question alone at 2; of the repairs those that are named by their count."""
    costs = {"none": 0.0, **{name: 0.1 * number for number, name in enumerate(REPAIRS)}}
    rows = [Row(5, WITHOUT, (2.0,) * 3), Row(5, FLOOR, (0.2,) * 3)]
    for name in REPAIRS:
        rows.append(Row(5, name, (kl.get(name.replace(":", "").replace("+", "_"), FAR),) * 3, costs[name]))
    return Table("anchor:2", tuple(rows), "2024-05-01T10:00:00+00:00")


@pytest.fixture
def engine(blobs: KVBlobs) -> SpeakingEngine:
    """What every service here runs on."""
    return SpeakingEngine(blobs)


@asynccontextmanager
async def serving(
    make_service: Make, tmp_path: Path, known: Table | None, **settings: Any
) -> AsyncIterator[MemoryService]:
    """A service that has facts of ana, and finds ``known`` in its cache where there is one."""
    first = make_service()
    await first.start()
    additions = await first.facts.add("ana", [NewFact(text=text) for text in ("red kayak", "green bicycle")])
    assert await first.wait_for_kv("ana", [addition.fact.id for addition in additions]) == []
    assert first.codec is not None
    if known is not None:
        path = result_path(
            tmp_path / "sgl-stateful" / "faithfulness",
            fingerprint=first.codec.fingerprint,
            policy="anchor:2",
            repairs=list(dict.fromkeys((*REPAIRS, settings.get("repair", "none")))),
            questions_at=QUESTIONS_AT,
            conversations=built_in().version,
        )
        write_result(path, known)
    service = make_service(SGL_STATEFUL_CACHE=tmp_path, **({"faithfulness": "floor"} | settings))
    await service.start()
    try:
        yield service
    finally:
        tasks = [*first._tasks.values(), *service._tasks.values()]
        for task in first._tasks.values():
            task.cancel()
        first._threads.close()
        service.close()
        await asyncio.gather(*tasks, return_exceptions=True)


async def decided(service: MemoryService) -> FaithfulnessGate:
    assert service.gate is not None
    async with asyncio.timeout(60):
        while service.gate.state is State.MEASURING:
            await asyncio.sleep(0.005)
    return service.gate


def prepare(service: MemoryService, **params: Any) -> Prepared:
    memory = MemoryParams(**{"owner": "ana", "k": 2, "search": "vector"} | params)
    return service.prepare_ids(memory, head=[], tail=list(b"?\n"), query="red kayak", reserve_tokens=8)


def shown(service: MemoryService, prepared: Prepared) -> dict[str, Any]:
    scheduler = {"tier": "spliced", "spliced_tokens": 9} if isinstance(prepared.directive, Splice) else None
    return service.finish(prepared.report, scheduler, prompt_tokens=40, cached_tokens=9)


async def test_what_is_within_the_target_is_spliced_as_the_settings_say(make_service: Make, tmp_path: Path) -> None:
    async with serving(make_service, tmp_path, table(none=NEAR)) as service:
        assert (await decided(service)).state is State.PASSED
        assert shown(service, prepare(service))["tier"] == "spliced"
        status = (await service.status())["faithfulness"]
        assert {name: status[name] for name in ("state", "target", "chosen", "measured_at", "error")} == {
            "state": "passed",
            "target": "floor",
            "chosen": [{"k": 5, "served": "none", "verdict": "within"}],
            "measured_at": "2024-05-01T10:00:00+00:00",
            "error": None,
        }
        assert len(status["table"]) == 2 + len(REPAIRS)
        json.dumps(status, allow_nan=False)


async def test_a_repair_that_is_needed_is_served_by_default(make_service: Make, tmp_path: Path) -> None:
    async with serving(make_service, tmp_path, table(first4=NEAR, last32=NEAR)) as service:
        gate = await decided(service)
        assert (gate.state, gate.repair(2)) == (State.REPAIRED, "first:4")
        response = shown(service, prepare(service))
        assert (response["tier"], response["repair"]) == ("repaired", "first:4")
        assert response["repaired_share"] == pytest.approx(8 / len("green bicycle\nred kayak\n"), abs=1e-6)
        asked = prepare(service, repair="none")
        assert (shown(service, asked)["tier"], asked.report.repair) == ("spliced", "none")
        status = await service.status()
        assert (status["repair"], status["faithfulness"]["chosen"][0]["served"]) == ("none", "first:4")


@pytest.mark.parametrize(
    ("kl", "said"),
    [
        ({"none": NEAR}, "target floor: met;"),
        ({"first4": NEAR}, "target floor: met, served by default: 5 facts: first:4;"),
        ({}, "target floor: missed, facts are served as text;"),
    ],
    ids=["passed", "repaired", "refused"],
)
async def test_the_log_says_once_what_came_of_it(
    make_service: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, kl: dict[str, float], said: str
) -> None:
    caplog.set_level(logging.INFO, "sgl_stateful.faithfulness.gate")
    async with serving(make_service, tmp_path, table(**kl)) as service:
        await decided(service)
        [line] = [record.message for record in caplog.records if record.name == "sgl_stateful.faithfulness.gate"]
        assert said in line
        assert line.count("\n") == 3 + len(REPAIRS)


async def test_what_the_questions_do_not_decide_is_served_and_called_so(
    make_service: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sgl_stateful.faithfulness.gate")
    unsure = (0.1, 0.1, 0.6)  # 0.27 on the mean, where the floor is 0.2
    rows = [row if row.served != "none" else Row(5, "none", unsure) for row in table().rows]
    async with serving(make_service, tmp_path, Table("anchor:2", tuple(rows), "")) as service:
        gate = await decided(service)
        assert (gate.state, gate.as_dict()["chosen"][0]["verdict"]) == (State.PASSED, "undecided")
        assert "target floor: undecided by so few questions;" in caplog.text


async def test_a_model_that_misses_the_target_is_served_text_and_says_so(
    make_service: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(make_service, tmp_path, table()) as service:
        assert (await decided(service)).state is State.REFUSED
        for params in ({}, {"repair": "first:4"}, {"policy": "anchor:2"}):
            prepared = prepare(service, **params)
            assert prepared.directive is None
            response = shown(service, prepared)
            assert (response["tier"], response["mode"], response["requested_mode"]) == ("text", "text", "splice")
            assert response["reason"] == "faithfulness:floor"
            assert len(response["facts"]) == 2
        assert ByteTokenizer().decode(prepared.token_ids) == "Notes:\ngreen bicycle\nred kayak\n?\n"
        assert (await service.status())["faithfulness"]["chosen"][0]["served"] == "text"
        [said] = [record for record in caplog.records if "facts are served as text" in record.message]
        assert said.levelno == logging.WARNING
        assert "spliced, first:8+last:64" in said.message


async def test_a_number_of_facts_that_misses_the_target_is_served_as_text_alone(
    make_service: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    two, one = table(), table(none=NEAR)  # measured with 2 facts, which is beyond, and with 1
    rows = [replace(row, k=2) for row in two.rows] + [replace(row, k=1) for row in one.rows]
    async with serving(make_service, tmp_path, replace(two, rows=tuple(rows))) as service:
        assert (await decided(service)).state is State.LIMITED
        assert shown(service, prepare(service))["reason"] == "faithfulness:floor"
        assert shown(service, prepare(service, k=1))["tier"] == "spliced"
        assert "missed with some numbers of facts, served by default: 1 facts: none, 2 facts: text;" in caplog.text


async def test_a_refusal_is_no_reason_where_nothing_was_to_be_spliced(make_service: Make, tmp_path: Path) -> None:
    async with serving(make_service, tmp_path, table()) as service:
        await decided(service)
        assert prepare(service, mode="text").report.reason is None
        assert prepare(service, mode="off").report.reason is None
        nothing = service.prepare_ids(
            MemoryParams(owner="bo", k=2), head=[], tail=list(b"?\n"), query="red kayak", reserve_tokens=8
        )
        assert (nothing.report.reason, nothing.report.facts) == (None, [])


@pytest.mark.parametrize(
    ("target", "state"), [("strict", State.REFUSED), ("floor", State.REPAIRED), ("fast", State.PASSED)]
)
async def test_another_target_reads_the_same_table(
    make_service: Make, tmp_path: Path, target: str, state: State
) -> None:
    async with serving(make_service, tmp_path, table(first4=0.15), faithfulness=target) as service:
        gate = await decided(service)
        assert (gate.state, gate.as_dict()["target"]) == (state, target)


@pytest.mark.parametrize(
    ("named", "state", "repair"),
    [("none", State.REFUSED, "none"), ("last:32", State.PASSED, "last:32"), ("last:9", State.REFUSED, "last:9")],
)
async def test_a_repair_that_the_settings_name_is_the_only_one(
    make_service: Make, tmp_path: Path, named: str, state: State, repair: str
) -> None:
    measured = table(first4=NEAR, last32=NEAR)
    if named == "last:9":
        measured = Table(measured.policy, (*measured.rows, Row(5, named, (FAR,) * 3, 0.05)), measured.measured_at)
    async with serving(make_service, tmp_path, measured, repair=named) as service:
        gate = await decided(service)
        assert (gate.state, gate.repair(2)) == (state, repair)


async def test_nothing_is_measured_where_it_is_off(make_service: Make, tmp_path: Path, engine: SpeakingEngine) -> None:
    async with serving(make_service, tmp_path, table(), faithfulness="off") as service:
        before = len(engine.sent)
        await asyncio.sleep(0.6)
        assert service.gate is not None
        assert (service.gate.state, service.gate.refusal(2), len(engine.sent)) == (State.OFF, None, before)
        assert shown(service, prepare(service))["tier"] == "spliced"
        assert (await service.status())["faithfulness"]["state"] == "off"


async def test_until_it_is_known_facts_are_served_as_the_settings_say(
    make_service: Make, tmp_path: Path, engine: SpeakingEngine
) -> None:
    engine.foreground = 1  # so that the server is never idle
    async with serving(make_service, tmp_path, None) as service:
        assert shown(service, prepare(service))["tier"] == "spliced"
        status = (await service.status())["faithfulness"]
        assert (status["state"], status["chosen"], status["table"]) == ("measuring", None, [])


async def test_new_weights_are_measured_anew_and_their_result_is_not_kept(
    make_service: Make, tmp_path: Path, engine: SpeakingEngine
) -> None:
    async with serving(make_service, tmp_path, table()) as service:
        assert (await decided(service)).state is State.REFUSED
        engine.foreground = 1
        await service.weights_changed()
        assert service.gate is not None
        assert (service.gate.state, service.gate.refusal(2)) == (State.MEASURING, None)
        assert service.gate._folder is None


# ---- measuring ----


SMALL: dict[str, Any] = {"questions_at": {2: 3}, "repairs": ("none", "first:4")}


@asynccontextmanager
async def idle_service(make_service: Make, **settings: Any) -> AsyncIterator[MemoryService]:
    """A service whose own gate is off."""
    service = make_service(**settings)
    await service.start()
    try:
        yield service
    finally:
        tasks = list(service._tasks.values())
        service.close()
        await asyncio.gather(*tasks, return_exceptions=True)


def gate_of(service: MemoryService, folder: Path | None, target: Target = Target.FAST) -> FaithfulnessGate:
    assert service.gate is not None
    subject = service.gate._subject
    return FaithfulnessGate(subject, target=target, repair="none", is_repair_named=False, folder=folder, **SMALL)


async def test_what_was_measured_is_found_again(make_service: Make, engine: SpeakingEngine, tmp_path: Path) -> None:
    async with idle_service(make_service) as service:
        gate = gate_of(service, tmp_path)
        await gate.run()
        measured = gate.as_dict()
        assert [(row["k"], row["served"], row["questions"]) for row in measured["table"]] == [
            (2, name, 3) for name in (WITHOUT, FLOOR, "none", "first:4")
        ]
        sent = len(engine.sent)
        again = gate_of(service, tmp_path)
        await again.run()
        assert again.as_dict() == measured
        assert len(engine.sent) == sent
        assert len(list(tmp_path.glob("*.json"))) == 1


async def test_a_measurement_that_fails_is_told_and_tried_again(
    make_service: Make,
    engine: SpeakingEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(gate_module, "_RETRY_AFTER_S", 0.2)
    async with idle_service(make_service) as service:
        gate = gate_of(service, tmp_path)
        engine.tier = "text"
        task = asyncio.create_task(gate.run())
        async with asyncio.timeout(60):
            while (error := gate.as_dict()["error"]) is None:
                await asyncio.sleep(0.005)
        assert "were not spliced" in error
        assert gate.state is State.MEASURING
        engine.tier = "spliced"
        await task
        assert gate.as_dict()["error"] is None
        assert gate.state is not State.MEASURING
        assert "measuring faithfulness failed" in caplog.text


async def test_a_result_without_what_did_not_fit_is_not_kept(make_service: Make, tmp_path: Path) -> None:
    async with idle_service(make_service, context_len=1500) as service:
        assert service.gate is not None
        gate = FaithfulnessGate(
            service.gate._subject,
            target=Target.FAST,
            repair="none",
            is_repair_named=False,
            folder=tmp_path,
            questions_at={2: 1, 50: 1},
            repairs=("none",),
        )
        await gate.run()
        assert gate.as_dict()["not_measured"] == [50]
        assert list(tmp_path.glob("*.json")) == []
