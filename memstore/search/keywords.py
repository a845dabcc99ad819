"""Keyword search over the facts of one owner: BM25 on SQLite's FTS5, in memory."""

import json
import re
import sqlite3
import unicodedata
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from memstore.search.vectors import Neighbour

MAX_QUERY_TERMS = 64
"""Words of a query that count. Of a longer query these are the ones that the fewest facts hold."""

_TOKENIZER = "tokenize = 'porter unicode61 remove_diacritics 2'"
_SCHEMA = f"""
CREATE VIRTUAL TABLE facts USING fts5(text, {_TOKENIZER});
CREATE VIRTUAL TABLE vocabulary USING fts5vocab(facts, row);
CREATE VIRTUAL TABLE probe USING fts5(text, {_TOKENIZER});
CREATE VIRTUAL TABLE probe_tokens USING fts5vocab(probe, instance);
"""
# A word's tokens all have to be in the index; what the word then matches is bounded by its rarest token.
_RAREST = """
SELECT probe_tokens.doc FROM probe_tokens LEFT JOIN vocabulary ON vocabulary.term = probe_tokens.term
GROUP BY probe_tokens.doc HAVING count(vocabulary.term) = count(*)
ORDER BY min(vocabulary.doc), probe_tokens.doc LIMIT ?
"""
_SEARCH = "SELECT rowid, bm25(facts) FROM facts WHERE facts MATCH ? {filter} ORDER BY 2, 1 LIMIT ?"
# The plus keeps SQLite from running the whole MATCH once for each allowed row.
_ALLOWED = "AND +rowid IN (SELECT value FROM json_each(?))"

# Kana, Han and Hangul: written without spaces, or, as Korean, with particles attached.
_UNSPACED = (
    "\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af\uac00-\ud7a3"
)
_UNSPACED_CHARACTER = re.compile(f"[{_UNSPACED}]")
_RUN = re.compile(f"[{_UNSPACED}]+|[^{_UNSPACED}]+")
_POSSESSIVE = re.compile(r"(?<=\w)['’]s\b", re.IGNORECASE)
_APOSTROPHES = "'’"


class KeywordIndex:
    """The words of one owner's facts; usable from several threads under one lock of the caller.

    Words are compared without case and diacritics and by their Porter stems ("painted" finds "painting"). Text is
    brought to NFKC first, and an English possessive loses its 's. Chinese, Japanese and Korean characters are tokens
    of their own, and a query's run of them asks for its overlapping pairs (as Lucene's CJKBigramFilter does), so that
    a word is found inside an unspaced run. Thai, Lao, Khmer and Burmese are not segmented: their words are found only
    where spaces stand around them. Emoji and punctuation are separators: a query of nothing else matches nothing.
    """

    def __init__(self) -> None:
        self._db = sqlite3.connect(":memory:", check_same_thread=False)
        self._db.executescript(_SCHEMA)
        self._seqs: set[int] = set()

    def __len__(self) -> int:
        return len(self._seqs)

    @property
    def nbytes(self) -> int:
        """Memory of the index."""
        [(pages,)], [(size,)] = (self._db.execute(f"PRAGMA {name}").fetchall() for name in ("page_count", "page_size"))
        return int(pages * size)

    def close(self) -> None:
        """Free the index, which cannot be used after."""
        self._db.close()

    def add(self, seqs: Sequence[int], texts: Sequence[str]) -> None:
        """Add one text for each seq; one whose seq is present takes its place, also within one call."""
        rows = [(int(seq), _index_text(text)) for seq, text in zip(seqs, texts, strict=True)]
        with self._db:
            self._db.executemany("INSERT OR REPLACE INTO facts(rowid, text) VALUES (?, ?)", rows)
        self._seqs.update(seq for seq, _ in rows)

    def remove(self, seqs: Sequence[int]) -> None:
        """Remove the texts of `seqs`, where present."""
        present = self._seqs.intersection(int(seq) for seq in seqs)
        with self._db:
            self._db.executemany("DELETE FROM facts WHERE rowid = ?", [(seq,) for seq in present])
        self._seqs -= present

    def search(self, query: str, k: int, *, allowed: npt.NDArray[np.int64] | None = None) -> list[Neighbour]:
        """Return the min(k, matching) facts that hold a word of `query`, best first, ties by seq.

        The score is x / (1 + x), in [0, 1), of the BM25 value x >= 0 (Robertson and Zaragoza, "The Probabilistic
        Relevance Framework: BM25 and Beyond", 2009, equation 3.15) as FTS5 computes it: k1 = 1.2, b = 0.75, lengths in
        tokens, and ln((N - n + 0.5) / (n + 0.5)) as the weight of a word that n of N facts hold, or 1e-6 where
        that is not positive, that is where half of the facts hold it. N and n count all facts of the index, whatever
        is allowed. A word that the query repeats counts once; see `MAX_QUERY_TERMS` for long ones.

        Parameters
        ----------
        query
            Any text. Nothing in it is an operator.
        k
            At least 0.
        allowed
            Seqs to choose from, before the best k are taken; None is all.
        """
        terms = _terms(query)
        if len(terms) > MAX_QUERY_TERMS:
            terms = self._rarest(terms)
        # A double quote never gets into a term, so that nothing has to be escaped.
        match = " OR ".join(f'"{term}"' for term in terms)
        if not match:
            return []
        if allowed is None:
            found = self._db.execute(_SEARCH.format(filter=""), (match, k))
        else:
            found = self._db.execute(_SEARCH.format(filter=_ALLOWED), (match, json.dumps(allowed.tolist()), k))
        return [Neighbour(seq, -negated / (1 - negated)) for seq, negated in found]

    def _rarest(self, terms: list[str]) -> list[str]:
        """Return the `MAX_QUERY_TERMS` of `terms` that the fewest facts hold, without those that none holds."""
        with self._db:
            self._db.execute("DELETE FROM probe")
            self._db.executemany("INSERT INTO probe(rowid, text) VALUES (?, ?)", enumerate(terms))
        return [terms[position] for (position,) in self._db.execute(_RAREST, (MAX_QUERY_TERMS,))]


def _normalised(text: str) -> str:
    # A lone surrogate, which SQLite cannot hold, becomes a question mark, which is a separator.
    storable = text.encode(errors="replace").decode()
    return _POSSESSIVE.sub("", unicodedata.normalize("NFKC", storable))


def _index_text(text: str) -> str:
    return _UNSPACED_CHARACTER.sub(r" \g<0> ", _normalised(text))


def _terms(query: str) -> list[str]:
    """Return what to look for: words, and pairs of unspaced characters, each once and in order."""
    words = "".join(character if _in_word(character) else " " for character in _normalised(query).lower()).split()
    terms: dict[str, None] = {}
    for run in (run for word in words for run in _RUN.findall(word.strip(_APOSTROPHES))):
        if _UNSPACED_CHARACTER.match(run) and len(run) > 1:
            terms.update((f"{left} {right}", None) for left, right in pairwise(run))
        else:
            terms[run] = None
    return list(terms)


def _in_word(character: str) -> bool:
    # Marks and apostrophes are no token characters of FTS5. Kept here, they make a phrase of what they divide:
    # "don't" is not any "don" and any "t", nor a Hindi word any of its consonants.
    return character.isalnum() or character in _APOSTROPHES or unicodedata.category(character)[0] == "M"
