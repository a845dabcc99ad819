from math import exp

import pytest

from locomo.scoring.mem0 import mem0_bleu1, mem0_f1
from locomo.scoring.official import token_f1


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        ("The cat sat.", "the CAT!", 0.8),  # {the, cat, sat} and {the, cat}: 2 * 2 / 5
        ("cat cat dog", "cat", 2 / 3),  # a set: {cat, dog}
        ("running", "runs", 0.0),  # no stems
        ("well-known", "well known", 0.0),  # only . , ! ? divide words
        ("a,b", "b a", 1.0),
        ("", "b", 0.0),
        ("?!", "?!", 0.0),
    ],
)
def test_f1_over_sets_of_words(prediction: str, gold: str, score: float) -> None:
    assert mem0_f1(prediction, gold) == pytest.approx(score)
    assert mem0_f1(gold, prediction) == pytest.approx(score)


def test_it_is_not_the_official_f1() -> None:
    assert token_f1("She runs", "she was running") != mem0_f1("She runs", "she was running")


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        ("the the the cat", "The cat sat down", 0.5),  # clipped: one "the" and "cat" of four; as long as the gold
        ("rome", "rome italy", exp(1 - 2 / 1)),  # precision 1, brevity penalty
        ("It's green.", "it is green", 0.5),  # it 's green .: two of four, longer than the gold
        ("rome", "paris", 0.0),
        ("", "paris", 0.0),
        ("rome", " ", 0.0),
        ("He left. She stayed.", "he left . she stayed .", 1.0),  # full stops of inner sentences are tokens too
        ("At 3.50 each", "at 3.50 each", 1.0),
    ],
)
def test_bleu1(prediction: str, gold: str, score: float) -> None:
    assert mem0_bleu1(prediction, gold) == pytest.approx(score)


def test_an_abbreviation_ends_a_sentence_here() -> None:
    # dr . smith against dr smith: two of three. With the trained model "dr." would be one token, and the score 0.5.
    assert mem0_bleu1("dr. smith", "dr smith") == pytest.approx(2 / 3)
