"""What the bench runs on: mem0 in a directory of its own, Redis servers, and the versions of everything."""

import hashlib
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import redis

MEM0_REQUIREMENTS = (
    "mem0ai==2.2.1",
    # What importing it needs and the project does not have. The rest of its requirements (openai, httpx, pydantic,
    # faiss, sentence-transformers) it finds in the project's environment, in the versions that are pinned there.
    "posthog==7.91.1",
    "backoff==2.2.1",
    "qdrant-client==1.20.0",
    "portalocker==4.4.2",
)
"""Installed without their dependencies: what mem0ai asks for (protobuf below 7) is not what SGLang's pins allow."""


def mem0_directory(cache: Path) -> Path:
    """Return a directory to put on the path of a process that imports mem0; made at the first call."""
    pinned = "\n".join([*MEM0_REQUIREMENTS, platform.python_version()])
    directory = cache / f"mem0-{hashlib.sha256(pinned.encode()).hexdigest()[:12]}"
    if not directory.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = tempfile.mkdtemp(dir=cache)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", partial]
        try:
            subprocess.run([*command, *MEM0_REQUIREMENTS], check=True)
            os.replace(partial, directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return directory


class RedisServer:
    """A redis-server on a free port with its files in `directory`; appended to disk every second.

    Raises
    ------
    FileNotFoundError
        Where there is no redis-server.
    """

    def __init__(self, directory: Path) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise FileNotFoundError("no redis-server on the PATH")
        directory.mkdir(parents=True)
        self._directory = directory
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{port}/0"
        options = {
            "bind": "127.0.0.1",
            "port": port,
            "dir": directory,
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "logfile": directory / "server.log",
        }
        arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        self._process = subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL)
        self._client = redis.Redis(port=port)
        self._wait_until_up()
        self._empty_bytes = int(self._client.info("memory")["used_memory"])

    def wait_until_quiet(self) -> None:
        """Return when no log is being rewritten."""
        while (state := self._client.info("persistence"))["aof_rewrite_in_progress"] or state["aof_rewrite_scheduled"]:
            time.sleep(0.1)

    def memory_bytes(self) -> int:
        """Return what the data takes in the server's memory."""
        return int(self._client.info("memory")["used_memory"]) - self._empty_bytes

    def log_bytes(self) -> int:
        """Return the size of the append-only files."""
        return directory_bytes(self._directory / "appendonlydir")

    def rewrite_log(self) -> None:
        """Let the server write its append-only file anew, without what was overwritten."""
        self._client.bgrewriteaof()
        self.wait_until_quiet()

    def stop(self) -> None:
        """End the server."""
        self._client.close()
        self._process.terminate()
        self._process.wait()

    def _wait_until_up(self) -> None:
        for _ in range(200):
            try:
                self._client.ping()
                return
            except redis.ConnectionError:
                time.sleep(0.05)
        self.stop()
        raise TimeoutError(f"redis-server did not start: see {self._directory / 'server.log'}")


def directory_bytes(directory: Path) -> int:
    """Return the bytes of all files in a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def rss_bytes() -> int:
    """Return the resident memory of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def description() -> dict[str, object]:
    """Return versions, commit, machine and thread counts."""
    packages = ("faiss-cpu", "numpy", "redis", "sentence-transformers", "torch")
    here = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    server = shutil.which("redis-server")
    shown = subprocess.run([server, "--version"], capture_output=True, text=True).stdout.split() if server else []
    return {
        **{name: metadata.version(name) for name in packages},
        "mem0ai": MEM0_REQUIREMENTS[0].partition("==")[2],
        "redis-server": next((part[2:] for part in shown if part.startswith("v=")), "absent"),
        "python": platform.python_version(),
        "threads": int(os.environ["OMP_NUM_THREADS"]),
        "cpus": os.cpu_count(),
        "cpu": cpu_model(),
        "machine": platform.machine(),
        "commit": commit.stdout.strip() or "unknown",
    }


def cpu_model() -> str:
    """Return the processor's name where the kernel says it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"
