"""KV is exchangeable where model files, what is made of them and the pool's layout are the same, and nowhere else."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs

from sgl_stateful.settings import KVStorage
from sgl_stateful.sglang_adapter.fingerprint import (
    computation,
    fact_fingerprint,
    kv_fingerprint,
    model_digest,
    model_directory,
    weights_digest,
)

KIB = 1 << 10
WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"layers": 2}')
    (tmp_path / WEIGHTS).write_bytes(bytes(200 * KIB))
    (tmp_path / "README.md").write_text("words")
    return tmp_path


def poke(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("at", [0, 64 * KIB - 1, 136 * KIB, -1])
def test_the_ends_of_a_weight_file_count(model: Path, at: int) -> None:
    before = model_digest(str(model))
    poke(model / WEIGHTS, at)
    assert model_digest(str(model)) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda model: (model / WEIGHTS).write_bytes(bytes(200 * KIB + 1)),
        lambda model: (model / WEIGHTS).write_bytes(b""),
        lambda model: (model / WEIGHTS).rename(model / "other.safetensors"),
        lambda model: (model / WEIGHTS).unlink(),
        lambda model: (model / "more.bin").write_bytes(b"1"),
        lambda model: (model / "config.json").write_text('{"layers": 3}'),
        lambda model: (model / "tokenizer.json").write_text("{}"),
    ],
    ids=["longer", "empty", "renamed", "gone", "one more", "configuration", "tokenizer"],
)
def test_a_model_that_changed_has_another_digest(model: Path, change: Any) -> None:
    before = model_digest(str(model))
    change(model)
    assert model_digest(str(model)) != before


def test_what_does_not_matter_does_not_count(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    before = model_digest(str(model))
    (model / "README.md").write_text("other words")
    poke(model / WEIGHTS, 100 * KIB)  # the middle of a large file is not read: documented
    assert model_digest(str(model)) == before
    twin = tmp_path_factory.mktemp("twin")
    for path in model.iterdir():
        (twin / path.name).write_bytes(path.read_bytes())
    assert model_digest(str(twin)) == before, "wherever it lies"


@pytest.mark.parametrize("size", [1, 64 * KIB, 100 * KIB])
def test_every_byte_of_a_small_weight_file_counts(model: Path, size: int) -> None:
    (model / WEIGHTS).write_bytes(bytes(size))
    before = model_digest(str(model))
    poke(model / WEIGHTS, size // 2)
    assert model_digest(str(model)) != before


def test_what_is_no_directory_is_its_name() -> None:
    assert model_digest("owner/model") == model_digest("owner/model") != model_digest("owner/model2")


def test_a_fingerprint_depends_on_every_part_and_on_no_order() -> None:
    parts = {"model": "m", "layers": 2, "dtype": "bfloat16"}
    assert kv_fingerprint(parts) == kv_fingerprint(dict(reversed(parts.items())))
    assert len({kv_fingerprint(parts), *(kv_fingerprint(parts | {name: "other"}) for name in parts)}) == 4


def test_quantised_facts_are_other_facts_and_native_ones_are_what_they_were() -> None:
    one, other = kv_fingerprint({"model": "m"}), kv_fingerprint({"model": "n"})
    assert fact_fingerprint(one, KVStorage.NATIVE) == one
    assert len({one, other, fact_fingerprint(one, KVStorage.INT8), fact_fingerprint(other, KVStorage.INT8)}) == 4
    assert fact_fingerprint(one, KVStorage.INT8) == fact_fingerprint(one, KVStorage.INT8)


# ---- weights ----


def test_a_tensor_anywhere_in_a_large_file_counts(model: Path) -> None:
    (model / WEIGHTS).write_bytes(bytes(8192 * KIB))
    before, ends = weights_digest(str(model)), model_digest(str(model))
    for at in (100, 4000, 8000):
        data = bytearray(8192 * KIB)
        data[at * KIB : (at + 40) * KIB] = b"\1" * (40 * KIB)
        (model / WEIGHTS).write_bytes(data)
        assert model_digest(str(model)) == ends
        assert weights_digest(str(model)) != before, f"at {at} KiB"


@pytest.mark.parametrize("at", [0, 100 * KIB, -1])
def test_every_byte_of_a_small_file_is_read(model: Path, at: int) -> None:
    before = weights_digest(str(model))
    poke(model / WEIGHTS, at)
    assert weights_digest(str(model)) != before
    assert weights_digest(str(model / WEIGHTS)) == weights_digest(str(model)), "a file by itself"


# ---- where they are ----


def cached(cache: Path, commit: str, *, ref: str = "main") -> Path:
    """A repository as Hugging Face's cache has it."""
    repository = cache / "models--owner--model"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / ref).write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(f'{{"commit": "{commit}"}}')
    return snapshot


def test_a_hub_id_is_the_commit_that_was_loaded(tmp_path: Path) -> None:
    first, second = cached(tmp_path, "a" * 40), cached(tmp_path, "b" * 40, ref="v2")
    for revision, directory in ((None, first), ("v2", second), ("b" * 40, second)):
        found = model_directory("owner/model", revision=revision, download_dir=str(tmp_path))
        assert Path(found) == directory
    assert model_digest(str(first)) != model_digest(str(second))


def test_what_is_in_no_cache_is_its_name_and_revision(tmp_path: Path) -> None:
    def found(model_path: str, revision: str | None = None) -> str:
        return model_directory(model_path, revision=revision, download_dir=str(tmp_path))

    assert found("no-such-owner/model") == "no-such-owner/model"
    assert found("no-such-owner/model", "v2") == "no-such-owner/model@v2"
    assert found("s3://bucket/a/model") == "s3://bucket/a/model"
    assert found(str(tmp_path), "v2") == str(tmp_path)


# ---- what is made of them ----


def computed(*, dtype: str = "torch.bfloat16", quantization: str | None = None, **arguments: Any) -> str:
    config = SimpleNamespace(dtype=dtype, quantization=quantization)
    return kv_fingerprint(computation(ServerArgs(model_path="dummy", **arguments), config))


@pytest.mark.parametrize(
    "change",
    [
        {"quantization": "fp8"},
        {"dtype": "torch.float32"},
        {"json_model_override_args": '{"rms_norm_eps": 0.1}'},
        {"load_format": "dummy"},
        {"quantization_param_path": "scales.json"},
        {"model_impl": "transformers"},
    ],
    ids=str,
)
def test_what_changes_kv_has_another_fingerprint(change: dict[str, Any]) -> None:
    assert computed() == computed()
    assert computed(**change) != computed()


def test_how_an_override_is_written_does_not_matter() -> None:
    one, other = '{"a": 1, "b": 2}', '{"b":2,"a":1}'
    assert computed(json_model_override_args=one) == computed(json_model_override_args=other) != computed()
