"""The Lua scripts that check and write a session as one."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from memstore.records.redis.connection import RedisConnections

_FOLDER = files(__package__)
_LONG = ("entries", "purge")
_LARGE_BYTES = 2**18


class SessionScripts:
    """Runs the scripts of this package on one store; each is repeatable, see `RedisConnections`."""

    def __init__(self, connections: RedisConnections, sessions: str) -> None:
        self._connections = connections
        self._sessions = sessions
        common = _FOLDER.joinpath("common.lua").read_text()
        self._scripts = {
            file.name.removesuffix(".lua"): connections.script(common + file.read_text())
            for file in _FOLDER.iterdir()
            if file.name.endswith(".lua") and file.name != "common.lua"
        }

    def run(self, name: str, *arguments: bytes | str | int) -> Any:
        """Return the reply of `name`.lua."""
        script = self._scripts[name]
        prepared = [str(argument) if isinstance(argument, int) else argument for argument in arguments]
        size_bytes = sum(map(len, prepared))
        return self._connections.call(
            lambda client: script(client, [self._sessions], prepared),
            patient=name in _LONG or size_bytes > _LARGE_BYTES,
        )
