"""Every setting of a server, read once from the environment (``SGL_STATEFUL_*``) and passed on.

``sgl-stateful serve`` sets the environment from its own options, so that SGLang's subprocesses read the same values.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from pathlib import Path

from pydantic import AliasChoices, Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from memstore import InvalidLocation, MemStoreSettings
from memstore.kv.session_files import FOLDER
from memstore.location import directory_of
from sgl_stateful.encoding import Ladder, parse_ladder
from sgl_stateful.faithfulness.choice import Target
from sgl_stateful.repair import parse_repair

ENV_PREFIX = "SGL_STATEFUL_"


class KVStorage(StrEnum):
    """How facts' KV is kept, on disk and in the arena: in the KV pool's dtype, or as ``kv_splice.quantise`` has it."""

    NATIVE = "native"
    INT8 = "int8"


class StatefulSettings(BaseSettings):
    """Settings of one server; immutable."""

    # The store's URL may hold a password.
    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="ignore", hide_input_in_errors=True)

    memory: str | None = Field(
        None,
        repr=False,
        description="The memory store: DIR, sqlite:///DIR or redis://...; unset serves without memory.",
    )
    kv_dir: Path | None = Field(
        None,
        description="Directory of the facts' KV; unset is DIR/kv, or one of the user's cache for a store on a server.",
    )
    cache: Path = Field(
        Path("~/.cache"),
        validation_alias=AliasChoices(f"{ENV_PREFIX}CACHE", "XDG_CACHE_HOME"),
        description="Cache folder.",
    )
    embedder: str | None = Field(None, description="Sentence-transformers path or hub id; unset uses the shipped one.")
    policy: str = Field(
        "ladder:live+4+32",
        description="How facts are encoded: 'anchor:N', 'window:W' or by rank 'ladder:N+N' or 'ladder:live+N'.",
    )
    also_encode: str = Field("", description="More policies, comma-separated, to choose from per request.")
    repair: str = Field(
        "none",
        description="Tokens of spliced facts to compute anew: "
        "'none', 'first:M', 'share:P%', 'last:N', 'last:P%', or several with a plus between.",
    )
    faithfulness: Target = Field(
        Target.FAST,
        description="How near to full prefill spliced answers must be, as measured after start-up: 'fast', 'floor', "
        "'strict', or 'off' to measure nothing.",
    )
    header: str = Field(
        "Here is what was said in earlier conversations:\n",
        description="Text before the facts; it ends with a newline.",
    )
    footer: str = Field("", description="Text after the facts; empty, or it ends with a newline.")
    arena_mib: int = Field(1024, ge=1, description="Memory for encoded facts in the scheduler, MiB.")
    promote_tokens: int | None = Field(
        None,
        ge=0,
        description="Most tokens of recurring prompts with facts to prefill exactly in idle time; unset is an eighth "
        "of the KV pool, 0 none.",
    )
    kv_storage: KVStorage = Field(
        KVStorage.INT8,
        description="Encoded facts in memory and on disk: 'int8', about half of bf16's bytes, or 'native', as the KV "
        "pool has them.",
    )
    kv_map_gib: int = Field(64, ge=1, description="Upper bound of the KV blob store on disk, GiB (sparse).")
    max_fact_tokens: int = Field(1024, ge=16, description="A longer fact is refused.")
    encode_concurrency: int = Field(8, ge=1, description="Encoding requests in flight at once.")
    encode_wait_s: float = Field(120.0, gt=0, description="How long 'wait' waits for KV before it gives up.")
    retrieve_threads: int = Field(16, ge=1, description="Searches at once; further requests wait.")
    retrieve_timeout_s: float = Field(10.0, gt=0, description="A request whose search takes longer goes without facts.")
    store_threads: int = Field(8, ge=1, description="Other calls to the store at once.")
    feed_poll_s: float = Field(0.5, gt=0, description="How often changes by other processes are looked for.")
    expire_every_s: float = Field(60.0, gt=0, description="How often facts that have expired are removed.")
    strict_forgetting: bool = Field(
        False,
        description="Drop KV at once that saw a fact which was changed or deleted, not once it is remade.",
    )
    session_budget_tokens: int | None = Field(
        None, ge=0, description="Cells that pinned sessions may have in all; unset is half the KV pool."
    )
    session_quota_tokens: int | None = Field(
        None, ge=0, description="Cells that pinned sessions of one owner may have; unset is the whole budget."
    )
    session_ttl_s: float = Field(3600.0, gt=0, description="Idle time after which a session ends unless it says so.")
    session_queue: int = Field(64, ge=1, description="Appends of one session that may wait.")
    session_aging_s: float = Field(5.0, gt=0, description="Waiting this long counts as one step of priority.")
    session_sweep_s: float = Field(1.0, gt=0, description="How often sessions that have expired are looked for.")
    session_versions: int = Field(1000, ge=1, description="Versions of a session that 'rewind' and 'fork' can reach.")
    session_snapshots_mib: int = Field(
        4096, ge=0, description="Disk for the KV of sessions, to be read back after a restart, MiB; 0 keeps none."
    )
    session_owner_classes: str = Field(
        "", description="Comma-separated prefixes of owners that metrics tell apart; all others are 'other'."
    )
    flash_limit: int = Field(4096, ge=0, description="Questions that may be registered on sessions, in all.")
    flash_owner_limit: int = Field(256, ge=0, description="Questions that one owner may have registered.")
    flash_batch: int = Field(16, ge=1, description="Registered questions that are evaluated at once.")
    flash_aging_s: float = Field(
        5.0, gt=0, description="Waiting this long counts as one step of a question's priority."
    )
    flash_busy_share: float = Field(
        0.0, ge=0, le=1, description="Share of the time with requests in flight that may go into registered questions."
    )
    flash_rest_s: float = Field(
        0.05, ge=0, description="Registered questions are evaluated when no request has been in flight for so long."
    )
    flash_audit_every: int = Field(50, ge=1, description="One in so many stored answers served is decoded again.")
    flash_semantic_audit_every: int = Field(
        5, ge=1, description="One in so many stored answers served to other words is decoded for real."
    )
    flash_events: int = Field(256, ge=1, description="Changes of answers that are kept of a session for its followers.")
    flash_readers: int = Field(16, ge=0, description="How many may follow the answers of one session.")
    flash_reader_s: float = Field(30.0, gt=0, description="A follower that takes nothing for so long is let go.")
    entry_limit: int = Field(1024, ge=0, description="Entries that may be registered on sessions, in all.")
    entry_owner_limit: int = Field(64, ge=0, description="Entries that one owner may have registered.")
    entry_cells: int | None = Field(
        None,
        ge=0,
        description="Cells that entries may have pinned beside their sessions; unset is an eighth of the KV pool, "
        "0 none.",
    )
    allow_unverified_splice: bool = Field(False, description="Serve even though the start-up self-test failed.")
    self_test: bool = Field(True, description="Run the self-test at start-up.")

    @field_validator("memory")
    @classmethod
    def _is_a_location(cls, memory: str | None) -> str | None:
        try:
            if memory is not None:
                directory_of(memory)
        except InvalidLocation as error:
            raise ValueError(str(error)) from None
        return memory

    @field_validator("repair")
    @classmethod
    def _is_a_repair(cls, repair: str) -> str:
        parse_repair(repair)
        return repair

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

    def promotion_budget(self, pool_tokens: int) -> int:
        """Most tokens of promoted blocks, with a KV pool of ``pool_tokens``."""
        return pool_tokens // 8 if self.promote_tokens is None else self.promote_tokens

    def entry_budget(self, pool_tokens: int) -> int:
        """Cells that entries may have pinned, with a KV pool of ``pool_tokens``."""
        return pool_tokens // 8 if self.entry_cells is None else min(self.entry_cells, pool_tokens)

    def owner_classes(self) -> list[str]:
        """Prefixes of owners that metrics tell apart."""
        return [prefix.strip() for prefix in self.session_owner_classes.split(",") if prefix.strip()]

    def store_settings(self) -> MemStoreSettings:
        """Settings of the store: its own environment variables (``MEMSTORE_*``), and what this server says besides."""
        base = MemStoreSettings()
        ours: dict[str, object] = {}
        if self.embedder is not None:
            ours["embedder_model"] = self.embedder
        if "embedder_threads" not in base.model_fields_set:
            ours["embedder_threads"] = 1
        if "kv_map_gib" in self.model_fields_set or "blob_map_size_bytes" not in base.model_fields_set:
            ours["blob_map_size_bytes"] = self.kv_map_gib << 30
        return base.model_copy(update=ours)

    def snapshot_path(self) -> Path | None:
        """Return the directory of sessions' KV; None where none is kept.

        Raises
        ------
        InvalidLocation
            The store's URL cannot be understood.
        """
        return None if self.memory is None or not self.session_snapshots_mib else self.kv_path() / FOLDER

    def kv_path(self) -> Path:
        """Return the directory of the facts' KV, on this machine in any case.

        Raises
        ------
        InvalidLocation
            The store's URL cannot be understood.
        """
        assert self.memory is not None, "no memory"
        if self.kv_dir is not None:
            return self.kv_dir
        if (directory := directory_of(self.memory)) is not None:
            return directory / "kv"
        # Here and not above: who has no Redis should not wait for its client.
        from memstore.records.redis.options import RedisOptions, parse_location

        location = parse_location(self.memory, RedisOptions.from_settings(self.store_settings())).url
        digest = hashlib.blake2b(location.encode(), digest_size=8).hexdigest()
        return self.cache.expanduser().absolute() / "sgl-stateful" / "kv" / digest
