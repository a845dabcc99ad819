"""In which order the streams of a server see what is written to the KV pool."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["on_stream"]


@contextmanager
def on_stream(stream: Any, *tensors: Tensor) -> Iterator[None]:
    """Run what the block launches on `stream`, behind all that the current stream has been given so far.

    What `stream` is given afterwards, a forward that reads the pool, is behind the block. The memory of `tensors`,
    which belongs to the current stream, is not handed out again before the block's launches have run, even where they
    are freed at once.

    Parameters
    ----------
    stream
        A stream of the tensors' device, such as the one that SGLang runs forwards on. None: the current one.
    tensors
        What the block reads and the caller may free. Those on the CPU are left alone.
    """
    if stream is None or all(tensor.device.type == "cpu" for tensor in tensors):
        yield
        return
    held = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    backend = torch.get_device_module(held[0].device)
    stream.wait_stream(backend.current_stream(held[0].device))
    try:
        with backend.stream(stream):
            yield
    finally:
        for tensor in held:
            tensor.record_stream(stream)
