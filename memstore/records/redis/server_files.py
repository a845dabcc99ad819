"""Having the server write its files anew, so that what was removed is on its disk no more."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

from memstore.errors import StoreError, StoreRefused
from memstore.records.redis.connection import RedisConnections
from memstore.records.redis.keys import Keys
from memstore.records.redis.walk import all_keys, fields

_POLL_S = 0.05


def rewrite_files(connections: RedisConnections, *, wait_s: float, dump: bool = True) -> str | None:
    """Rewrite the append-only file and the dump, where there are any, and wait; return what still has old content.

    What is removed before the call is in none of the files after it.
    """
    deadline = time.monotonic() + wait_s
    try:
        info = _persistence(connections)
        has_log = bool(info["aof_enabled"])
        if has_log and not _rewritten(
            connections, "BGREWRITEAOF", _is_rewriting_log, "aof_last_bgrewrite_status", deadline
        ):
            return "the server's append-only file, until BGREWRITEAOF succeeds: see the server's log"
        if (
            dump
            and (has_log or _may_have_dump(connections, info))
            and not _rewritten(connections, "BGSAVE", _is_dumping, "rdb_last_bgsave_status", deadline)
        ):
            return "the server's dump file, until BGSAVE succeeds: see the server's log"
        replicas = connections.do("info", "replication").get("connected_slaves", 0)
    except StoreRefused:
        return "the server's files, which this user may not have rewritten: run BGREWRITEAOF and BGSAVE"
    except StoreError as error:
        return f"the server's files, which could not be rewritten: run BGREWRITEAOF and BGSAVE ({error})"
    if replicas:
        return f"the files of {replicas} replicas: run BGREWRITEAOF and BGSAVE on each"
    return None


def compact(connections: RedisConnections, keys: Keys, *, keys_before: float, wait_s: float) -> tuple[int, int]:
    """Forget idempotency keys from before `keys_before` and give back memory; return the bytes before and after."""
    before = _used_memory(connections)
    for names in all_keys(connections, keys):
        for name in names:
            if name.endswith(b":idempotency"):
                _forget_keys(connections, name.decode(), keys_before)
    # That is about what the allocator keeps; the rest is done.
    with contextlib.suppress(StoreRefused):
        connections.do("memory_purge")
    rewrite_files(connections, wait_s=wait_s, dump=False)
    return before, _used_memory(connections)


def _forget_keys(connections: RedisConnections, name: str, keys_before: float) -> None:
    for batch in fields(connections, name):
        # `digest at id id ...`; a key never gets another value.
        old = [key for key, value in batch if float(value.split(b" ")[1]) < keys_before]
        if old:
            connections.do("hdel", name, *old)


def _rewritten(
    connections: RedisConnections, command: str, is_busy: Callable[[dict[str, Any]], bool], status: str, deadline: float
) -> bool:
    # One that runs already began before what it has to leave out was removed.
    if not _idle(connections, is_busy, deadline):
        return False
    try:
        connections.do("execute_command", command)
    except StoreRefused:
        raise
    except StoreError as error:
        # Somebody else started one since.
        if "in progress" not in str(error):
            raise
    return _idle(connections, is_busy, deadline) and _persistence(connections)[status] == "ok"


def _idle(connections: RedisConnections, is_busy: Callable[[dict[str, Any]], bool], deadline: float) -> bool:
    while is_busy(_persistence(connections)):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _is_rewriting_log(info: dict[str, Any]) -> bool:
    return bool(info["aof_rewrite_in_progress"] or info["aof_rewrite_scheduled"] or info["rdb_bgsave_in_progress"])


def _is_dumping(info: dict[str, Any]) -> bool:
    return bool(info["rdb_bgsave_in_progress"] or info["aof_rewrite_in_progress"])


def _may_have_dump(connections: RedisConnections, info: dict[str, Any]) -> bool:
    if info.get("rdb_saves") or info.get("rdb_last_load_keys_loaded"):
        return True
    try:
        return bool(connections.do("config_get", "save")["save"])
    except StoreRefused:
        return True


def _persistence(connections: RedisConnections) -> dict[str, Any]:
    info: dict[str, Any] = connections.do("info", "persistence")
    return info


def _used_memory(connections: RedisConnections) -> int:
    return int(connections.do("info", "memory")["used_memory"])
