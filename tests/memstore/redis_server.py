"""Real `redis-server` processes for tests."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

BINARY = shutil.which("redis-server")
_DEADLINE_S = 20.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until(condition: Callable[[], bool], what: str, *, deadline_s: float = _DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {deadline_s} s"
        time.sleep(0.02)


class Certificates:
    """A certificate authority in a directory, which signed one server's and one client's certificate."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.ca = directory / "ca.crt"
        self._openssl(
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=test authority",
            "-keyout",
            "ca.key",
            "-out",
            "ca.crt",
        )
        for name in ("server", "client"):
            (directory / f"{name}.ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
            self._openssl(
                "req",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-subj",
                f"/CN={name}",
                "-keyout",
                f"{name}.key",
                "-out",
                f"{name}.csr",
            )
            self._openssl(
                "x509",
                "-req",
                "-in",
                f"{name}.csr",
                "-CA",
                "ca.crt",
                "-CAkey",
                "ca.key",
                "-CAcreateserial",
                "-days",
                "2",
                "-extfile",
                f"{name}.ext",
                "-out",
                f"{name}.crt",
            )

    def pair(self, name: str) -> tuple[Path, Path]:
        return self.directory / f"{name}.crt", self.directory / f"{name}.key"

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.directory, check=True, capture_output=True)


class RedisServer:
    """One `redis-server` on a free port of 127.0.0.1, with a directory of its own."""

    def __init__(
        self,
        *options: str,
        certificates: Certificates | None = None,
        client_certificate: bool = False,
        sentinel: Sequence[str] | None = None,
        password: str | None = None,
    ) -> None:
        assert BINARY is not None, "no redis-server"
        self._folder = tempfile.TemporaryDirectory(prefix="redis-")
        self.directory = Path(self._folder.name)
        self.port = free_port()
        self.certificates = certificates
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None
        lines = [f"dir {self.directory}", "bind 127.0.0.1", "repl-diskless-sync-delay 0", *options]
        if password is not None:
            lines.append(f"requirepass {password}")
        if certificates is None:
            lines.append(f"port {self.port}")
        else:
            cert, key = certificates.pair("server")
            lines += ["port 0", f"tls-port {self.port}", f"tls-cert-file {cert}", f"tls-key-file {key}"]
            lines += [
                f"tls-ca-cert-file {certificates.ca}",
                f"tls-auth-clients {'yes' if client_certificate else 'no'}",
            ]
        self._config = self.directory / "redis.conf"
        self._config.write_text("\n".join([*lines, *(sentinel or [])]) + "\n")
        self._is_sentinel = sentinel is not None
        self.start()

    @property
    def url(self) -> str:
        return f"redis{'s' if self.certificates else ''}://127.0.0.1:{self.port}"

    def client(self) -> redis.Redis:
        """An administrator's connection."""
        secure = {}
        if self.certificates is not None:
            cert, key = self.certificates.pair("client")
            secure = {
                "ssl": True,
                "ssl_ca_certs": str(self.certificates.ca),
                "ssl_certfile": str(cert),
                "ssl_keyfile": str(key),
            }
        return redis.Redis(port=self.port, host="127.0.0.1", password=self._password, protocol=2, **secure)

    def start(self) -> None:
        assert self._process is None, "started twice"
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(BINARY), str(self._config), *(["--sentinel"] if self._is_sentinel else [])],
                stdout=log,
                stderr=log,
                env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
            )
        wait_until(self._answers, f"an answer of redis-server on port {self.port}")

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def on_disk(self, text: bytes) -> list[str]:
        """Names of the files in its directory that hold `text`."""
        return [path.name for path in self.directory.rglob("*") if path.is_file() and text in path.read_bytes()]

    def close(self) -> None:
        self.kill()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.directory / "log").read_text()
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False
