"""The Lua scripts that change or read several keys as one."""

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from memstore.records.redis.connection import RedisConnections
from memstore.records.redis.keys import Keys
from memstore.types import OwnerId

_FOLDER = files(__package__)
_LONG = ("purge", "adopt")
_LARGE_BYTES = 2**18


class Scripts:
    """Runs the scripts of this package on one store; each is repeatable, see `RedisConnections`."""

    def __init__(self, connections: RedisConnections, keys: Keys) -> None:
        self._connections = connections
        self._keys = keys
        common = _FOLDER.joinpath("common.lua").read_text()
        self._scripts = {
            file.name.removesuffix(".lua"): connections.script(common + file.read_text())
            for file in _FOLDER.iterdir()
            if file.name.endswith(".lua") and file.name != "common.lua"
        }

    def run(self, name: str, owner: OwnerId | None, arguments: Sequence[bytes | str | int]) -> Any:
        """Return the reply of `name`.lua."""
        script = self._scripts[name]
        keys = [self._keys.meta] if owner is None else [self._keys.meta, f"{self._keys.of(owner)}head"]
        prepared = [str(argument) if isinstance(argument, int) else argument for argument in arguments]
        size_bytes = sum(map(len, prepared))
        return self._connections.call(
            lambda client: script(client, keys, prepared), patient=name in _LONG or size_bytes > _LARGE_BYTES
        )
