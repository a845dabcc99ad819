"""Questions in words, and which of them mean the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memstore.embedding import Embedder
from sgl_stateful.sessions.content import Content

from .guard import guarded

Vector = npt.NDArray[np.float32]
"""Direction of a text, ``[dimension]``, of length 1."""


class Words(NamedTuple):
    """The words of a question.

    Attributes
    ----------
    form
        Roles of its messages, or ``text``: questions of another form are rendered otherwise.
    text
        All of its words.
    """

    form: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Wording:
    """What of a question's words is compared.

    Attributes
    ----------
    guarded
        Words in which questions of one meaning do not differ.
    vector
        Of the text.
    """

    form: tuple[str, ...]
    guarded: tuple[str, ...]
    vector: Vector

    @classmethod
    def of(cls, words: Words, vector: Vector) -> Wording:
        """From words and the direction of their text."""
        return cls(words.form, guarded(words.text), vector)

    def similarity(self, other: Wording) -> float:
        """Cosine of both texts, in [-1, 1]; -1 where the questions may not be taken for one another."""
        if (self.form, self.guarded) != (other.form, other.guarded):
            return -1.0
        return float(np.clip(self.vector @ other.vector, -1.0, 1.0))


class Alike(NamedTuple):
    """A candidate, by its place, and how similar it is."""

    place: int
    similarity: float


def direction(embedder: Embedder, text: str) -> Vector | None:
    """Where a text points, ``[dimension]``; None of one that is longer than the embedder reads.

    Raises
    ------
    EmbeddingError
    """
    return None if embedder.count_tokens(text) > embedder.max_tokens else embedder.embed([text])[0]


def words_of(content: Content) -> Words | None:
    """The words of a question; None where it is token ids, or has more than words in it."""
    if content.text is not None:
        return Words(("text",), content.text)
    roles, texts = [], []
    for message in content.messages or ():
        said = message.get("content")
        if not isinstance(said, str) or message.keys() - {"role", "content"}:
            return None
        roles.append(str(message.get("role")))
        texts.append(said)
    return Words(tuple(roles), "\n".join(texts)) if texts else None


def nearest(asked: Wording, candidates: Sequence[tuple[Wording, float]]) -> Alike | None:
    """The most similar of questions, each with the least similarity that it takes; the first of several that are."""
    best: Alike | None = None
    for place, (wording, threshold) in enumerate(candidates):
        similarity = asked.similarity(wording)
        if similarity >= threshold and (best is None or similarity > best.similarity):
            best = Alike(place, similarity)
    return best
