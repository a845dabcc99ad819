"""What is searched of a fact: its line, in vectors and words, wherever a fact is embedded or indexed."""

import io
import json
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from cli_runs import CommandLine

from memstore import EmbedderMismatch, MemStore, MemStoreSettings, NewFact, reindex, verify
from memstore.embedding import Vectors, unit_rows
from memstore.location import open_records
from memstore.records import Batch, Draft
from memstore.searchable import line_of
from memstore.transfer.export import export_facts
from memstore.transfer.foreign import import_foreign, read_locomo
from memstore.transfer.importing import import_facts
from memstore.types import OwnerId

ANA = OwnerId("ana")
VOCABULARY = ("friday", "sunday", "ana", "eva", "red", "door", "blue", "locker")
FORM = ":time+speaker+text"


class WordEmbedder:
    """One direction for each word of `VOCABULARY`, and one for all others: cosines can be worked out by hand."""

    dimension = len(VOCABULARY) + 1
    fingerprint = "words"

    def __init__(self, max_tokens: int = 1000) -> None:
        self.max_tokens = max_tokens
        self.embedded: list[str] = []

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def embed(self, texts: Sequence[str]) -> Vectors:
        self.embedded += texts
        counts = np.zeros((len(texts), self.dimension))
        for row, text in enumerate(texts):
            for word in re.findall(r"\w+", text.lower()):
                counts[row, VOCABULARY.index(word) if word in VOCABULARY else -1] += 1
        return unit_rows(counts, rows=len(texts), dimension=self.dimension)


@pytest.fixture
def words() -> WordEmbedder:
    return WordEmbedder()


@pytest.fixture
def spoken(location: str, words: WordEmbedder) -> Iterator[MemStore]:
    with MemStore(location, embedder=words) as store:
        yield store


def score(store: MemStore, query: str) -> float:
    """Of the owner's only fact."""
    [hit] = store.search("ana", query, k=9)
    return hit.score


def has_words(store: MemStore, query: str) -> bool:
    return bool(store.search("ana", query, k=9, mode="keyword"))


@pytest.mark.parametrize(
    ("fact", "prefix"),
    [
        (NewFact("I moved."), ""),
        (NewFact("I moved.", speaker="Ana"), "Ana: "),
        (NewFact("I moved.", time="8 May, 2023"), "(8 May, 2023) "),
        (NewFact("I moved.", "D1", "Ana", "8 May, 2023", {"n": 1}), "(8 May, 2023) Ana: "),
        (NewFact("I moved.", speaker="", time=""), ""),
    ],
)
def test_the_line(fact: NewFact, prefix: str) -> None:
    assert line_of(fact) == (prefix, "I moved.")
    assert str(line_of(fact)) == f"{prefix}I moved."


def test_time_and_speaker_are_searched(spoken: MemStore) -> None:
    spoken.add("ana", "Red door", speaker="Ana", time="Friday")
    # Two and three of the four words, in a vector of length 2.
    assert score(spoken, "red door") == pytest.approx(2 / (2 * 2**0.5))
    assert score(spoken, "Ana's red") == pytest.approx(2 / (2 * 3**0.5))
    assert score(spoken, "Ana red door") == pytest.approx(3 / (2 * 3**0.5))
    assert [has_words(spoken, query) for query in ("Ana", "friday", "doors", "Eva")] == [True, True, True, False]


def test_a_fact_without_them_is_its_text(spoken: MemStore, words: WordEmbedder) -> None:
    spoken.add("ana", "Red door")
    assert words.embedded == ["Red door"]
    assert score(spoken, "red door") == pytest.approx(1)


@pytest.mark.parametrize(
    ("change", "line", "former"),
    [
        ({"speaker": "Eva"}, "(Friday) Eva: red door", "Ana"),
        ({"speaker": None}, "(Friday) red door", "Ana"),
        ({"time": "Sunday"}, "(Sunday) Ana: red door", "Friday"),
        ({"time": None}, "Ana: red door", "Friday"),
    ],
)
def test_a_change_of_speaker_or_time_alone(
    spoken: MemStore, location: str, change: dict[str, str | None], line: str, former: str
) -> None:
    fact = spoken.add("ana", "red door", speaker="Ana", time="Friday")
    with MemStore(location, embedder=WordEmbedder()) as other:
        for store in (spoken, other):
            assert has_words(store, former)
            assert score(store, line) < 0.99
        spoken.update("ana", fact.id, **change)  # type: ignore[arg-type]
        for store in (spoken, other):
            assert not has_words(store, former)
            assert score(store, line) == pytest.approx(1)
    with MemStore(location, embedder=WordEmbedder()) as anew:
        assert not has_words(anew, former)
        assert score(anew, line) == pytest.approx(1)


