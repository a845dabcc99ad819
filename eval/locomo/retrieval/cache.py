"""Vectors of texts that were embedded before, in a directory that the user names: an embedder in front of another."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import xxhash

from locomo.errors import VectorCacheError
from memstore.embedding import Embedder, Vectors


class CachedEmbedder:
    """An `Embedder` that embeds each text once; the file holds digests of texts and vectors, and no text.

    Parameters
    ----------
    embedder
        What makes the vectors. Each fingerprint has a file of its own.
    directory
        Made if absent.

    Raises
    ------
    VectorCacheError
        The directory cannot be made, or its file is damaged.
    """

    def __init__(self, embedder: Embedder, directory: Path) -> None:
        self._embedder = embedder
        name = xxhash.xxh3_64_hexdigest(embedder.fingerprint.encode())
        self._path = directory / f"vectors-{name}.npz"
        self._rows: dict[bytes, Vectors] = {}
        self._num_saved = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                self._load()
        except OSError as error:
            raise VectorCacheError(f"vectors cannot be kept in {directory}: {error}") from error

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return self._embedder.dimension

    @property
    def fingerprint(self) -> str:
        """That of the embedder behind."""
        return self._embedder.fingerprint

    @property
    def max_tokens(self) -> int:
        """That of the embedder behind."""
        return self._embedder.max_tokens

    def count_tokens(self, text: str) -> int:
        """Length of `text` in tokens, by the embedder behind."""
        return self._embedder.count_tokens(text)

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return one unit row per text, `[len(texts), dimension]`."""
        digests = [xxhash.xxh3_128_digest(text.encode(errors="surrogatepass")) for text in texts]
        missing = {digest: text for digest, text in zip(digests, texts, strict=True) if digest not in self._rows}
        if missing:
            self._rows.update(zip(missing, self._embedder.embed(list(missing.values())), strict=True))
        if not texts:
            return np.empty((0, self.dimension), dtype=np.float32)
        return np.stack([self._rows[digest] for digest in digests])

    def save(self) -> None:
        """Write what is new; a reader finds the old file or the new one, never half of one.

        Raises
        ------
        VectorCacheError
            It cannot be written.
        """
        if len(self._rows) == self._num_saved:
            return
        part = self._path.with_suffix(f".{os.getpid()}.part")
        digests = np.frombuffer(b"".join(self._rows), dtype=np.uint8).reshape(-1, 16)
        try:
            with part.open("wb") as file:
                np.savez(file, digests=digests, rows=np.stack(list(self._rows.values())))
            part.replace(self._path)
        except OSError as error:
            raise VectorCacheError(f"{self._path} cannot be written: {error}") from error
        finally:
            part.unlink(missing_ok=True)
        self._num_saved = len(self._rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Also after a failure: what was embedded need not be again.
        self.save()

    def _load(self) -> None:
        try:
            with self._path.open("rb") as file, np.load(file) as held:
                digests, rows = held["digests"], held["rows"]
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise VectorCacheError(f"{self._path} is damaged ({error}): delete it") from error
        if digests.shape != (len(rows), 16) or rows.shape[1:] != (self.dimension,):
            raise VectorCacheError(f"{self._path} holds arrays {digests.shape} and {rows.shape}: delete it")
        self._rows = {digest.tobytes(): row for digest, row in zip(digests, rows, strict=True)}
        self._num_saved = len(self._rows)
