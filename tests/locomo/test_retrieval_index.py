"""The store below the measurement, on the demo's invented conversation."""

from pathlib import Path

import pytest
from bigrams import BigramEmbedder

from locomo.dataset import demo_conversation_path, load
from locomo.retrieval.index import PLAIN_HYBRID, UnitIndex
from locomo.retrieval.ranking import Asked, MonthBoost, NeighbourBoost, StoreSearch, Thread
from locomo.retrieval.units import Unit, UnitKind, UnitText, units_of
from memstore import MemStore
from memstore.search.mentions import named_months
from memstore.searchable import line_of


@pytest.mark.parametrize("kind", list(UnitKind))
def test_the_store_boosts_as_the_harness_does(kind: UnitKind, tmp_path: Path) -> None:
    [conversation] = load(demo_conversation_path())
    units, owner = units_of(conversation, kind), conversation.sample_id
    dated = 0
    with UnitIndex(tmp_path, BigramEmbedder(), text=UnitText.DATED) as index:
        index.fill(owner, units)
        for question in [q.question for q in conversation.questions] + ["What was there in March 2024, and in May?"]:
            asked = Asked(question, owner, conversation.speakers, Thread(units), index.search)
            added = NeighbourBoost(MonthBoost(StoreSearch(PLAIN_HYBRID), 0.1), 0.2).scores(asked)
            months = named_months(question)
            dated += bool(months)
            # The harness adds; the store divides by the weights.
            expected = {unit: score / (1.2 * (1.1 if months else 1)) for unit, score in added.items()}
            served = asked.found("hybrid")
            assert dict(served) == pytest.approx(expected, abs=1e-9)
            assert [hit.score for hit in served] == sorted((hit.score for hit in served), reverse=True)
    assert dated


def test_a_stream_is_a_thread_or_a_conversation(tmp_path: Path) -> None:
    [conversation] = load(demo_conversation_path())
    units = units_of(conversation, UnitKind.TURNS)
    threads = {str(turn.session) for turn in conversation.turns}
    assert len(threads) > 1
    for one_stream, streams in ((False, threads), (True, {"conv"})):
        with UnitIndex(
            tmp_path / str(one_stream), BigramEmbedder(), text=UnitText.DATED, one_stream=one_stream
        ) as index:
            index.fill("conv", units)
        with MemStore(tmp_path / str(one_stream), embedder=BigramEmbedder()) as store:
            facts = store.list("conv", limit=1000)
        assert {fact.stream for fact in facts} == streams
        assert [fact.metadata["unit"] for fact in facts] == [unit.id for unit in units]


def test_what_is_searched_of_a_unit_is_its_text(tmp_path: Path) -> None:
    when = "9:00 am on 3 May, 2021"
    texts = {
        UnitText.DATED: [f"({when}) Ada: (hello) there", f"({when}) "],
        UnitText.SPOKEN: ["Ada: (hello) there"],
        UnitText.PLAIN: ["(hello) there"],
    }
    for text, held in texts.items():
        units = [Unit(f"D1:{n}", line, "Ada", when, (), "1") for n, line in enumerate(held)]
        with UnitIndex(tmp_path / text, BigramEmbedder(), text=text) as index:
            index.fill("conv", units)
        with MemStore(tmp_path / text, embedder=BigramEmbedder()) as store:
            facts = store.list("conv")
        lines = [str(line_of(fact)) for fact in facts]
        assert lines == ([f"({when}) Ada: (hello) there"] if text is UnitText.PLAIN else held)
        has_time = text is not UnitText.SPOKEN
        assert facts[0].event_at == (1620032400.0 if has_time else None)  # 2021-05-03T09:00:00Z
