"""Files of other programs become facts, or nothing does."""

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from locomo.dataset import load
from memstore import InvalidExport, MemStore, NewFact
from memstore.transfer.foreign import ForeignReport, import_foreign, read_locomo, read_mem0

LOCOMO_DATA = Path(os.environ.get("LOCOMO_DATA", Path(__file__).parents[3] / "shared/data/locomo10.json"))
DEMO = Path(__file__).parents[2] / "eval/locomo/data/demo_conversation.json"


def file_of(content: Any) -> io.BytesIO:
    return io.BytesIO(json.dumps(content).encode())


def memory(number: int = 1, **fields: Any) -> dict[str, Any]:
    return {
        "id": f"m-{number}",
        "memory": f"Ana likes tea number {number}",
        "user_id": "ana",
        "hash": "0cc175b9c0f1b6a831c399e269772661",
        "metadata": None,
        "created_at": "2023-05-08T13:56:00.000000-07:00",
        "updated_at": None,
    } | fields


FULL = memory(
    2,
    memory="  Keeps bees 🐝 ",
    user_id="bo",
    agent_id="helper",
    run_id="run-7",
    metadata={"source": "chat", "n": [1]},
    updated_at="2024-01-01T00:00:00Z",
    categories=["hobbies"],
    score=0.5,
)


def test_memories_of_mem0(store: MemStore) -> None:
    plain = ("ana", NewFact("Ana likes tea number 1", time=memory()["created_at"], metadata={"mem0_id": "m-1"}))
    full = (
        "bo",
        NewFact(
            "  Keeps bees 🐝 ",
            stream="run-7",
            time=memory()["created_at"],
            metadata={
                "source": "chat",
                "n": [1],
                "mem0_id": "m-2",
                "mem0_agent_id": "helper",
                "mem0_updated_at": "2024-01-01T00:00:00Z",
                "mem0_categories": ["hobbies"],
            },
        ),
    )
    assert list(read_mem0(file_of([memory(), FULL]))) == [plain, full]
    assert list(read_mem0(file_of({"results": [memory(), FULL], "relations": []}))) == [plain, full]
    assert list(read_mem0(io.BytesIO(b"\xef\xbb\xbf[]"))) == []
    report = import_foreign(store, read_mem0(file_of([memory(), FULL])))
    assert report == ForeignReport(created=2, already_there=0)
    [fact] = store.list("ana")
    # 13:56 seven hours behind UTC
    assert (fact.time, fact.event_at) == (memory()["created_at"], 1683579360.0)
    position = store.records.last_position()
    assert import_foreign(store, read_mem0(file_of([memory(), FULL, FULL]))) == ForeignReport(0, 3)
    assert store.records.last_position() == position
    nameless = {name: value for name, value in memory(3).items() if name != "user_id"}
    assert import_foreign(store, read_mem0(file_of([nameless])), owner="team") == ForeignReport(1, 0)
    assert store.owners() == ["ana", "bo", "team"]
    with pytest.raises(InvalidExport, match="fact 1: the file does not say whose it is"):
        import_foreign(store, read_mem0(file_of([nameless])))


NOT_MEM0 = {
    "the file is not JSON": b"[",
    "the file is not JSON: 'utf-8'": b'["\xff"]',
    "the file is not JSON: maximum recursion": b"[" * 100_000,
    "this is no Mem0 export": b"{}",
    "this is no Mem0": b'{"results": 5}',
    "memory 2 is not an object": [memory(), "text"],
    "memory 1 has no `memory`": [{"id": "x", "text": "y"}],
    "memory 3: text is empty": [memory(), memory(2), memory(3, memory=" ")],
    "memory 1: text is a NoneType": [memory(memory=None)],
    "memory 1: text holds a NUL": [memory(memory="a\0")],
    "memory 1: text holds a lone surrogate": [memory(memory="\ud800")],
    "memory 1: time is a int": [memory(created_at=1683579360)],
    "memory 1: stream is a list": [memory(run_id=["x"])],
    "the metadata of memory 1 is not an object": [memory(metadata=["x"])],
    "memory 1: metadata is not JSON": [memory(metadata={"x": float("nan")})],
    "fact 2: owner is a int": [memory(), memory(2, user_id=5)],
    "fact 1: owner is empty": [memory(user_id="")],
}


