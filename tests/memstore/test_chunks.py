"""Windows of long texts: they fit, hold everything, and are found by what stands at the very end (case M15)."""

import re
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memstore import SentenceTransformerEmbedder
from memstore.search.chunks import split_for_embedding

CountTokens = Callable[[str], int]


def words(text: str) -> int:
    return len(text.split())


def pieces(text: str) -> int:
    """Like WordPiece: two special tokens, and one for every 4 letters of a word or part of it."""
    return 2 + sum(-(-len(word) // 4) for word in text.split())


def utf8(text: str) -> int:
    return 2 + len(text.encode(errors="surrogatepass"))


def places(text: str, windows: list[str]) -> list[tuple[int, int]]:
    """Return the half-open ranges of `text` that are the windows, each beginning behind the one before."""
    found, start = [], -1
    for window in windows:
        start = text.find(window, start + 1)
        assert start >= 0, window
        found.append((start, start + len(window)))
    return found


def covered(text: str, windows: list[str]) -> bool:
    ranges = places(text, windows)
    joined = all(left[1] >= right[0] for left, right in pairwise(ranges))
    return joined and ranges[0][0] == 0 and ranges[-1][1] == len(text)


def numbered(count: int) -> str:
    return " ".join(f"word{number:05}" for number in range(count))


@pytest.mark.parametrize("text", ["", " ", "one two three"])
def test_what_fits_is_left_alone(text: str) -> None:
    assert split_for_embedding(text, max_tokens=3, count_tokens=words) == [text]


def test_windows_are_cut_at_spaces_and_overlap_by_about_15_percent() -> None:
    text = numbered(1000)
    windows = split_for_embedding(text, max_tokens=100, count_tokens=words)
    ranges = places(text, windows)
    assert covered(text, windows)
    assert max(map(words, windows)) <= 100
    assert min(map(words, windows[:-1])) >= 75
    assert all(re.fullmatch(r"(word\d{5} ?)+", window) for window in windows), "no word is cut"
    for left, right in pairwise(ranges):
        assert 0.10 <= (left[1] - right[0]) / (left[1] - left[0]) <= 0.16


def test_a_cut_prefers_the_end_of_a_sentence() -> None:
    text = " ".join(f"This is sentence {number}, and it costs 3.50 today." for number in range(200))
    windows = split_for_embedding(text, max_tokens=100, count_tokens=words)
    assert covered(text, windows)
    assert all(window.endswith("today. ") for window in windows[:-1])


def test_a_word_without_end_is_cut_inside() -> None:
    text = "short " + "x" * 5000 + " end"
    windows = split_for_embedding(text, max_tokens=64, count_tokens=pieces)
    assert covered_by_length(text, windows)
    assert max(map(pieces, windows)) <= 64


def covered_by_length(text: str, windows: list[str]) -> bool:
    """For a text that repeats itself, where a window's place is not known."""
    return windows[0] == text[: len(windows[0])] and windows[-1] == text[-len(windows[-1]) :] and all(windows)


@pytest.mark.parametrize("character", ["e\u0301\u0323", "👍🏽", "👩\u200d🚀", "❤\ufe0f", "नि"])
def test_a_character_keeps_its_marks(character: str) -> None:
    text = character * 300
    windows = split_for_embedding(text, max_tokens=50, count_tokens=utf8)
    assert all(window == character * (len(window) // len(character)) for window in windows)
    assert max(map(utf8, windows)) <= 50


def test_a_character_with_more_marks_than_fit_is_cut_all_the_same() -> None:
    text = "e" + "\u0301" * 500
    windows = split_for_embedding(text, max_tokens=20, count_tokens=utf8)
    assert max(map(utf8, windows)) <= 20
    assert covered_by_length(text, windows)


def test_a_limit_without_room_for_a_character_is_refused() -> None:
    with pytest.raises(ValueError, match="limit of 3 tokens leaves no room for '鍵'"):
        split_for_embedding("鍵鍵", max_tokens=3, count_tokens=utf8)


def test_few_counts() -> None:
    text = numbered(10_000)
    counted: list[int] = []

    def count(part: str) -> int:
        counted.append(len(part))
        return words(part)

    windows = split_for_embedding(text, max_tokens=256, count_tokens=count)
    assert covered(text, windows)
    assert len(windows) < 10_000 / 256 / 0.7
    assert len(counted) < 3 * len(windows)
    assert sum(counted) < 5 * len(text)


@pytest.mark.parametrize("count_tokens", [words, pieces, utf8])
@settings(max_examples=120, deadline=None)
@given(
    text=st.text(max_size=400)
    | st.text(alphabet="ab .\n\u0301。", max_size=400)
    | st.text(alphabet="a ", max_size=200),
    max_tokens=st.integers(6, 40),
)
@example(text="a" * 300 + "鍵" * 100 + " " * 100 + "b" * 100, max_tokens=6)
def test_every_window_fits_and_nothing_is_lost(count_tokens: CountTokens, text: str, max_tokens: int) -> None:
    windows = split_for_embedding(text, max_tokens=max_tokens, count_tokens=count_tokens)
    assert all(count_tokens(window) <= max_tokens for window in windows)
    # As far left as possible is where the window may be, so that a gap is a gap wherever it is.
    assert all(windows) or windows == [text]
    reach = 0
    for window in windows:
        place = max(text.rfind(window, 0, reach + len(window)), 0)
        assert text[place : place + len(window)] == window
        assert place <= reach
        reach = max(reach, place + len(window))
    assert reach == len(text)


def test_words_at_the_very_end_are_found(minilm: SentenceTransformerEmbedder) -> None:
    filler = "The weather report for the northern districts was read aloud again before lunch was served. "
    text = filler * 40 + "Her cello teacher in Lisbon is called Benedita."
    assert minilm.count_tokens(text) > 2 * minilm.max_tokens
    windows = split_for_embedding(text, max_tokens=minilm.max_tokens, count_tokens=minilm.count_tokens)
    assert max(map(minilm.count_tokens, windows)) <= minilm.max_tokens
    assert covered_by_length(text, windows)
    query, whole, *parts = minilm.embed(["Who teaches the cello in Lisbon?", text, *windows])
    scores = [float(query @ part) for part in parts]
    assert scores.index(max(scores)) == len(windows) - 1
    assert scores[-1] > float(query @ whole) + 0.1


def test_ten_thousand_tokens_of_a_real_tokenizer(minilm: SentenceTransformerEmbedder) -> None:
    text = "A 鍵 🔑 and a café, unbelievably: 12,345.67 keys! " * 500
    counted: list[int] = []

    def count(part: str) -> int:
        counted.append(minilm.count_tokens(part))
        return counted[-1]

    assert minilm.count_tokens(text) > 8_000
    windows = split_for_embedding(text, max_tokens=minilm.max_tokens, count_tokens=count)
    assert max(map(minilm.count_tokens, windows)) <= minilm.max_tokens
    assert len(counted) < 3 * len(windows)
