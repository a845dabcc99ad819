"""Facts to vectors, long ones in parts."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from memstore.embedding import Embedder, Vectors, unit_rows
from memstore.errors import EmbeddingError
from memstore.search.chunks import split_for_embedding
from memstore.searchable import Line, line_of
from memstore.types import Fact, NewFact

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (facts embedded so far, facts to embed)."""

# Of the embedder's limit: a longer prefix would leave the text no room beside it.
_LONGEST_PREFIX = 0.5


def embed_facts(
    embedder: Embedder, facts: Sequence[Fact | NewFact], *, batch: int, on_progress: Progress | None = None
) -> list[Vectors]:
    """Return the vectors `[num_chunks, dimension]` of each fact's line, several rows where it exceeds the limit.

    Parameters
    ----------
    batch
        Lines, or parts of them, that are embedded at once.

    Raises
    ------
    EmbeddingError
        Naming the position of a fact whose line has no usable vector.
    """
    chunks: list[str] = []
    ends: list[int] = []
    for fact in facts:
        chunks += _parts(embedder, line_of(fact))
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
            raise EmbeddingError(f"text {position} of {len(facts)} has no usable vector", position=position) from error
        while done < len(ends) and ends[done] <= len(rows):
            done += 1
        if on_progress is not None:
            on_progress(done, len(facts))
    return [
        unit_rows(rows[start:end], rows=end - start, dimension=embedder.dimension)
        for start, end in zip([0, *ends], ends, strict=False)
    ]


def _parts(embedder: Embedder, line: Line) -> list[str]:
    """Return a line whole where it fits, else its text in parts, each behind the prefix, which is true of all."""
    whole, limit = str(line), embedder.max_tokens
    if embedder.count_tokens(whole) <= limit:
        return [whole]
    prefix, text = line
    if prefix and embedder.count_tokens(prefix) > _LONGEST_PREFIX * limit:
        prefix, text = "", whole
    windows = split_for_embedding(
        text, max_tokens=limit, count_tokens=lambda window: embedder.count_tokens(prefix + window)
    )
    return [prefix + window for window in windows]