@pytest.mark.parametrize("message", NOT_MEM0)
def test_what_is_not_mem0_is_refused_by_name(store: MemStore, message: str) -> None:
    content = NOT_MEM0[message]
    source = io.BytesIO(content) if isinstance(content, bytes) else file_of(content)
    with pytest.raises(InvalidExport, match="^" + message):
        import_foreign(store, read_mem0(source), batch=1)
    assert store.records.last_position() == 0, "nothing was written"


def turn(dia_id: str, text: str, **extra: Any) -> dict[str, Any]:
    return {"speaker": " Ada", "dia_id": dia_id, "text": text, **extra}


ODD = {
    "sample_id": "odd-1",
    "conversation": {
        "speaker_a": "Ada",
        "speaker_b": "Bo",
        "session_10_date_time": "9:00 am on 3 May, 2021",
        "session_10": [turn("D10:1", "last “curly” \N{HONEYBEE}\n")],
        "session_2_date_time": "1:56 pm on 8 May, 2023",
        "session_2": [
            turn("D2:1", " first ", img_url=["http://x.invalid/a.jpg"], query="never read this"),
            turn("D2:2", "look", blip_caption="a photo of a bee "),
            turn("D2:3", "", blip_caption="a photo of a hive"),
            turn("D2:4", " "),
        ],
        "session_3": [turn("D3:1", "undated")],
        "session_11_date_time": "10:00 am on 4 May, 2021",
    },
    "qa": [{"question": "Where?", "answer": "never read this"}],
}
OTHER = {"sample_id": "odd-2", "conversation": {"session_1": [turn("D1:1", "another conversation")]}}


def test_turns_of_locomo(store: MemStore) -> None:
    date = "1:56 pm on 8 May, 2023"
    wanted = [
        ("odd-1", NewFact("first", "session_2", "Ada", date, {"dia_id": "D2:1"})),
        ("odd-1", NewFact("look [shares a photo of a bee]", "session_2", "Ada", date, {"dia_id": "D2:2"})),
        ("odd-1", NewFact("[shares a photo of a hive]", "session_2", "Ada", date, {"dia_id": "D2:3"})),
        ("odd-1", NewFact("undated", "session_3", "Ada", None, {"dia_id": "D3:1"})),
        ("odd-1", NewFact("last “curly” 🐝", "session_10", "Ada", "9:00 am on 3 May, 2021", {"dia_id": "D10:1"})),
    ]
    assert list(read_locomo(file_of([ODD, OTHER]), "odd-1")) == wanted
    assert list(read_locomo(file_of([ODD, OTHER])))[:5] == wanted
    calls: list[tuple[int, int]] = []
    report = import_foreign(
        store, read_locomo(file_of([ODD, OTHER])), batch=2, on_progress=lambda done, total: calls.append((done, total))
    )
    assert report == ForeignReport(created=6, already_there=0)
    assert calls == [(2, 6), (4, 6), (5, 6), (6, 6)]
    assert [(fact.text, fact.time) for fact in store.list("odd-1")] == [(fact.text, fact.time) for _, fact in wanted]
    # noon and 1:56 pm of that day, in UTC
    assert store.list("odd-1")[0].event_at == 1683547200 + 116 * 60
    assert import_foreign(store, read_locomo(file_of([ODD]), "odd-1"), owner="ada") == ForeignReport(5, 0)


def locomo_with(conversation: Any) -> list[dict[str, Any]]:
    return [OTHER, {"sample_id": "bad", "conversation": conversation}]


