"""The platform that serves on a plain CPU, and when it stays out of the way."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_stateful.sglang_adapter.platform import PortableCpuPlatform, activate, available_accelerator


class Accelerator:
    @staticmethod
    def is_available() -> bool:
        return True


@pytest.fixture
def cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    if available_accelerator() is not None:
        pytest.skip(f"this machine has an accelerator: {available_accelerator()}")


@pytest.mark.usefixtures("cpu_only")
def test_activates_on_a_machine_without_accelerator(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert activate() == "sgl_stateful.sglang_adapter.platform.PortableCpuPlatform"
    assert "portable_cpu is active" in caplog.text


@pytest.mark.usefixtures("cpu_only")
@pytest.mark.parametrize("name", ["xpu", "hpu", "npu"])
def test_leaves_an_accelerator_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch, name, Accelerator, raising=False)
    assert available_accelerator() == name
    assert activate() is None


@pytest.mark.usefixtures("cpu_only")
@pytest.mark.parametrize(("value", "active"), [("1", False), ("0", True), ("", True)])
def test_leaves_sglangs_own_cpu_engine_alone(monkeypatch: pytest.MonkeyPatch, value: str, active: bool) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", value)
    assert (activate() is not None) == active


def server_args(**given: Any) -> SimpleNamespace:
    fields = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    return SimpleNamespace(**{field: given.get(field) for field in fields})


def test_is_an_out_of_tree_cpu_without_triton() -> None:
    platform = PortableCpuPlatform()
    assert platform.is_out_of_tree()
    assert platform.device_type == "cpu"
    assert platform.get_device() == "cpu"
    assert not platform.capabilities.supports_triton
    assert not platform.capabilities.graph_capture


@pytest.mark.parametrize("chosen", [None, "intel_amx"])
def test_defaults_to_its_own_attention(chosen: str | None) -> None:
    args = server_args(attention_backend=chosen)
    PortableCpuPlatform().apply_server_args_defaults(args)
    assert args.attention_backend == "portable_cpu"
    assert PortableCpuPlatform().get_default_attention_backend() == "portable_cpu"


@pytest.mark.parametrize("field", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"])
def test_keeps_the_attention_that_the_caller_named(field: str) -> None:
    args = server_args(**{field: "torch_native"})
    before = dict(vars(args))
    PortableCpuPlatform().apply_server_args_defaults(args)
    assert {name: value for name, value in vars(args).items() if name in before} == before


def test_leaves_the_core_free_while_idle() -> None:
    args = server_args(attention_backend="torch_native")
    PortableCpuPlatform().apply_server_args_defaults(args)
    assert args.sleep_on_idle


def test_sends_a_first_token_before_the_next_forward() -> None:
    args = server_args(attention_backend="torch_native")
    PortableCpuPlatform().apply_server_args_defaults(args)
    assert args.disable_overlap_schedule
