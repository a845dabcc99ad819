from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_stateful.errors import IncompatibleServer
from sgl_stateful.sglang_adapter.selfcheck import check_flags, kv_fingerprint, model_digest

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


def test_a_hub_id_is_its_name() -> None:
    assert model_digest("owner/model") == model_digest("owner/model") != model_digest("owner/model2")


def test_a_fingerprint_depends_on_every_part_and_on_no_order() -> None:
    parts = {"model": "m", "layers": 2, "dtype": "bfloat16"}
    assert kv_fingerprint(parts) == kv_fingerprint(dict(reversed(parts.items())))
    assert len({kv_fingerprint(parts), *(kv_fingerprint(parts | {name: "other"}) for name in parts)}) == 4


def flags(**changed: Any) -> SimpleNamespace:
    plain: dict[str, Any] = {
        "enable_hierarchical_cache": False,
        "enable_lmcache": False,
        "speculative_algorithm": None,
        "disable_radix_cache": False,
        "enable_dp_attention": False,
        "tp_size": 1,
        "enable_mixed_chunk": False,
        "attention_backend": None,
        "prefill_attention_backend": None,
        "pp_size": 1,
        "dp_size": 1,
        "tokenizer_worker_num": 1,
        "skip_tokenizer_init": False,
        "disaggregation_mode": "null",
    }
    return SimpleNamespace(**plain | changed)


def test_plain_flags_are_served() -> None:
    check_flags(flags())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_hierarchical_cache", True),
        ("enable_lmcache", True),
        ("enable_unified_cache_external_linker", True),
        ("speculative_algorithm", "EAGLE"),
        ("disable_radix_cache", True),
        ("enable_dp_attention", True),
        ("tp_size", 2),
        ("enable_mixed_chunk", True),
        ("pp_size", 2),
        ("dp_size", 2),
        ("tokenizer_worker_num", 2),
        ("enable_unified_memory", True),
        ("skip_tokenizer_init", True),
        ("disaggregation_mode", "prefill"),
    ],
)
def test_a_flag_that_cannot_be_served_is_named(name: str, value: Any) -> None:
    with pytest.raises(IncompatibleServer, match=f"--{name.replace('_', '-')} cannot be combined"):
        check_flags(flags(**{name: value}))


def test_flashinfer_is_served_only_where_it_writes_before_it_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IncompatibleServer, match="SGLANG_FLASHINFER_USE_PAGED"):
        check_flags(flags(attention_backend="flashinfer"))
    monkeypatch.setenv("SGLANG_FLASHINFER_USE_PAGED", "1")
    check_flags(flags(attention_backend="flashinfer"))
