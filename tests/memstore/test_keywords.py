"""Keyword search against BM25 worked out from its formula, and queries that must not be read as FTS5 syntax."""

import math
import threading
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.search.keywords import MAX_QUERY_TERMS, KeywordIndex


@pytest.fixture
def index() -> Iterator[KeywordIndex]:
    opened = KeywordIndex()
    yield opened
    opened.close()


def found(index: KeywordIndex, query: str, k: int = 50) -> set[int]:
    return {seq for seq, _ in index.search(query, k)}


def bm25(query: str, documents: Mapping[int, str]) -> dict[int, float]:
    """Robertson and Zaragoza 2009, for words that no stemmer changes and queries without repetition."""
    words = {seq: text.split() for seq, text in documents.items()}
    mean_length = sum(map(len, words.values())) / max(1, len(words))
    scores: dict[int, float] = {}
    for term in query.split():
        holding = [seq for seq in words if term in words[seq]]
        odds = (len(words) - len(holding) + 0.5) / (len(holding) + 0.5)
        weight = math.log(odds) if odds > 1 else 1e-6
        for seq in holding:
            count, length = words[seq].count(term), len(words[seq])
            share = count * (1.2 + 1) / (count + 1.2 * (1 - 0.75 + 0.75 * length / mean_length))
            scores[seq] = scores.get(seq, 0.0) + weight * share
    return {seq: x / (1 + x) for seq, x in scores.items()}


def test_a_score_worked_out_by_hand(index: KeywordIndex) -> None:
    index.add([1, 2, 3, 4], ["red fox", "red dog dog", "cat", "cat bird"])
    # Four facts of 8 words, 2 each; "dog" is in one: ln(3.5 / 1.5). It is there twice, in a fact of 3 words.
    x = math.log(3.5 / 1.5) * 2 * 2.2 / (2 + 1.2 * (0.25 + 0.75 * 3 / 2))
    assert x == pytest.approx(1.0214, abs=1e-4)
    assert index.search("dog", 5) == [(2, pytest.approx(x / (1 + x), rel=1e-12))]


WORDS = st.sampled_from(["ant", "bat", "cow", "dog", "elk", "fox", "zz9"])
TEXTS = st.lists(WORDS, min_size=1, max_size=8).map(" ".join)


@settings(max_examples=150, deadline=None)
@given(
    batches=st.lists(st.dictionaries(st.integers(1, 12), TEXTS, max_size=8), max_size=4),
    removed=st.sets(st.integers(1, 14)),
    query=st.lists(WORDS, min_size=1, unique=True).map(" ".join),
    k=st.integers(0, 14),
    allowed=st.none() | st.sets(st.integers(1, 14)),
)
def test_equals_the_formula_whatever_was_added_replaced_and_removed(
    batches: list[dict[int, str]], removed: set[int], query: str, k: int, allowed: set[int] | None
) -> None:
    index = KeywordIndex()
    documents: dict[int, str] = {}
    for batch in batches:
        index.add(list(batch), list(batch.values()))
        documents |= batch
    index.remove(sorted(removed))
    documents = {seq: text for seq, text in documents.items() if seq not in removed}
    assert len(index) == len(documents)
    expected = bm25(query, documents)
    if allowed is not None:
        expected = {seq: score for seq, score in expected.items() if seq in allowed}
    got = index.search(query, k, allowed=None if allowed is None else np.array(sorted(allowed), dtype=np.int64))
    index.close()
    assert len(got) == min(k, len(expected))
    assert [score for _, score in got] == pytest.approx(sorted(expected.values(), reverse=True)[:k], rel=1e-9)
    assert dict(got) == pytest.approx({seq: expected[seq] for seq, _ in got}, rel=1e-9)


def test_ties_come_by_seq_also_at_the_edge(index: KeywordIndex) -> None:
    index.add([40, 10, 30, 20, 50], ["blue whale"] * 4 + ["grey seal"])
    for k in range(6):
        assert [seq for seq, _ in index.search("whale", k)] == [10, 20, 30, 40][:k]


def test_what_is_allowed_is_sorted_out_before_the_top_k(index: KeywordIndex) -> None:
    index.add(range(100), ["pear pear"] * 99 + ["a pear and many other words"])
    assert [seq for seq, _ in index.search("pear", 1, allowed=np.array([99]))] == [99]
    assert [seq for seq, _ in index.search("pear", 3, allowed=np.array([5, 7, 200]))] == [5, 7]
    assert index.search("pear", 3, allowed=np.array([], dtype=np.int64)) == []


