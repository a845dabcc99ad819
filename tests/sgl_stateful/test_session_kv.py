"""The scheduler's side of snapshots, apart from the engine: what is asked of it before and while it writes."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sgl_stateful.sessions.snapshot_file import read_header
from sgl_stateful.sglang_adapter.kv_pool import KVPool
from sgl_stateful.sglang_adapter.session_kv import SessionKV, snapshot_control

NAME = "0-session.kv"


class Pool:
    """Keys and values that are made of their slots."""

    def read_as_served(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys = slots.float()[None, :, None, None].expand(2, -1, 1, 4).contiguous()
        return keys, -keys


class Cache:
    """A tree that has the first ``tokens`` of whatever it is asked for."""

    tree_core = SimpleNamespace(is_eagle=False)

    def __init__(self, folder: Path, tokens: int) -> None:
        self.tokens = tokens
        self.session_kv = SessionKV(pool=cast(KVPool, Pool()), folder=folder, fingerprint="f")
        self.begin = threading.Event()
        self.session_kv._writer.submit(self.begin.wait, 10)  # nothing is written before

    def finish(self) -> None:
        """Have everything written."""
        self.begin.set()
        self.session_kv._writer.shutdown(wait=True)

    def match_prefix(self, params: Any) -> Any:
        return SimpleNamespace(device_prefix_len=min(self.tokens, len(params.key)), last_device_node=None)

    def path_device_indices(self, node: Any) -> torch.Tensor:
        return torch.arange(self.tokens)

    def control(self, op: str, **body: Any) -> dict[str, Any]:
        return snapshot_control(cast(Any, self), op, body)

    def write(self, least_tokens: int, **more: Any) -> dict[str, Any]:
        return self.control(
            "snapshot_write", name=NAME, token_ids=list(range(500)), salt="s", least_tokens=least_tokens, **more
        )


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path, tokens=300)


def test_a_look_says_what_would_be_written_and_writes_nothing(cache: Cache) -> None:
    assert cache.write(300, look=True) == {"state": "in_pool", "tokens": 300}
    assert cache.write(301, look=True) == cache.write(301) == {"state": "not_in_pool"}
    cache.finish()
    assert list(cache.session_kv.folder.iterdir()) == []


def test_what_was_promised_is_written(cache: Cache) -> None:
    assert cache.write(300)["state"] == "writing"
    cache.finish()
    assert cache.control("snapshot_state", name=NAME)["state"] == "written"
    assert read_header(cache.session_kv.folder / NAME).num_tokens == 300


@pytest.mark.parametrize(("weights", "state"), [("", "written"), ("+new", "dropped")])
def test_a_fence_that_is_said_again_drops_nothing(cache: Cache, weights: str, state: str) -> None:
    cache.write(300)
    cache.control("snapshot_fence", weights=weights)
    cache.finish()
    assert cache.control("snapshot_state", name=NAME)["state"] == state
