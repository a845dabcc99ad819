"""The one settings object; read from the environment once, by whoever starts the process."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Boost = Annotated[float, Field(ge=0, le=1)]

REDIS_SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel")
REDIS_PREFIX = r"^[A-Za-z0-9_.-]{1,64}$"
"""Without `:`, which ends the prefix in a key: no store's keys are a part of another's."""


class MemStoreSettings(BaseSettings):
    """Settings of a store, each also an environment variable `MEMSTORE_<NAME>`."""

    model_config = SettingsConfigDict(env_prefix="MEMSTORE_", frozen=True, extra="forbid")

    embedder_model: str | None = None
    """Path or hub id of a sentence-transformers model; None is the model that ships with the package."""

    embedder_device: str = "cpu"

    embedder_threads: Positive | None = None
    """Threads of torch in this process; None leaves them as they are."""

    embed_batch: Positive = 64
    """Texts that are embedded between two reports of progress."""

    max_open_indexes: Positive = 64
    """Owners whose vectors stay in memory; the least recently used one goes first."""

    max_index_bytes: Positive = 2 * 2**30
    """What the vectors of those owners may take together."""

    near_duplicate_score: Annotated[float, Field(ge=-1, le=1)] = 0.95
    """Cosine similarity from which on a fact is reported as a near duplicate of another of the same speaker."""

    month_boost: Boost = 0.1
    """Weight, in a hybrid search, of being of a month that the query names; 0 is none."""

    neighbour_boost: Boost = 0.2
    """Weight, in a hybrid search, of the better one of the two facts beside a fact in its stream; 0 is none."""

    busy_timeout_s: Seconds = 30.0
    """How long a write waits for another writer."""

    feed_retention: Positive = 100_000
    """Changes that the feed keeps; who falls further behind reads the facts anew."""

    idempotency_ttl_s: Seconds = 7 * 86400.0
    """How long an idempotency key is remembered at least."""

    redis_prefix: Annotated[str, Field(pattern=REDIS_PREFIX)] = "memstore"
    """What every key of the store in Redis starts with."""

    redis_password: SecretStr | None = None
    """Instead of one in the URL, where it would show in the list of processes."""

    sentinel_password: SecretStr | None = None

    redis_ca: Path | None = None
    """Certificate authority of a `rediss://` server; None is the system's."""

    redis_cert: Path | None = None
    """Client certificate."""

    redis_key: Path | None = None
    """Key of the client certificate."""

    redis_max_connections: Positive = 32

    redis_timeout_s: Seconds = 2.0
    """How long one command may take, and how long connecting may."""

    redis_retries: Annotated[int, Field(ge=0)] = 2
    """Repetitions of a command whose connection failed."""

    blob_map_size_bytes: Positive = 64 * 2**30
    """What the KV cache holds, beyond which the encodings used longest ago are evicted. The file grows as needed."""

    blob_max_readers: Positive = 512
    """Concurrent read transactions on the KV cache, over all processes."""
