"""An embedder that needs no model: counts of letter pairs."""

import zlib
from collections.abc import Sequence

import numpy as np

from memstore.embedding import Vectors, unit_rows


class BigramEmbedder:
    """Texts that share letter pairs are near; equal texts are equal, in every process."""

    def __init__(self, dimension: int = 256, *, name: str = "bigrams", max_tokens: int = 10_000) -> None:
        self.dimension = dimension
        self.fingerprint = f"{name}:d{dimension}:l2:max{max_tokens}"
        self.max_tokens = max_tokens

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def embed(self, texts: Sequence[str]) -> Vectors:
        counts = np.zeros((len(texts), self.dimension))
        for row, text in enumerate(texts):
            kept = " ".join(text.split(" ")[: self.max_tokens])
            for pair in zip("\x02" + kept, kept + "\x03", strict=True):
                counts[row, zlib.crc32("".join(pair).encode()) % self.dimension] += 1
        return unit_rows(counts, rows=len(texts), dimension=self.dimension)


class NaNEmbedder(BigramEmbedder):
    """Has no direction for texts that hold the word 'void'."""

    def embed(self, texts: Sequence[str]) -> Vectors:
        vectors = super().embed(texts)
        vectors[["void" in text for text in texts]] = np.nan
        return vectors
