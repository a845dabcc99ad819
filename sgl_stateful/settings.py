"""Every setting of a server, read once from the environment (``SGL_STATEFUL_*``) and passed on.

``sgl-stateful serve`` sets the environment from its own options, so that SGLang's subprocesses read the same values.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from memstore import MemStoreSettings
from sgl_stateful.encoding import Ladder, parse_ladder

ENV_PREFIX = "SGL_STATEFUL_"


class StatefulSettings(BaseSettings):
    """Settings of one server; immutable."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="ignore")

    memory: Path | None = Field(None, description="Directory of the memory store; unset serves without memory.")
    embedder: str | None = Field(None, description="Sentence-transformers path or hub id; unset uses the shipped one.")
    policy: str = Field(
        "ladder:0+4", description="How facts are encoded: 'anchor:N', 'window:W' or 'ladder:N+N+...' by rank."
    )
    also_encode: str = Field("", description="More policies, comma-separated, to choose from per request.")
    header: str = Field(
        "Here is what was said in earlier conversations:\n",
        description="Text before the facts; it ends with a newline.",
    )
    footer: str = Field("", description="Text after the facts; empty, or it ends with a newline.")
    arena_mib: int = Field(1024, ge=1, description="Memory for encoded facts in the scheduler, MiB.")
    kv_map_gib: int = Field(64, ge=1, description="Upper bound of the KV blob store on disk, GiB (sparse).")
    max_fact_tokens: int = Field(1024, ge=16, description="A longer fact is refused.")
    encode_concurrency: int = Field(8, ge=1, description="Encoding requests in flight at once.")
    encode_wait_s: float = Field(120.0, gt=0, description="How long 'wait' waits for KV before it gives up.")
    allow_unverified_splice: bool = Field(False, description="Serve even though the start-up self-test failed.")
    self_test: bool = Field(True, description="Run the self-test at start-up.")

    @field_validator("header", "footer")
    @classmethod
    def _ends_with_newline(cls, text: str) -> str:
        if text and not text.endswith("\n"):
            raise ValueError("must be empty or end with a newline, so that token ids never merge across its end")
        return text

    def ladders(self) -> list[Ladder]:
        """What requests can choose from, the default first.

        Raises
        ------
        ValueError
            A policy that is not known.
        """
        names = [self.policy, *(name.strip() for name in self.also_encode.split(",") if name.strip())]
        return [parse_ladder(name) for name in dict.fromkeys(names)]

    def store_settings(self) -> MemStoreSettings:
        """Settings of the store, as this server wants them."""
        return MemStoreSettings(
            embedder_model=self.embedder, embedder_threads=1, blob_map_size_bytes=self.kv_map_gib << 30
        )