@pytest.mark.parametrize("change", [{"stream": "D2"}, {"metadata": {"n": 1}}, {"expires_at": 9e9}])
def test_a_change_of_what_is_not_searched_embeds_nothing(
    spoken: MemStore, words: WordEmbedder, change: dict[str, object]
) -> None:
    fact = spoken.add("ana", "red door", speaker="Ana", time="Friday")
    before = len(words.embedded)
    spoken.update("ana", fact.id, **change)  # type: ignore[arg-type]
    assert len(words.embedded) == before
    assert score(spoken, "(Friday) Ana: red door") == pytest.approx(1)


def test_a_speaker_that_moves_into_the_text_is_a_change(location: str) -> None:
    """The line is the same, and yet divided otherwise."""
    embedder = WordEmbedder(max_tokens=4)
    with MemStore(location, embedder=embedder) as store:
        fact = store.add("ana", "red door blue locker", speaker="Ana")
        assert all(part.startswith("Ana: ") for part in embedder.embedded)
        embedder.embedded.clear()
        store.update("ana", fact.id, speaker=None, text="Ana: red door blue locker")
        last = embedder.embedded[-1]
        assert "Ana" not in last
        assert score(store, last) == pytest.approx(1)


def test_a_fact_that_supersedes(spoken: MemStore) -> None:
    old = spoken.add("ana", "red door", speaker="Ana", time="Friday")
    spoken.supersede("ana", old.id, "blue locker", time="Sunday")
    assert score(spoken, "(Sunday) Ana: blue locker") == pytest.approx(1)
    assert not has_words(spoken, "friday")


def test_vectors_made_anew(spoken: MemStore) -> None:
    fact = spoken.add("ana", "red door", speaker="Ana", time="Friday")
    spoken.reembed("ana", [fact])
    assert score(spoken, "(Friday) Ana: red door") == pytest.approx(1)
    assert verify(spoken, repair=False).problems == []


def test_an_import(spoken: MemStore, redis_url: str) -> None:
    spoken.add("ana", "red door", speaker="Ana", time="Friday")
    file = io.BytesIO()
    export_facts(spoken, file)
    file.seek(0)
    with MemStore(f"{redis_url}?prefix=other", embedder=WordEmbedder()) as other:
        assert import_facts(other, file).created == 1
        assert score(other, "(Friday) Ana: red door") == pytest.approx(1)
        assert has_words(other, "Ana")


def test_a_foreign_import(spoken: MemStore) -> None:
    turn = {"speaker": "Ana", "dia_id": "D1:1", "text": "red door"}
    sample = {"sample_id": "ana", "conversation": {"session_1": [turn], "session_1_date_time": "Friday"}}
    import_foreign(spoken, read_locomo(io.BytesIO(json.dumps([sample]).encode())))
    assert score(spoken, "(Friday) Ana: red door") == pytest.approx(1)


# ---- long texts ----


def parts_of(fact: NewFact, location: str, *, max_tokens: int) -> list[str]:
    embedder = WordEmbedder(max_tokens)
    with MemStore(location, embedder=embedder) as store:
        [added] = store.ingest("ana", [fact])
        assert added.chunks == len(embedder.embedded)
    assert all(len(part.split()) <= max_tokens for part in embedder.embedded)
    return embedder.embedded


def test_each_part_of_a_long_text_has_the_prefix(location: str) -> None:
    text = " ".join(f"word{number}" for number in range(50))
    parts = parts_of(NewFact(text, speaker="Ana", time="Friday"), location, max_tokens=12)
    assert len(parts) >= 5
    assert all(part.startswith("(Friday) Ana: word") for part in parts)
    assert {word for part in parts for word in part.split()[2:]} == set(text.split())


def test_a_text_that_fits_only_without_its_prefix_is_divided(location: str) -> None:
    parts = parts_of(NewFact("one two three four five", speaker="Ana"), location, max_tokens=5)
    assert len(parts) == 2
    assert all(part.startswith("Ana: ") for part in parts)


def test_a_prefix_that_leaves_no_room_comes_once(location: str) -> None:
    fact = NewFact("one two three four five six", speaker="a speaker of six words really", time="Friday")
    parts = parts_of(fact, location, max_tokens=8)
    assert parts[0].startswith("(Friday) a speaker of six")
    assert [part for part in parts if "Friday" in part] == parts[:1]
    assert {word for part in parts for word in part.split()} >= set(str(line_of(fact)).split())


# ---- near duplicates ----


