"""A tokenizer and an embedder that need no model."""

import zlib
from collections.abc import Sequence

import numpy as np

from memstore.embedding import Vectors, unit_rows


class ByteTokenizer:
    """One token a byte; 256 is what a text begins with where special tokens are asked for."""

    BOS = 256

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [*([self.BOS] if add_special_tokens else []), *text.encode()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(i for i in token_ids if i != self.BOS).decode()


class WordEmbedder:
    """Counts of words: texts that share words are near."""

    dimension = 512
    fingerprint = "words:d512:l2"
    max_tokens = 10_000

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def embed(self, texts: Sequence[str]) -> Vectors:
        counts = np.zeros((len(texts), self.dimension))
        for row, text in enumerate(texts):
            counts[row, 0] = 0.01  # no text is without a direction
            for word in text.lower().split():
                counts[row, 1 + zlib.crc32(word.encode()) % (self.dimension - 1)] += 1
        return unit_rows(counts, rows=len(texts), dimension=self.dimension)
