"""The two lexical figures that Mem0 publishes; other formulas than the official F1, so under names of their own.

Tokens of `mem0_bleu1` are those of NLTK's ``word_tokenize``, which finds sentences with a trained model that has to be
downloaded. Here a sentence ends at ``.``, ``!`` or ``?`` before white space. Within a sentence the tokeniser is the
same one, so that the two differ only where the model knows that a full stop in the middle of a text ends no sentence:
after an abbreviation, an initial or an ordinal ("dr. smith" gives ``dr.`` there, ``dr`` and ``.`` here).
"""

from __future__ import annotations

import re

from nltk.tokenize.destructive import NLTKWordTokenizer
from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_PUNCTUATION_TO_SPACE = str.maketrans(dict.fromkeys(".,!?", " "))
_UNIGRAMS = (1, 0, 0, 0)
_words = NLTKWordTokenizer()
_smooth = SmoothingFunction().method1


def mem0_f1(prediction: str, gold: str) -> float:
    """F1 over *sets* of lowercased words, unstemmed, with ``. , ! ?`` as spaces; 0 where either text has no word."""
    predicted, wanted = (set(text.lower().translate(_PUNCTUATION_TO_SPACE).split()) for text in (prediction, gold))
    shared = len(predicted & wanted)
    return 2.0 * shared / (len(predicted) + len(wanted)) if shared else 0.0


def mem0_bleu1(prediction: str, gold: str) -> float:
    """NLTK's sentence BLEU with weights (1, 0, 0, 0) and smoothing method 1, of lowercased tokens; in [0, 1]."""
    predicted, wanted = _tokens(prediction), _tokens(gold)
    if not predicted or not wanted:
        return 0.0
    return float(sentence_bleu([wanted], predicted, weights=_UNIGRAMS, smoothing_function=_smooth))


def _tokens(text: str) -> list[str]:
    return [str(token) for sentence in _SENTENCE_END.split(text.lower().strip()) for token in _words.tokenize(sentence)]
