"""`MemStore` as the bench drives it: every operation on a list of items, the milliseconds of each."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from memstore import MemStore, MemStoreSettings, NewFact, SearchHit
from memstore.embedding import Embedder, Vectors
from memstore_bench.corpus import OWNER, Corpus, fresh_question, fresh_text, metadata_of
from memstore_bench.environment import RedisServer, directory_bytes
from memstore_bench.measure import timed

K = 10
_BATCH = 1000
SETTINGS = MemStoreSettings(max_open_indexes=64)


class Ours:
    """One store on one backend, with the facts [0, num_facts) of the corpus under one owner.

    Parameters
    ----------
    directory
        Of SQLite's files, or of the Redis server's.
    server
        None is SQLite.
    """

    def __init__(self, directory: Path, corpus: Corpus, embedder: Embedder, *, server: RedisServer | None) -> None:
        self.location: str | Path = directory if server is None else server.url
        self._directory = directory
        self._corpus = corpus
        self._embedder = embedder
        self._server = server
        self._places = {text: i for i, text in enumerate(corpus.texts)}
        self._ids: dict[int, str] = {}
        self._store = self._open()

    def fill(self, num_facts: int) -> None:
        """Store the facts [0, num_facts)."""
        for start in range(0, num_facts, _BATCH):
            numbers = range(start, min(start + _BATCH, num_facts))
            facts = self._store.add_many(OWNER, self._facts(numbers))
            self._ids.update({i: fact.id for i, fact in zip(numbers, facts, strict=True)})
        self.wait_until_quiet()

    def fill_owners(self, num_owners: int, num_facts: int) -> None:
        """Store `num_facts` facts for each of `num_owners`."""
        for owner in range(num_owners):
            self._store.add_many(f"owner-{owner}", self._facts(range(owner * num_facts, (owner + 1) * num_facts)))
        self.wait_until_quiet()

    def wait_until_quiet(self) -> None:
        """Return when the backend does nothing in the background."""
        if self._server is not None:
            self._server.wait_until_quiet()

    def search(self, first: int, count: int, *, mode: str = "vector") -> list[float]:
        """Search for questions that have to be embedded, or by words alone."""
        questions = [fresh_question(first + i) for i in range(count)]
        return [timed(self._store.search, OWNER, question, k=K, mode=mode)[0] for question in questions]

    def search_vector(self, first: int, count: int, *, where: dict[str, int] | None = None) -> list[float]:
        """Search for questions whose vectors are known."""
        vectors = [self._vector(i) for i in range(first, first + count)]
        return [timed(self._store.search_vector, OWNER, vector, K, where=where)[0] for vector in vectors]

    def nearest(self, question: int, *, where: dict[str, int] | None = None) -> list[int]:
        """Return the facts nearest to a question."""
        hits = self._store.search_vector(OWNER, self._vector(question), K, where=where)
        return [self._places.get(hit.fact.text, -1) for hit in hits]

    def add(self, first: int, count: int) -> list[float]:
        """Add one text each."""
        texts = [(fresh_text(i), metadata_of(i)) for i in range(first, first + count)]
        return [timed(self._store.add, OWNER, text, metadata=meta)[0] for text, meta in texts]

    def update(self, first: int, count: int) -> list[float]:
        """Give one fact each another text."""
        texts = [fresh_text(-1 - i) for i in range(first, first + count)]
        pairs = zip(range(first, first + count), texts, strict=True)
        return [timed(self._store.update, OWNER, self._ids[i], text=text)[0] for i, text in pairs]

    def delete(self, first: int, count: int) -> list[float]:
        """Delete one fact each."""
        return [timed(self._store.delete, OWNER, self._ids.pop(i))[0] for i in range(first, first + count)]

    def reopen(self, first: int, count: int) -> list[float]:
        """Open the store and search it once; the embedder is loaded already."""
        milliseconds = []
        for i in range(first, first + count):
            self._store.close()
            ms, (store, hits) = timed(self._first_search, i)
            assert len(hits) == K, f"found {len(hits)} of {K} after opening {self.location}"
            milliseconds.append(ms)
            self._store = store
        return milliseconds

    def open_owners(self, first: int, count: int) -> list[float]:
        """Search an owner each that this process has not searched before."""
        milliseconds = []
        for owner in range(first, first + count):
            vector = self._vector(owner)
            ms, hits = timed(self._store.search_vector, f"owner-{owner}", vector, K)
            assert len(hits) == K, f"found {len(hits)} of {K} in owner {owner}"
            milliseconds.append(ms)
        return milliseconds

    def bytes(self) -> dict[str, int]:
        """Return what the store takes, `disk` being compared; of SQLite once its log is in the database."""
        if self._server is None:
            self._store.close()
            size = directory_bytes(self._directory)
            self._store = self._open()
            return {"disk": size}
        taken = {"disk": self._server.log_bytes(), "server_memory": self._server.memory_bytes()}
        self._server.rewrite_log()
        return {**taken, "disk_rewritten": self._server.log_bytes()}

    def memory_by_owners(self, counts: Sequence[int]) -> list[dict[str, int]]:
        """Return, of a fresh process, what it holds after it searched the first `counts` owners."""
        request = {
            "location": str(self.location),
            "fingerprint": self._embedder.fingerprint,
            "dimension": self._embedder.dimension,
            "counts": list(counts),
        }
        command = [sys.executable, "-m", "memstore_bench.memory_child", json.dumps(request)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        taken: list[dict[str, int]] = json.loads(done.stdout)
        return taken

    def close(self) -> None:
        """Close the store and end its server."""
        self._store.close()
        if self._server is not None:
            self._server.stop()

    def _first_search(self, question: int) -> tuple[MemStore, list[SearchHit]]:
        store = self._open()
        return store, store.search_vector(OWNER, self._vector(question), K)

    def _vector(self, question: int) -> Vectors:
        rows = self._corpus.question_rows
        vector: Vectors = rows[question % len(rows)]
        return vector

    def _open(self) -> MemStore:
        return MemStore(self.location, embedder=self._embedder, settings=SETTINGS)

    def _facts(self, numbers: Sequence[int]) -> list[NewFact]:
        return [NewFact(self._corpus.texts[i], metadata=metadata_of(i)) for i in numbers]
