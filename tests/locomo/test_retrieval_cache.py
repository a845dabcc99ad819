"""Vectors that are kept from run to run."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from bigrams import BigramEmbedder

from locomo.errors import VectorCacheError
from locomo.retrieval.cache import CachedEmbedder
from memstore.embedding import Vectors


class CountingEmbedder(BigramEmbedder):
    """Counts what it is asked to embed."""

    def __init__(self, dimension: int = 32) -> None:
        super().__init__(dimension)
        self.seen: list[str] = []

    def embed(self, texts: Sequence[str]) -> Vectors:
        self.seen += texts
        return super().embed(texts)


def test_a_text_is_embedded_once_also_by_a_later_run(tmp_path: Path) -> None:
    texts, first, second = ["one", "two", "one", "three"], CountingEmbedder(), CountingEmbedder()
    expected = BigramEmbedder(32).embed(texts)
    with CachedEmbedder(first, tmp_path / "made" / "here") as cached:
        assert np.array_equal(cached.embed(texts), expected)
        assert np.array_equal(cached.embed(["two"]), expected[1:2])
    assert first.seen == ["one", "two", "three"]
    with CachedEmbedder(second, tmp_path / "made" / "here") as cached:
        assert np.array_equal(cached.embed(["three", "four"])[0], expected[3])
        assert cached.embed([]).shape == (0, 32)
        assert (cached.dimension, cached.fingerprint) == (32, second.fingerprint)
    assert second.seen == ["four"]


def test_vectors_are_kept_after_a_failure(tmp_path: Path) -> None:
    class NoUnits(Exception):
        pass

    with suppress(NoUnits), CachedEmbedder(CountingEmbedder(), tmp_path) as cached:
        cached.embed(["one"])
        raise NoUnits
    again = CountingEmbedder()
    CachedEmbedder(again, tmp_path).embed(["one"])
    assert again.seen == []


def test_another_embedder_has_other_vectors(tmp_path: Path) -> None:
    with CachedEmbedder(CountingEmbedder(32), tmp_path) as cached:
        cached.embed(["one"])
    other = CountingEmbedder(64)
    with CachedEmbedder(other, tmp_path) as cached:
        assert cached.embed(["one"]).shape == (1, 64)
    assert other.seen == ["one"]


def test_the_file_holds_no_text(tmp_path: Path) -> None:
    with CachedEmbedder(CountingEmbedder(), tmp_path) as cached:
        cached.embed(["a sentence that must not be kept"])
    [path] = tmp_path.iterdir()
    assert b"sentence" not in path.read_bytes()


@pytest.mark.parametrize("damage", [b"", b"no archive", None])
def test_a_damaged_file_is_named(tmp_path: Path, damage: bytes | None) -> None:
    with CachedEmbedder(CountingEmbedder(), tmp_path) as cached:
        cached.embed(["one", "two"])
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-30] if damage is None else damage)
    with pytest.raises(VectorCacheError, match="delete it"):
        CachedEmbedder(CountingEmbedder(), tmp_path)


def test_arrays_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with CachedEmbedder(CountingEmbedder(), tmp_path) as cached:
        cached.embed(["one"])
    [path] = tmp_path.iterdir()
    np.savez(path, digests=np.zeros((2, 16), np.uint8), rows=np.zeros((1, 32), np.float32))
    with pytest.raises(VectorCacheError, match="delete it"):
        CachedEmbedder(CountingEmbedder(), tmp_path)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(VectorCacheError, match="cannot be kept in"):
        CachedEmbedder(CountingEmbedder(), tmp_path / "file")
