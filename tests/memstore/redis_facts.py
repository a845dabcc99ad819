"""Facts for tests of the Redis backend."""

import hashlib

import numpy as np

from memstore.records import Batch, Draft, Insertion
from memstore.records.redis import RedisOptions, RedisRecords
from memstore.types import Fact, NewFact, OwnerId

ANA, BO = OwnerId("ana"), OwnerId("bo")
EMBEDDER = "x:d4"
QUICK = RedisOptions(timeout_s=0.3, breaker_s=0.1)


class Clock:
    """Seconds, as a test sets them."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def opened(url: str, options: RedisOptions | None = None, *, clock: Clock | None = None) -> RedisRecords:
    records = RedisRecords(url, options=options, clock=clock or Clock())
    assert records.claim_embedder(EMBEDDER) == EMBEDDER
    return records


def vector(text: str) -> np.ndarray:
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
    row = np.random.default_rng(seed).standard_normal((1, 4))
    return (row / np.linalg.norm(row)).astype(np.float32)


def drafts(*texts: str, stream: str = "", expires_at: float | None = None) -> list[Draft]:
    return [Draft(NewFact(text, stream=stream, expires_at=expires_at), vector(text)) for text in texts]


def insert(records: RedisRecords, owner: OwnerId, *texts: str, stream: str = "") -> list[Insertion]:
    return records.apply(owner, Batch(drafts=drafts(*texts, stream=stream)), embedder=EMBEDDER).insertions


def add(records: RedisRecords, owner: OwnerId, *texts: str, stream: str = "") -> list[Fact]:
    return [insertion.fact for insertion in insert(records, owner, *texts, stream=stream)]


def texts_of(records: RedisRecords, owner: OwnerId) -> list[str]:
    return [fact.text for fact in records.page(owner, stream=None, limit=1000, after_seq=0)]
