"""How far a program of SGLang's frontend language has come: it runs on a thread of its own, behind its lines."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty
from threading import Event

from sglang.lang.interpreter import StreamExecutor
from sglang.lang.ir import SglVariable

from sgl_stateful.client import ClientError

_LOOK_S = 0.05  # for a thread that has ended; what has been reached is told at once


class _Milestone:
    """A variable without text whose value a program asks for when it gets there."""

    def __init__(self) -> None:
        self.reached = Event()

    def get_var(self, name: str) -> str:
        self.reached.set()
        return ""


def arrive(executor: StreamExecutor) -> None:
    """Wait until a program has done all that it was told so far.

    Not by ``sync``, which never returns where lines were added after a failure, and returns before a failure is noted.

    Raises
    ------
    Exception
        What the program has failed with, here or before.
    ClientError
        Its thread has ended, and nobody noted why.
    """
    if executor.use_thread:
        milestone = _Milestone()
        line = SglVariable("milestone", source=None)
        line.source_stream_executor = milestone
        executor.submit(line)
        while not milestone.reached.wait(_LOOK_S):
            if not executor.worker.is_alive():  # the program has failed, or has come to its end
                _drop_lines(executor)
                if not executor.is_finished:
                    raise ClientError("the program's thread has ended before the program did")
                break
    if executor.error_ is not None:
        raise executor.error_


def _drop_lines(executor: StreamExecutor) -> None:
    """Take away what nobody will come to, for which ``sync`` would wait for ever."""
    with suppress(Empty):
        while True:
            executor.queue.get_nowait()
            executor.queue.task_done()