def test_what_two_people_say_is_no_duplicate(location: str) -> None:
    settings = MemStoreSettings(near_duplicate_score=0.5)
    with MemStore(location, embedder=WordEmbedder(), settings=settings) as store:
        facts = [
            NewFact("red door", speaker="Ana", time="Friday"),
            NewFact("red door", speaker="Eva", time="Friday"),
            NewFact("red door", time="Friday"),
            NewFact("red door", speaker="Ana", time="Sunday"),
        ]
        friday, eva, nobody, sunday = store.ingest("ana", facts)
    assert (eva.near_duplicates, nobody.near_duplicates) == ((), ())
    three_of_four = pytest.approx(0.75)
    assert friday.near_duplicates == ((sunday.fact, three_of_four, three_of_four),)
    assert sunday.near_duplicates == ((friday.fact, three_of_four, three_of_four),)


def test_a_duplicate_is_found_behind_those_of_other_speakers(location: str) -> None:
    with MemStore(location, embedder=WordEmbedder(), settings=MemStoreSettings(near_duplicate_score=0.8)) as store:
        said = store.add("ana", "red door blue locker", speaker="Eva")
        # To this embedder all of them are one speaker.
        store.add_many("ana", [NewFact("red door blue locker", speaker=f"Speaker{n}") for n in range(10)])
        [added] = store.ingest("ana", [NewFact("Red door, blue locker!", speaker="Eva")])
    assert [hit.fact for hit in added.near_duplicates] == [said]


# ---- stores of an earlier release ----


@pytest.fixture
def old_location(location: str) -> str:
    """A store as earlier releases wrote it: the vectors of the text alone, under the embedder's own fingerprint."""
    embedder, records = WordEmbedder(), open_records(location, MemStoreSettings())
    records.claim_embedder("words")
    fact = NewFact("red door", speaker="Ana", time="Friday")
    draft = Draft(fact, embedder.embed([fact.text]))
    records.apply(ANA, Batch(drafts=[draft]), embedder="words")
    records.close()
    return location


def by_command(location: str) -> None:
    assert CommandLine(location, embedder=WordEmbedder())("reindex").code == 0


def by_call(location: str) -> None:
    records = open_records(location, MemStoreSettings())
    assert reindex(records, WordEmbedder()) == ("words", f"words{FORM}", 1, 1)
    records.close()


@pytest.mark.parametrize("convert", [by_command, by_call])
def test_an_old_store_is_refused_until_its_vectors_are_made_anew(
    old_location: str, convert: Callable[[str], None]
) -> None:
    with pytest.raises(EmbedderMismatch, match="run `memstore reindex`") as caught:
        MemStore(old_location, embedder=WordEmbedder())
    assert (caught.value.stored, caught.value.offered) == ("words", f"words{FORM}")
    convert(old_location)
    with MemStore(old_location, embedder=WordEmbedder()) as store:
        assert score(store, "(Friday) Ana: red door") == pytest.approx(1)
        assert has_words(store, "Ana")
        assert verify(store, repair=False).problems == []
        assert store.records.head(ANA).embedder == f"words{FORM}"
        assert store.records.vectors(ANA, embedder="words", dimension=WordEmbedder.dimension).seqs.tolist() == []


@pytest.mark.parametrize(
    "command", [["facts", "list", "--owner", "ana"], ["facts", "search", "red", "--owner", "ana"], ["verify"]]
)
def test_commands_on_an_old_store_name_the_one_that_converts_it(old_location: str, command: list[str]) -> None:
    run = CommandLine(old_location, embedder=WordEmbedder())(*command)
    assert (run.code, run.stdout) == (5, "")
    assert "run `memstore reindex`" in run.stderr


def test_doctor_and_a_dry_run_on_an_old_store(old_location: str) -> None:
    cli = CommandLine(old_location, embedder=WordEmbedder())
    found = cli("doctor", "--json")
    [finding] = [finding for finding in found.json if finding["subject"] == "embedder"]
    assert (found.code, finding["level"]) == (1, "error")
    assert "run `memstore reindex`" in finding["message"]
    would = {"reindexed": False, "previous": "words", "embedder": f"words{FORM}", "embedded": 1, "facts": 1}
    assert cli("reindex", "--dry-run", "--json").json == would


def test_a_new_store_is_refused_by_an_earlier_release(spoken: MemStore) -> None:
    """Which looks for the embedder's own fingerprint."""
    draft = Draft(NewFact("red door"), WordEmbedder().embed(["red door"]))
    with pytest.raises(EmbedderMismatch):
        spoken.records.apply(ANA, Batch(drafts=[draft]), embedder="words")
