"""The out-of-tree platform that lets a stock SGLang serve on a plain CPU.

SGLang's own CPU engine needs kernels that PyPI does not carry. `PortableCpuPlatform` needs none: it answers SGLang's
questions with torch's CPU device and names `portable_cpu`, a pure-torch attention backend, as its default.
"""

import logging
import os
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

__all__ = ["ATTENTION_BACKEND", "DISPATCH_KEY", "PortableCpuPlatform", "activate", "available_accelerator"]

ATTENTION_BACKEND = "portable_cpu"
DISPATCH_KEY = "portable_cpu"

_ACCELERATORS = ("cuda", "xpu", "hpu", "npu", "musa", "mps")

logger = logging.getLogger(__name__)


class PortableCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Any CPU that torch runs on: no Triton, no captured graphs, no compiled extension."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> str:
        """`cpu`, by name: where no device is given, SGLang takes this for the server argument and splits the string."""
        return "cpu"

    def get_default_attention_backend(self) -> str:
        """Name of the backend in SGLang's attention registry."""
        return ATTENTION_BACKEND

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Put our attention where SGLang chose none, or `intel_amx`: its default for x86, whose kernels are not here.

        On Arm SGLang's default is `torch_native`, which looks like the caller's own choice and is kept. An idle
        scheduler waits for its sockets: polling would take one of the cores that the model computes on. Nothing
        overlaps with a forward that runs on the scheduler's own cores: overlapped, a first token would only be sent
        after the next decode step.
        """
        server_args.sleep_on_idle = True
        server_args.disable_overlap_schedule = True
        both = server_args.prefill_attention_backend, server_args.decode_attention_backend
        if server_args.attention_backend in (None, "intel_amx") and both == (None, None):
            server_args.attention_backend = ATTENTION_BACKEND

    def get_dispatch_key_name(self) -> str:
        """The key under which `init_backend` registers this platform's forwards of SGLang's layers."""
        return DISPATCH_KEY

    def init_backend(self) -> None:
        """Register the compiled forwards, in every process that loads a model."""
        from sgl_stateful.sglang_adapter import cpu_ops

        cpu_ops.register(DISPATCH_KEY)

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Compute the small products of the linear layers with AMX where the CPU has it."""
        from sgl_stateful.sglang_adapter import cpu_linear

        logger.info("%d linear layers compute small batches with AMX", cpu_linear.adopt(model))

    def is_pin_memory_available(self, device: object = None) -> bool:
        """False: there is no device to pin host memory for."""
        return False


def available_accelerator() -> str | None:
    """Name of the first accelerator that torch can use, or None on a CPU-only machine."""
    for name in _ACCELERATORS:
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            return name
    return None


def activate() -> str | None:
    """Answer SGLang's platform discovery.

    Returns
    -------
    Dotted path of `PortableCpuPlatform`; None where an accelerator is available or where
    `SGLANG_USE_CPU_ENGINE=1` asks for SGLang's own CPU kernels.
    """
    accelerator = available_accelerator()
    if accelerator is not None:
        logger.debug("portable_cpu stays inactive: %s is available", accelerator)
        return None
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") not in ("", "0"):
        logger.info("portable_cpu stays inactive: SGLANG_USE_CPU_ENGINE asks for SGLang's own CPU engine")
        return None
    logger.info("portable_cpu is active: no accelerator found, serving with torch on the CPU")
    return f"{PortableCpuPlatform.__module__}.{PortableCpuPlatform.__qualname__}"
