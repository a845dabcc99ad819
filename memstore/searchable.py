"""What is searchable of a fact: its line, of which vectors and words are made, and what names vectors of lines."""

from typing import NamedTuple

from memstore.embedding import Embedder
from memstore.types import Fact, NewFact

FORM = "time+speaker+text"
"""To be changed with what `line_of` returns: vectors of another form are never compared with these."""

_FORM_SUFFIX = f":{FORM}"


class Line(NamedTuple):
    """A fact as one text, ``({time}) {speaker}: {text}``, without the parts that the fact lacks."""

    prefix: str
    """Time and speaker, up to the text; empty where the fact has neither."""

    text: str

    def __str__(self) -> str:
        return self.prefix + self.text


def line_of(fact: Fact | NewFact) -> Line:
    """Return what every vector and every word of `fact` is made of; nothing else of a fact is."""
    time = f"({fact.time}) " if fact.time else ""
    speaker = f"{fact.speaker}: " if fact.speaker else ""
    return Line(time + speaker, fact.text)


def vectors_name(embedder: Embedder) -> str:
    """Return what names the vectors of lines that `embedder` makes: the fingerprint that a store keeps and compares."""
    return embedder.fingerprint + _FORM_SUFFIX


def embedder_in(name: str) -> str:
    """Return the embedder's own fingerprint in what `vectors_name` returned; a name of another form as it is."""
    return name.removesuffix(_FORM_SUFFIX)
