"""The one settings object; read from the environment once, by whoever starts the process."""

from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

Positive = Annotated[int, Field(gt=0)]


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

    busy_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """How long a write waits for another writer."""

    blob_map_size_bytes: Positive = 16 * 2**30
    """Upper bound of what the KV cache holds, at which a put is refused. The file is sparse: it grows as needed."""

    blob_max_readers: Positive = 512
    """Concurrent read transactions on the KV cache, over all processes."""
