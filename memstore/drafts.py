"""Texts of facts to vectors, long ones in parts."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from memstore.embedding import Embedder, Vectors, unit_rows
from memstore.errors import EmbeddingError
from memstore.search.chunks import split_for_embedding

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (texts embedded so far, texts to embed)."""


def embed_texts(
    embedder: Embedder, texts: Sequence[str], *, batch: int, on_progress: Progress | None = None
) -> list[Vectors]:
    """Return the vectors `[num_chunks, dimension]` of each text: several rows where it exceeds the embedder's limit.

    Parameters
    ----------
    batch
        Texts, or parts of them, that are embedded at once.

    Raises
    ------
    EmbeddingError
        Naming the position of a text that has no usable vector.
    """
    chunks: list[str] = []
    ends: list[int] = []
    for text in texts:
        chunks += split_for_embedding(text, max_tokens=embedder.max_tokens, count_tokens=embedder.count_tokens)
        ends.append(len(chunks))
    rows: list[Vectors] = []
    done = 0
    for start in range(0, len(chunks), batch):
        part = chunks[start : start + batch]
        try:
            rows += list(unit_rows(embedder.embed(part), rows=len(part), dimension=embedder.dimension))
        except EmbeddingError as error:
            if error.position is None:
                raise
            position = next(i for i, end in enumerate(ends) if start + error.position < end)
            raise EmbeddingError(f"text {position} of {len(texts)} has no usable vector", position=position) from error
        while done < len(ends) and ends[done] <= len(rows):
            done += 1
        if on_progress is not None:
            on_progress(done, len(texts))
    return [
        unit_rows(rows[start:end], rows=end - start, dimension=embedder.dimension)
        for start, end in zip([0, *ends], ends, strict=False)
    ]
