"""The two servers as child processes on the same flags: ours, and a stock SGLang without our cache backend."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from locomo.server import free_port

_POLL_S = 0.25
_READY_TIMEOUT_S = 300.0
_COMPARED = ("attention_backend", "dtype", "device", "page_size", "chunked_prefill_size", "max_total_num_tokens")


class ServerEnded(RuntimeError):
    """A server did not start or has ended; the message holds the end of its log."""


class Server:
    """One server; a context manager, ready once entered.

    Parameters
    ----------
    name
        In logs and rows.
    command
        Without the port.
    ready_paths
        All answer 200 once everything serves.
    environment
        More variables.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        ready_paths: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [*command, "--port", str(self.port)]
        self._ready_urls = [self.url + path for path in ready_paths]
        self._environment = {**os.environ, **environment}
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.started_s = 0.0
        """How long it took to be ready."""

    def __enter__(self) -> Self:
        self.launch()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def launch(self) -> None:
        """Start it, and do not wait."""
        assert self._process is None, "it runs"
        self.started_s = -time.monotonic()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=self._environment
            )

    def wait_ready(self) -> None:
        """Return once it serves.

        Raises
        ------
        ServerEnded
            It has ended, or is not ready in five minutes.
        """
        assert self._process is not None, "it does not run"
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerEnded(f"{self.name} ended with code {self._process.returncode}:\n{self._log_tail()}")
            try:
                if all(httpx.get(url, timeout=30.0).status_code == httpx.codes.OK for url in self._ready_urls):
                    self.started_s += time.monotonic()
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(_POLL_S)
        raise ServerEnded(f"{self.name} was not ready in {_READY_TIMEOUT_S:.0f} s:\n{self._log_tail()}")

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """While this lasts the server does nothing at all: its processes are stopped by a signal."""
        assert self._process is not None, "it does not run"
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def info(self) -> dict[str, Any]:
        """What the server says of itself."""
        answer = httpx.get(f"{self.url}/server_info", timeout=60.0)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

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

    def _log_tail(self, lines: int = 25) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])


def shared_flags(*, dtype: str, pool_tokens: int) -> list[str]:
    """What either server and the bare model are started with."""
    return ["--device", "cpu", "--dtype", dtype, "--max-total-tokens", str(pool_tokens), "--enable-metrics"]


def rival_server(model: Path, flags: Sequence[str], directory: Path) -> Server:
    """SGLang's own launcher with its own radix cache.

    That it serves on a CPU at all, and its attention, come from the same plugin as ours.
    """
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *flags]
    return Server("rival", command, ready_paths=("/health",), environment={}, log=directory / "rival.log")


def our_server(model: Path, flags: Sequence[str], directory: Path, *, budget_tokens: int) -> Server:
    """`sgl-stateful serve`; another one on the same directory finds the sessions of this one."""
    program = shutil.which("sgl-stateful", path=str(Path(sys.executable).parent))
    assert program is not None, "sgl-stateful is not installed beside this interpreter"
    command = [program, "serve", "--model", str(model), "--memory", str(directory / "memory"), *flags]
    environment = {"SGL_STATEFUL_SESSION_BUDGET_TOKENS": str(budget_tokens), "SGL_STATEFUL_FAITHFULNESS": "off"}
    paths = ("/health", "/v1/memory/status", "/v1/sessions/stats")
    return Server("ours", command, ready_paths=paths, environment=environment, log=directory / "ours.log")


@contextmanager
def both(ours: Server, rival: Server) -> Iterator[None]:
    """Both servers, ready; started together.

    Raises
    ------
    AssertionError
        They do not compute alike.
    """
    try:
        for server in (ours, rival):
            server.launch()
        for server in (ours, rival):
            server.wait_ready()
        compared(ours.info(), rival.info())
        yield
    finally:
        for server in (ours, rival):
            server.stop()


def compared(ours: Mapping[str, Any], rival: Mapping[str, Any]) -> dict[str, Any]:
    """Return what has to be equal for the comparison to be one of caches alone.

    Raises
    ------
    AssertionError
        It differs, or the rival does not run its own radix cache.
    """
    mine, theirs = ({name: info[name] for name in _COMPARED} for info in (ours, rival))
    assert mine == theirs, f"the servers differ: {mine} and {theirs}"
    assert ours["radix_cache_backend"] == "stateful", ours["radix_cache_backend"]
    assert rival["radix_cache_backend"] is None, rival["radix_cache_backend"]
    assert not rival["disable_radix_cache"], "the rival has no radix cache"
    return mine
