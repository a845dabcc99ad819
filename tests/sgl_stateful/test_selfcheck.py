from types import SimpleNamespace
from typing import Any

import pytest

from sgl_stateful.errors import IncompatibleServer
from sgl_stateful.sglang_adapter.selfcheck import check_flags


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
