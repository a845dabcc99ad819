import asyncio
import math
from collections.abc import Mapping, Sequence

import pytest
from speaking_engine import SpeakingEngine, Spoken
from words import ByteTokenizer

from memstore import KVBlobs
from sgl_stateful.directive import Capture, Splice
from sgl_stateful.encoding import parse_ladder
from sgl_stateful.encoding.codec import FactCodec
from sgl_stateful.errors import UnverifiedSplice
from sgl_stateful.faithfulness.conversations import OWNER, built_in
from sgl_stateful.faithfulness.measure import ORDERS, Subject, measure
from sgl_stateful.faithfulness.table import FLOOR, WITHOUT, Table
from sgl_stateful.idle import IdleTime, ServerClosing
from sgl_stateful.planner import PromptPlanner
from sgl_stateful.prompt import render_fact
from sgl_stateful.repair import parse_repair

pytestmark = pytest.mark.anyio

HEAD, HEADER, TAIL = "<user>\n", "Notes:\n", "<assistant>\n"
SET = built_in()
ROOM = 30_000


@pytest.fixture
def speaking(blobs: KVBlobs) -> SpeakingEngine:
    return SpeakingEngine(blobs)


def subject(engine: SpeakingEngine, blobs: KVBlobs, *, max_tokens: int = ROOM) -> Subject:
    codec = FactCodec(ByteTokenizer(), context=tuple(f"{HEAD}{HEADER}".encode()), model_fingerprint="m")
    return Subject(
        engine=engine,
        blobs=blobs,
        codec=codec,
        planner=PromptPlanner(codec=codec, blobs=blobs, header=HEADER, footer="", max_tokens=ROOM),
        ladder=parse_ladder("ladder:0+4"),
        head=list(HEAD.encode()),
        tail=TAIL,
        salt="salt",
        max_tokens=max_tokens,
    )


async def measured(
    engine: SpeakingEngine,
    blobs: KVBlobs,
    questions_at: Mapping[int, int],
    repairs: Sequence[str] = ("none",),
    max_tokens: int = ROOM,
) -> Table:
    return await measure(
        subject(engine, blobs, max_tokens=max_tokens),
        SET,
        questions_at=questions_at,
        repairs=[parse_repair(name) for name in repairs],
        idle=IdleTime(engine, idle_s=0.01),
    )


def prompt(question: int, k: int) -> str:
    facts = SET.facts_for(SET.questions[question], k)
    return f"{HEAD}{HEADER}{''.join(map(render_fact, facts))}{SET.questions[question].text}{TAIL}"


def kl(first: Spoken, second: Spoken) -> float:
    """Of whole distributions."""
    return sum(math.exp(p) * (p - second.log_probs[token]) for token, p in first.log_probs.items())


def lines(spoken: Spoken) -> list[str]:
    return ByteTokenizer().decode(spoken.token_ids).splitlines()


async def test_every_row_is_the_divergence_from_full_prefill_of_the_same_ids(
    speaking: SpeakingEngine, blobs: KVBlobs
) -> None:
    table = await measured(speaking, blobs, {2: 2, 5: 3}, ("none", "first:4"))
    assert (table.policy, table.sizes, table.repairs, table.skipped) == ("ladder:0+4", [2, 5], ["none", "first:4"], ())
    for k, count in ((2, 2), (5, 3)):
        assert {len(table.row(k, name).kl) for name in (WITHOUT, FLOOR, "none", "first:4")} == {count}
        for number in range(count):
            ids = tuple(prompt(number, k).encode())
            [full] = [s for s in speaking.spoken if s.token_ids == ids and s.directive is None]
            whole, repaired = [s for s in speaking.spoken if s.token_ids == ids and s.directive is not None]
            assert table.row(k, "none").kl[number] == pytest.approx(kl(full, whole), abs=1e-9)
            assert table.row(k, "first:4").kl[number] == pytest.approx(kl(full, repaired), abs=1e-9)
            [without] = [s for s in speaking.spoken if lines(s)[1:] == [f"{SET.questions[number].text}{TAIL.strip()}"]]
            assert table.row(k, WITHOUT).kl[number] == pytest.approx(kl(full, without), abs=1e-9)
            others = [s for s in speaking.spoken if sorted(lines(s)) == sorted(lines(full)) and s.token_ids != ids]
            assert len(others) == ORDERS
            floor = sum(kl(full, other) for other in others) / len(others)
            assert table.row(k, FLOOR).kl[number] == pytest.approx(floor, abs=1e-9)
    assert min(table.row(5, "none").kl) > 0


