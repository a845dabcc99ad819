import traceback
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from memstore import InvalidLocation, MemStoreSettings
from sgl_stateful.settings import StatefulSettings


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith(("SGL_STATEFUL_", "MEMSTORE_", "XDG_")):
            monkeypatch.delenv(name)


def settings(memory: str, **more: Any) -> StatefulSettings:
    return StatefulSettings(memory=memory, **more)


@pytest.mark.parametrize(
    ("memory", "kv"),
    [
        ("store", "store/kv"),
        ("/data/store", "/data/store/kv"),
        ("sqlite:///store", "store/kv"),
        ("sqlite:////data/store", "/data/store/kv"),
    ],
)
def test_kv_lies_in_the_directory_of_a_store(memory: str, kv: str) -> None:
    assert settings(memory).kv_path() == Path(kv)


def test_kv_of_a_store_on_a_server_lies_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ana")
    path = settings("redis://db").kv_path()
    assert path.parent == Path("/home/ana/.cache/sgl-stateful/kv")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert settings("redis://db").kv_path() == Path("/var/cache/sgl-stateful/kv") / path.name
    monkeypatch.setenv("SGL_STATEFUL_CACHE", "/fast")
    assert settings("redis://db").kv_path() == Path("/fast/sgl-stateful/kv") / path.name
    monkeypatch.setenv("SGL_STATEFUL_KV_DIR", "/elsewhere")
    assert settings("redis://db").kv_path() == Path("/elsewhere")
    assert settings("store").kv_path() == Path("/elsewhere")


def test_one_store_has_one_directory_whoever_opens_it() -> None:
    ways = ["redis://db", "redis://db:6379/0", "redis://ana:secret@db", "redis://:other@db/0?prefix=memstore"]
    assert len({settings(way).kv_path() for way in ways}) == 1
    others = ["redis://db/1", "redis://db2", "redis://db:6380", "rediss://db", "redis://db?prefix=another"]
    assert len({settings(way).kv_path() for way in [ways[0], *others]}) == 6


def test_the_stores_own_variables_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings("store").store_settings().embedder_threads == 1
    assert settings("store").store_settings().blob_map_size_bytes == 64 << 30
    for name, value in {"EMBEDDER_MODEL": "m", "EMBEDDER_THREADS": "3", "BLOB_MAP_SIZE_BYTES": "7"}.items():
        monkeypatch.setenv(f"MEMSTORE_{name}", value)
    monkeypatch.setenv("MEMSTORE_REDIS_PASSWORD", "open-sesame")
    kept = settings("redis://db").store_settings()
    assert (kept.embedder_model, kept.embedder_threads, kept.blob_map_size_bytes) == ("m", 3, 7)
    assert kept.redis_password is not None
    assert kept.redis_password.get_secret_value() == "open-sesame"
    ours = settings("redis://db", embedder="n", kv_map_gib=2).store_settings()
    assert (ours.embedder_model, ours.blob_map_size_bytes) == ("n", 2 << 30)


def test_the_kv_store_has_one_size_whoever_opens_it() -> None:
    assert settings("store").kv_map_gib << 30 == MemStoreSettings().blob_map_size_bytes


def test_a_password_is_nowhere_to_be_read() -> None:
    secret = "open-sesame"  # tracebacks quote the lines below
    shown = settings(f"redis://ana:{secret}@db", policy="no such thing")
    assert secret not in f"{shown!r} {shown} {shown.kv_path()}"
    with pytest.raises(InvalidLocation) as refused:
        settings(f"redis://ana:{secret}@db:port").kv_path()
    with pytest.raises(ValidationError) as invalid:
        settings(f"mongodb://ana:{secret}@db", header="no newline")
    for error in (refused.value, invalid.value):
        assert secret not in "".join(traceback.format_exception(error))
