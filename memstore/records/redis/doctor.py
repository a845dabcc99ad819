"""What an operator should know about the server that holds the records."""

from typing import Any

from memstore.errors import StoreError
from memstore.records.base import Finding
from memstore.records.redis.connection import RedisConnections

_OLDEST_VERSION = (6, 2)
_LITTLE_MEMORY = 0.9


def doctor(connections: RedisConnections) -> list[Finding]:
    """Return what an operator should know."""
    try:
        info: dict[str, Any] = connections.do("info")
    except StoreError as error:
        return [Finding("error", "server", str(error))]
    return [
        _version(info),
        _role(info),
        _durability(info, _setting(connections, "appendfsync")),
        _eviction(info),
        _memory(info),
        _transport(connections),
    ]


def eviction_risk(connections: RedisConnections) -> str | None:
    """Return what is wrong where the server may throw facts away; None where it does not, or it cannot be told."""
    try:
        finding = _eviction(connections.do("info", "memory"))
    except StoreError:
        return None
    return finding.message if finding.level == "error" else None


def _version(info: dict[str, Any]) -> Finding:
    version = str(info["redis_version"])
    old = tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_VERSION
    advice = ": 6.2 is the oldest that is supported" if old else ""
    return Finding("error" if old else "ok", "server", f"Redis {version}{advice}")


def _role(info: dict[str, Any]) -> Finding:
    if info["role"] == "master":
        return Finding("ok", "role", f"master with {info['connected_slaves']} replicas")
    return Finding("error", "role", "a read-only replica: connect to the master, or through Sentinel")


def _durability(info: dict[str, Any], appendfsync: str | None) -> Finding:
    if not info["aof_enabled"]:
        return Finding(
            "warning",
            "durability",
            "append-only file off: a server that ends for whatever reason may lose every write since its last"
            " snapshot; set appendonly yes",
        )
    if info["aof_last_write_status"] != "ok":
        return Finding("error", "durability", "the server cannot write its append-only file: see its log")
    if appendfsync == "always":
        return Finding("ok", "durability", "an acknowledged write survives a loss of power (appendfsync always)")
    if appendfsync == "everysec":
        return Finding(
            "ok",
            "durability",
            # Redis postpones its writes, for up to two seconds, while an earlier fsync is still under way.
            "an acknowledged write is in the file within a second, two where the disk is slow: a loss of power, or"
            " the end of the server process just then, may take it (appendfsync everysec)",
        )
    if appendfsync == "no":
        return Finding(
            "warning",
            "durability",
            "an acknowledged write survives the end of the server process; a loss of power may take half a minute"
            " (appendfsync no): set everysec or always",
        )
    return Finding(
        "warning",
        "durability",
        "append-only file on, but this user may not see appendfsync (CONFIG GET): whether a write survives a loss of"
        " power cannot be told",
    )


def _eviction(info: dict[str, Any]) -> Finding:
    policy, limit = str(info.get("maxmemory_policy", "")), int(info.get("maxmemory", 0))
    if limit and policy != "noeviction":
        return Finding(
            "error",
            "eviction",
            f"maxmemory-policy is {policy}: when memory is full the server throws facts away; set noeviction",
        )
    return Finding("ok", "eviction", f"maxmemory-policy {policy}" if limit else "no maxmemory")


def _memory(info: dict[str, Any]) -> Finding:
    used, limit = int(info["used_memory"]), int(info.get("maxmemory", 0))
    if not limit:
        return Finding("ok", "memory", f"{used / 2**20:.0f} MiB in use, no limit set")
    level = "warning" if used > _LITTLE_MEMORY * limit else "ok"
    return Finding(level, "memory", f"{used / 2**20:.0f} of {limit / 2**20:.0f} MiB in use")


def _transport(connections: RedisConnections) -> Finding:
    location = connections.location
    if location.tls:
        return Finding("ok", "transport", "TLS")
    if location.is_local:
        return Finding("ok", "transport", "no TLS, within this machine")
    return Finding("warning", "transport", "no TLS: facts and the password cross the network as plain text")


def _setting(connections: RedisConnections, name: str) -> str | None:
    try:
        return str(connections.do("config_get", name).get(name))
    except StoreError:
        return None
