"""Running the command line in this process, with an embedder that needs no model."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from bigrams import BigramEmbedder
from typer.testing import CliRunner

from memstore import Embedder, Fact, MemStoreSettings
from memstore.cli import app
from memstore.cli.session import Host

Loader: TypeAlias = Callable[[MemStoreSettings], Embedder]


class Run:
    """What a command did."""

    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code, self.stdout, self.stderr = code, stdout, stderr

    @property
    def json(self) -> Any:
        assert self.code in (0, 1), self.stderr
        [line] = self.stdout.splitlines()
        return json.loads(line)


class CommandLine:
    """Runs commands on one store.

    Parameters
    ----------
    embedder
        Of the process; None makes a command fail that loads one.
    load
        Loads it, where a test looks at how.
    wait
        What happens between two looks of `watch`.
    """

    def __init__(
        self,
        location: str | None,
        *,
        embedder: Embedder | None = None,
        load: Loader | None = None,
        wait: Callable[[float], None] = lambda _: None,
        env: dict[str, str] | None = None,
    ) -> None:
        self._location = location
        self._load = load or loader_of(embedder)
        self._wait = wait
        self._env = env or {}

    def __call__(self, *arguments: str, stdin: str | bytes | None = None) -> Run:
        given = [*arguments, *([] if self._location is None else ["--store", self._location])]
        host = Host(load_embedder=self._load, wait=self._wait)
        env = {"MEMSTORE_URL": None, "MEMSTORE_DEBUG": None, **self._env}
        result = CliRunner().invoke(app, given, obj=host, input=stdin, env=env)
        return Run(result.exit_code, result.stdout, result.stderr)

    def with_embedder(self, embedder: Embedder | None) -> "CommandLine":
        return self.with_loader(loader_of(embedder))

    def with_loader(self, load: Loader) -> "CommandLine":
        return CommandLine(self._location, load=load, wait=self._wait)

    def with_wait(self, wait: Callable[[float], None]) -> "CommandLine":
        return CommandLine(self._location, load=self._load, wait=wait)


def loader_of(embedder: Embedder | None) -> Loader:
    def load(settings: MemStoreSettings) -> Embedder:
        assert embedder is not None, "the embedder was loaded"
        return embedder

    return load


def bigrams(location: str | None) -> CommandLine:
    return CommandLine(location, embedder=BigramEmbedder())


def in_process_of_its_own(arguments: Sequence[str], **options: Any) -> Run:
    done = subprocess.run(
        [sys.executable, "-m", "memstore.cli", *arguments], capture_output=True, text=True, timeout=240, **options
    )
    return Run(done.returncode, done.stdout, done.stderr)


def as_json(fact: Fact) -> dict[str, Any]:
    """The fact as JSON has it, by the standard library."""
    document: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(fact)))
    return document
