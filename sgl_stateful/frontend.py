"""SGLang's frontend language over memory and sessions.

::

    import sglang as sgl
    from sgl_stateful.frontend import StatefulEndpoint, session

    @sgl.function
    def ask(s, reading):
        session(s).append(reading)
        s += sgl.user("Which bed needs water?")
        s += sgl.assistant(sgl.gen("answer", max_tokens=16))

    sgl.set_default_backend(StatefulEndpoint("http://localhost:30000", owner="ana", session=greenhouse))

SGLang is imported when one of these names is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_stateful.sglang_adapter.frontend import (
        MEMORY_HERE,
        ProgramFlash,
        ProgramSession,
        StatefulEndpoint,
        session,
    )

__all__ = ["MEMORY_HERE", "ProgramFlash", "ProgramSession", "StatefulEndpoint", "session"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sgl_stateful.sglang_adapter import frontend

    return getattr(frontend, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