NOT_LOCOMO = {
    "this is no LoCoMo file": {"sample_id": "x"},
    "sample 1 is not an object": ["x"],
    "sample 2: `sample_id` is missing": [OTHER, {"conversation": {}}],
    "the conversation of sample 'bad' is not": locomo_with(None),
    "sample 'bad', session_1 is not a list": locomo_with({"session_1": {}}),
    "sample 'bad', session_1, turn 2 is not an object": locomo_with({"session_1": [turn("D1:1", "x"), 5]}),
    "sample 'bad', session_1, turn 1: `text` is missing": locomo_with({"session_1": [{"speaker": "Ada"}]}),
    "sample 'bad', session_1, turn 1: `speaker`": locomo_with({"session_1": [turn("D1:1", "x") | {"speaker": 5}]}),
    "sample 'bad', session_1, turn 1: `dia_id`": locomo_with({"session_1": [turn("D1:1", "x") | {"dia_id": None}]}),
    "sample 'bad', session_1, turn 1: `blip_caption`": locomo_with({"session_1": [turn("D", "x", blip_caption=5)]}),
    "sample 'bad', session_1, turn 1: text holds a NUL": locomo_with({"session_1": [turn("D1:1", "\0")]}),
    "sample 'bad', session_7, turn 1: time is a int": locomo_with(
        {"session_7": [turn("D", "x")], "session_7_date_time": 5}
    ),
}


@pytest.mark.parametrize("message", NOT_LOCOMO)
def test_what_is_not_locomo_is_refused_by_name(store: MemStore, message: str) -> None:
    with pytest.raises(InvalidExport, match="^" + message):
        import_foreign(store, read_locomo(file_of(NOT_LOCOMO[message])), batch=1)
    assert store.records.last_position() == 0, "nothing was written"


def test_an_unknown_conversation_is_named(store: MemStore) -> None:
    with pytest.raises(InvalidExport, match="no sample has the id 'odd-3': there are odd-1, odd-2"):
        import_foreign(store, read_locomo(file_of([ODD, OTHER]), "odd-3"))


def test_the_conversation_that_ships_with_the_harness(store: MemStore) -> None:
    [sample] = json.loads(DEMO.read_bytes())
    turns = sum(len(turns) for key, turns in sample["conversation"].items() if isinstance(turns, list))
    assert import_foreign(store, read_locomo(DEMO)) == ForeignReport(turns, 0)
    assert store.list("demo-1")[0].time == "7:42 pm on 11 January, 2024"


@pytest.mark.locomo
@pytest.mark.skipif(not LOCOMO_DATA.is_file(), reason=f"no LoCoMo file at {LOCOMO_DATA}: set LOCOMO_DATA")
def test_the_published_conversations(store: MemStore) -> None:
    """Case M23: a fact is dated by the session that it is from, not by the day that it was stored."""
    facts = list(read_locomo(LOCOMO_DATA))
    assert len(facts) == 5882
    assert len({owner for owner, _ in facts}) == 10
    assert len({(owner, fact.stream) for owner, fact in facts}) == 272
    assert [(owner, fact.text, fact.speaker, fact.time, fact.metadata["dia_id"]) for owner, fact in facts] == [
        (conversation.sample_id, turn.text, turn.speaker, turn.date_time, turn.dia_id)
        for conversation in load(LOCOMO_DATA)
        for turn in conversation.turns
    ]
    assert import_foreign(store, read_locomo(LOCOMO_DATA, "conv-26")).created == 419
    first = store.list("conv-26", limit=1)[0]
    assert first.metadata == {"dia_id": "D1:1"}
    assert (first.stream, first.time, first.event_at) == ("session_1", "1:56 pm on 8 May, 2023", 1683547200 + 116 * 60)
    found = store.search("conv-26", first.text, k=1, where={"speaker": first.speaker})
    assert found[0].fact == first
    assert len(store.list("conv-26", stream="session_1")) == 18
