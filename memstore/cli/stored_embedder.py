"""The embedder of an existing store, loaded only by those commands that embed something."""

from collections.abc import Callable, Sequence
from functools import cached_property

from memstore.embedding import Embedder, Vectors
from memstore.errors import EmbedderMismatch
from memstore.records.base import RecordStore
from memstore.searchable import embedder_in, vectors_name
from memstore.types import OwnerId

_ANYONE = OwnerId("anyone")


def stored_fingerprint(records: RecordStore) -> str | None:
    """Return what names the vectors, as `vectors_name` does; None in a new store."""
    # It is one for the whole store, and comes with the head of every owner, known or not.
    return records.head(_ANYONE).embedder


class StoredEmbedder:
    """Answers for the embedder of a store by what the store says; loads the model when a text is embedded.

    Parameters
    ----------
    stored
        What names the vectors in the store; None for a new one, where the model has to be asked.
    load
        Loads the embedder of this process.

    Raises
    ------
    EmbedderMismatch
        By whatever needs the model, where it is not the one that the vectors were made with.
    """

    def __init__(self, stored: str | None, load: Callable[[], Embedder]) -> None:
        self._stored = stored
        self._load = load

    @property
    def fingerprint(self) -> str:
        """What the store says."""
        return self._model.fingerprint if self._stored is None else embedder_in(self._stored)

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return self._model.dimension

    @property
    def max_tokens(self) -> int:
        """Tokens of a text that reach the vector."""
        return self._model.max_tokens

    def count_tokens(self, text: str) -> int:
        """Return the length of `text` in tokens."""
        return self._model.count_tokens(text)

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return one L2-normalised row per text, `[len(texts), dimension]`."""
        return self._model.embed(texts)

    @cached_property
    def _model(self) -> Embedder:
        model = self._load()
        if self._stored is not None and vectors_name(model) != self._stored:
            raise EmbedderMismatch(stored=self._stored, offered=vectors_name(model))
        return model