async def test_the_share_that_a_repair_computes_anew(speaking: SpeakingEngine, blobs: KVBlobs) -> None:
    table = await measured(speaking, blobs, {5: 2}, ("none", "first:4", "last:10"))
    tokens = [sum(len(render_fact(fact)) for fact in SET.facts_for(question, 5)) for question in SET.questions[:2]]
    assert table.row(5, "none").recomputed == 0
    assert table.row(5, "first:4").recomputed == pytest.approx(sum(20 / n for n in tokens) / 2, abs=1e-6)
    assert table.row(5, "last:10").recomputed == pytest.approx(sum(10 / n for n in tokens) / 2, abs=1e-6)


async def test_facts_are_spliced_from_the_rung_of_their_rank(speaking: SpeakingEngine, blobs: KVBlobs) -> None:
    await measured(speaking, blobs, {5: 1})
    encodings = {
        item.span.encoding_id: item.encoding
        for sent in speaking.captures
        if isinstance(sent.directive, Capture)
        for item in sent.directive.items
    }
    assert len(encodings) == 2 * 72
    [splice] = [s.directive for s in speaking.spoken if isinstance(s.directive, Splice)]
    assert [encodings[span.encoding_id]["policy"] for span in splice.spans] == ["window:0"] + 4 * ["anchor:4"]
    facts = [fact.id for fact in SET.facts_for(SET.questions[0], 5)]
    assert [encodings[span.encoding_id]["fact_id"] for span in splice.spans] == facts


async def test_nothing_of_it_is_left_and_no_caller_can_reach_it(speaking: SpeakingEngine, blobs: KVBlobs) -> None:
    await measured(speaking, blobs, {5: 1})
    assert blobs.stats().encodings == 0
    assert blobs.anchors(OWNER, "anchor:4") == ()
    assert speaking.controls[-1] == ("sweep", {})
    assert {s.salt for s in speaking.spoken if s.directive is None} == {"salt:exact"}
    assert {s.salt for s in speaking.spoken if s.directive is not None} == {"salt:spliced"}
    assert {sent.salt for sent in speaking.sent} == {"salt", "salt:exact", "salt:spliced"}


@pytest.mark.parametrize(("max_tokens", "skipped"), [(3000, (50,)), (900, (20, 50)), (100, (5, 20, 50))])
async def test_what_does_not_fit_is_left_out_and_named(
    speaking: SpeakingEngine, blobs: KVBlobs, max_tokens: int, skipped: tuple[int, ...]
) -> None:
    """A fact has about 110 bytes."""
    table = await measured(speaking, blobs, {5: 1, 20: 1, 50: 1}, max_tokens=max_tokens)
    assert table.skipped == skipped
    assert table.sizes == [k for k in (5, 20, 50) if k not in skipped]


async def test_a_prompt_that_is_not_spliced_ends_it_and_the_next_one_clears_up(
    speaking: SpeakingEngine, blobs: KVBlobs
) -> None:
    speaking.tier = "text"
    with pytest.raises(UnverifiedSplice, match="5 facts of the built-in set were not spliced"):
        await measured(speaking, blobs, {5: 1})
    assert blobs.stats().encodings == 2 * 72
    speaking.tier = "spliced"
    before = len(speaking.captures)
    await measured(speaking, blobs, {5: 1})
    assert len(speaking.captures) == 2 * before, "nothing of the first one is used"
    assert blobs.stats().encodings == 0


async def test_callers_come_first(speaking: SpeakingEngine, blobs: KVBlobs) -> None:
    speaking.foreground = 1
    task = asyncio.create_task(measured(speaking, blobs, {5: 1}))
    await asyncio.sleep(0.1)
    assert speaking.sent == []
    speaking.foreground = 0
    async with asyncio.timeout(30):
        while not speaking.spoken:
            await asyncio.sleep(0.001)
    speaking.foreground = 1
    await asyncio.sleep(0.1)
    begun = len(speaking.sent)
    await asyncio.sleep(0.1)
    assert len(speaking.sent) == begun
    speaking.foreground = 0
    assert (await task).sizes == [5]


async def test_a_server_that_shuts_down_ends_it(speaking: SpeakingEngine, blobs: KVBlobs) -> None:
    speaking.closing = True
    with pytest.raises(ServerClosing):
        await measured(speaking, blobs, {5: 1})
    assert speaking.sent == []
