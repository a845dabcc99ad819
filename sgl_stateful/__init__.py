"""Stateful sessions and spliced memory facts for SGLang servers.

``Client`` and ``AsyncClient`` are loaded when they are first asked for: SGLang imports this package in every process
that it starts, and none of those is a client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_stateful.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sgl_stateful import client

    return getattr(client, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
