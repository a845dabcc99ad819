"""The parent's side of mem0ai, which runs in `mem0_child`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from memstore_bench.corpus import Corpus, fresh_question, fresh_text
from memstore_bench.ours import K


class Mem0Process:
    """A child process with mem0 on its path.

    Raises
    ------
    RuntimeError
        From any method, where the child ended; with what it wrote last.
    """

    def __init__(self, packages: Path, directory: Path) -> None:
        self._log = directory / "mem0.log"
        path = os.pathsep.join([str(packages), os.environ["PYTHONPATH"]])
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "memstore_bench.mem0_child", str(directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": path, "MEM0_DIR": str(directory / "mem0-home")},
            )

    def ask(self, op: str, **arguments: object) -> Any:
        """Return the child's answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"mem0's process ended in {op!r}:\n{self._log.read_text()[-3000:]}")
        return json.loads(answer)

    def close(self) -> None:
        """End the child."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Mem0:
    """One store of mem0, with the operations of `Ours`."""

    def __init__(self, process: Mem0Process, name: str, corpus: Corpus) -> None:
        self._process = process
        self._name = name
        self._corpus = corpus
        self._ask("open")

    def fill(self, num_facts: int) -> None:
        """Store the facts [0, num_facts), by mem0's bulk calls."""
        self._ask("fill", num_facts=num_facts)

    def fill_owners(self, num_owners: int, num_facts: int) -> None:
        """Store `num_facts` facts for each of `num_owners`: in one collection, and in one each."""
        self._ask("fill", num_facts=num_owners * num_facts, facts_per_owner=num_facts)
        self._process.ask("fill_owners", num_owners=num_owners, num_facts=num_facts)

    def search_owners(self, first: int, count: int) -> list[float]:
        """`Memory.search` in the facts of one owner each, of those in one collection."""
        milliseconds: list[float] = self._ask("search_owners", owners=list(range(first, first + count)), k=K)["ms"]
        return milliseconds

    def found_of_owners(self, count: int) -> list[int]:
        """Return how many hits `search_owners` has, of K, for the first owners."""
        found: list[int] = self._ask("search_owners", owners=list(range(count)), k=K)["found"]
        return found

    def open_owners(self, first: int, count: int) -> list[float]:
        """Open one owner's own collection each and search it, below `Memory`."""
        milliseconds: list[float] = self._process.ask("open_owners", owners=list(range(first, first + count)), k=K)
        return milliseconds

    def search(self, first: int, count: int) -> list[float]:
        """`Memory.search` for questions that have to be embedded."""
        return self._milliseconds([fresh_question(first + i) for i in range(count)], {})

    def search_vector(self, first: int, count: int, *, filters: dict[str, int] | None = None) -> list[float]:
        """`Memory.search` for questions whose vectors its embedder only looks up."""
        return self._milliseconds(self._known(first, count), filters or {})

    def search_below(self, first: int, count: int) -> list[float]:
        """Search the vector store below `Memory`."""
        milliseconds: list[float] = self._ask("search_below", questions=self._numbers(first, count), k=K)
        return milliseconds

    def nearest(self, question: int, *, filters: dict[str, int] | None = None) -> list[int]:
        """Return the facts that `Memory.search` finds for a question."""
        found: list[list[int]] = self._ask("search", queries=self._known(question, 1), k=K, filters=filters or {})[
            "found"
        ]
        return found[0]

    def add(self, first: int, count: int) -> list[float]:
        """`Memory.add` of one text each."""
        texts = [fresh_text(i) for i in range(first, first + count)]
        milliseconds: list[float] = self._ask("add", texts=texts, first=first)
        return milliseconds

    def check_fields(self) -> None:
        """Raise AssertionError where what was stored in bulk is not what `Memory.add` would have stored."""
        filled, added = self._ask("payload_fields")
        assert filled == added, f"mem0's add stores {added}, not {filled}"

    def update(self, first: int, count: int) -> list[float]:
        """`Memory.update` of one text each."""
        facts = list(range(first, first + count))
        milliseconds: list[float] = self._ask("update", facts=facts, texts=[fresh_text(-1 - i) for i in facts])
        return milliseconds

    def delete(self, first: int, count: int) -> list[float]:
        """`Memory.delete` of one fact each."""
        milliseconds: list[float] = self._ask("delete", facts=list(range(first, first + count)))
        return milliseconds

    def reopen(self, first: int, count: int) -> list[float]:
        """Open the store's files and search once."""
        milliseconds: list[float] = self._ask("reopen", questions=self._numbers(first, count), k=K)
        return milliseconds

    def bytes(self) -> dict[str, int]:
        """Return the size of the index, the documents and the history."""
        return {"disk": self._ask("bytes")}

    def close(self) -> None:
        """Close the store."""
        self._ask("close")

    def _ask(self, op: str, **arguments: object) -> Any:
        return self._process.ask(op, store=self._name, **arguments)

    def _milliseconds(self, queries: list[str], filters: dict[str, int]) -> list[float]:
        milliseconds: list[float] = self._ask("search", queries=queries, k=K, filters=filters)["ms"]
        return milliseconds

    def _numbers(self, first: int, count: int) -> list[int]:
        return [i % len(self._corpus.questions) for i in range(first, first + count)]

    def _known(self, first: int, count: int) -> list[str]:
        return [self._corpus.questions[i] for i in self._numbers(first, count)]
