"""A server of ours as a child process: started for one run, and always stopped."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from locomo.errors import ServerFailed

_POLL_S = 0.25
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _end_with_parent() -> None:
    """Have Linux terminate this process when its parent is killed, who can then end nothing himself."""
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """``sgl-stateful serve`` on a free port of this machine; a context manager.

    It prefills nothing exactly that is to be spliced, and measures nothing itself, so that asking twice measures the
    same thing twice; flags may have it do so.

    Parameters
    ----------
    model
        Model directory.
    memory
        Directory of the memory store.
    flags
        More flags, of ours or of SGLang.
    log
        File that takes the server's output.

    Raises
    ------
    ServerFailed
        On entering: the server ended or was not ready in time. The message holds the end of its log.
    """

    def __init__(
        self, model: Path, memory: Path, *, flags: Sequence[str] = (), log: Path, ready_timeout_s: float = 300.0
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = shutil.which("sgl-stateful", path=str(Path(sys.executable).parent))
        assert command is not None, "sgl-stateful is not installed beside this interpreter"
        self._command = [command, "serve", "--model", str(model), "--memory", str(memory), "--port", str(self.port)]
        self._command += ["--promote-tokens", "0", "--faithfulness", "off", *flags]
        self._log = log
        self._ready_timeout_s = ready_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the whole group is ended together, and Ctrl-C reaches us first
                preexec_fn=None if _LIBC is None else _end_with_parent,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
            )
        try:
            self._wait_ready(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._ready_timeout_s
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise ServerFailed(f"the server ended with code {process.returncode}:\n{self.log_tail()}")
            try:
                if httpx.get(f"{self.url}/v1/memory/status", timeout=5.0).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(_POLL_S)
        raise ServerFailed(f"the server was not ready in {self._ready_timeout_s:.0f} s:\n{self.log_tail()}")

    def log_tail(self, lines: int = 15) -> str:
        """The last lines of the server's log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if (process := self._process) is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10.0)

    def stop(self) -> None:
        """End the server and everything that it started."""
        process = self._process
        if process is None:
            return
        self._process = None
        for sign, patience_s in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 10.0)):
            try:
                os.killpg(process.pid, sign)
                process.wait(patience_s)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        # A child of the server may have outlived it.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