def test_the_last_of_one_batch_counts_and_a_replaced_text_is_gone(index: KeywordIndex) -> None:
    index.add([7, 8, 7], ["apple", "plum", "quince"])
    assert len(index) == 2
    assert found(index, "quince") == {7}
    assert found(index, "apple") == set()
    index.add([8], ["grape"])
    assert found(index, "plum") == set()
    index.remove([8, 99])
    assert len(index) == 1
    assert found(index, "grape") == set()


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("painted", "She likes painting."),
        ("CAFE", "the Café on the corner"),
        ("cafe\u0301", "café"),
        ("Caroline’s dog", "Caroline went home"),
        ("caroline", "it was Caroline's"),
        ("ABC", "ＡＢＣ"),
        ("(state-of-the-art)", "an art"),
        ("tea/coffee", "coffee"),
        ("don't", "I don’t know"),
        ("key🔑", "the key"),
        ("नमस्ते", "नमस्ते दुनिया"),
    ],
)
def test_finds_a_word_in_another_form(index: KeywordIndex, query: str, text: str) -> None:
    index.add([1, 2], [text, "nothing alike"])
    assert found(index, query) == {1}


def test_an_apostrophe_makes_a_phrase_and_not_two_words(index: KeywordIndex) -> None:
    index.add([1, 2, 3], ["Don has a t shirt", "they don't mind", "O'Brien"])
    assert found(index, "don't") == {2}
    assert found(index, "O’Brien") == {3}


def test_finds_japanese_words_inside_an_unspaced_run(index: KeywordIndex) -> None:
    index.add(
        [1, 2, 3, 4],
        ["昨日は東京タワーへ行きました。", "京都の東にある山", "鍵 🔑 café", "서울에서 만나요"],
    )
    assert found(index, "東京") == {1}
    assert found(index, "タワー") == {1}
    assert found(index, "ﾀﾜｰ") == {1}, "half-width kana"
    assert found(index, "東京タワーはどこですか") == {1}
    assert found(index, "鍵") == {3}
    assert found(index, "서울") == {4}
    assert [seq for seq, _ in index.search("京都の山", 5)] == [2]


def test_voiced_kana_are_other_letters(index: KeywordIndex) -> None:
    index.add([1], ["かき"])
    assert found(index, "がき") == set()


SYNTAX = [
    '"', '""', '"unclosed', "'", "*", "fox*", "^fox", "fox AND", "AND", "OR", "NOT", "NEAR", "NEAR(fox dog, 2)",
    "text:fox", "facts", "-fox", "- fox", "{text}: fox", "(fox", ")", "fox)", "+", "fox + dog", "fox\0dog", "\0",
    "\ud800", "fox;DROP TABLE facts", "%", "?", "\\", "", " ", "\n", "🔑", "❤️", "👨‍👩‍👧", "\u0301", "’", "fox'", "''''",
]  # fmt: skip


@pytest.mark.parametrize("query", SYNTAX)
def test_nothing_in_a_query_is_an_operator(index: KeywordIndex, query: str) -> None:
    index.add([1, 2, 3], ["the quick fox", "a lazy dog", "facts text near and or not"])
    expected = {
        seq
        for seq, words in ((1, {"fox", "quick"}), (2, {"dog"}), (3, {"facts", "text", "near", "and", "or", "not"}))
        if words & set("".join(c.lower() if c.isalpha() else " " for c in query).split())
    }
    assert found(index, query) == expected


@settings(max_examples=200, deadline=None)
@given(text=st.text() | st.text(alphabet='"*^()-:+{} ANDORTE\0', max_size=30), query=st.text())
def test_any_text_is_a_document_and_a_query(text: str, query: str) -> None:
    index = KeywordIndex()
    index.add([1], [text])
    assert index.search(query, 0) == []
    for asked in (text, query):
        assert all(seq == 1 and 0 <= score < 1 for seq, score in index.search(asked, 5))
    index.close()


def test_a_query_of_ten_thousand_words_is_its_rarest(index: KeywordIndex) -> None:
    common = [f"common{number}" for number in range(MAX_QUERY_TERMS)]
    index.add([1, 2, 3], [" ".join(common), " ".join(common), "needles"])
    absent = [f"absent{number}" for number in range(10_000)]
    query = " ".join([*common, *absent, "needle", "needle"])
    assert [seq for seq, _ in index.search(query, 3)] == [3, 1, 2]
    assert index.search(" ".join(absent), 3) == []


def test_a_repeated_word_counts_once(index: KeywordIndex) -> None:
    index.add([1, 2, 3], ["fox", "dog", "owl"])
    assert index.search("fox Fox FOX dog", 3) == index.search("fox dog", 3)


def test_owners_do_not_share_statistics(index: KeywordIndex) -> None:
    index.add([1, 2, 3], ["fox", "dog", "owl"])
    before = index.search("fox", 3)
    other = KeywordIndex()
    other.add(range(10, 30), ["fox"] * 20)
    assert index.search("fox", 3) == before
    other.close()


def test_threads_take_turns_under_one_lock(index: KeywordIndex) -> None:
    lock = threading.Lock()

    def work(first: int) -> None:
        for seq in range(first, first + 25):
            with lock:
                index.add([seq], [f"fox number{seq}"])
                assert found(index, f"number{seq}") == {seq}

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(index) == 100
    assert len(index.search("fox", 1000)) == 100
