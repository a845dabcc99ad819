"""Errors of sgl_stateful, one tree.

StatefulError
├── IncompatibleServer     this SGLang, model or flag cannot be served; raised at start-up
├── UnverifiedSplice       the start-up self-test failed
├── MemoryDisabled         a request asks for memory on a server that has none
└── BadMemoryRequest       a request that cannot be understood (HTTP 400)
    └── ForgedDirective    a caller set a key that is the server's own
"""

from __future__ import annotations


class StatefulError(Exception):
    """Base of every error that this package raises."""


class IncompatibleServer(StatefulError):
    """This SGLang version, model or flag cannot be served; the message names it and what to change."""


class UnverifiedSplice(StatefulError):
    """The start-up self-test found spliced KV that differs from full prefill."""


class MemoryDisabled(StatefulError, ValueError):
    """A request asks for memory, but the server was started without one."""


class BadMemoryRequest(StatefulError, ValueError):
    """A memory request that cannot be served as written.

    It is a ``ValueError`` because SGLang's routes answer that with HTTP 400 and its message.
    """


class ForgedDirective(BadMemoryRequest):
    """A caller put a value under the key through which the server talks to its own scheduler."""
