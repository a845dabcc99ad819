"""What a command works with: the store that its options name, opened when it is first needed."""

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from memstore.cli.failures import NotFound
from memstore.cli.output import Output
from memstore.cli.stored_embedder import StoredEmbedder, stored_fingerprint
from memstore.embedding import Embedder
from memstore.errors import EmbeddingError, InvalidLocation
from memstore.kv.blobs import KVBlobs
from memstore.location import directory_of, open_records
from memstore.records.base import RecordStore
from memstore.records.sqlite import FILE_NAME
from memstore.session_log import may_have_sessions, open_session_log
from memstore.settings import MemStoreSettings
from memstore.store import MemStore, embedder_of
from memstore.types import OwnerId


@dataclass(frozen=True)
class Host:
    """What the process lends to a command."""

    load_embedder: Callable[[MemStoreSettings], Embedder] = embedder_of
    wait: Callable[[float], None] = time.sleep


class Session:
    """One run of one command.

    Parameters
    ----------
    location
        Where the store is, as given.
    kv
        Directory of the KV cache; None is `kv` in the directory of the store, where there is one.
    makes_store
        Whether the command may begin a new store. Any other one would answer a mistyped directory with an empty store.
    """

    def __init__(self, host: Host, *, location: str | None, kv: Path | None, as_json: bool, makes_store: bool) -> None:
        self.host = host
        self.out = Output(as_json=as_json)
        self._given = location
        self._kv = kv
        self._makes_store = makes_store
        self._stack = ExitStack()

    @cached_property
    def settings(self) -> MemStoreSettings:
        """Read from the environment."""
        return MemStoreSettings()

    @cached_property
    def location(self) -> str:
        """Where the store is: a directory or a URL, which may hold a password."""
        if not self._given:
            raise InvalidLocation("no store is named: pass --store, or set MEMSTORE_URL")
        directory = directory_of(self._given)
        if not self._makes_store and not _is_begun(directory):
            raise NotFound(f"there is no store in {directory}: check --store, or add a fact to begin one")
        return self._given

    @property
    def has_store(self) -> bool:
        """Whether opening the store begins none."""
        return _is_begun(directory_of(self.location))

    @cached_property
    def records(self) -> RecordStore:
        """The records alone, which need no embedder."""
        records = open_records(self.location, self.settings)
        self._stack.callback(records.close)
        return records

    def count_sessions(self, owner: OwnerId) -> int:
        """How many sessions of an owner the store keeps; begins no token log."""
        if not may_have_sessions(self.location):
            return 0
        with closing(open_session_log(self.location, self.settings)) as log:
            return log.count(owner)

    @cached_property
    def kv_path(self) -> Path | None:
        """Where the KV cache is, or None where none was named and none is beside the store."""
        if self._kv is not None:
            if not self._kv.is_dir():
                raise NotFound(f"there is no KV cache in {self._kv}: check --kv")
            return self._kv
        directory = directory_of(self.location)
        beside = None if directory is None else directory / "kv"
        return beside if beside is not None and beside.is_dir() else None

    @cached_property
    def blobs(self) -> KVBlobs | None:
        """The KV cache, or None; one that is damaged stays where it is, and raises `BlobStoreDamaged`."""
        return self._open_blobs(replace_damaged=False)

    def open_store(self, *, with_kv: bool, replace_damaged_kv: bool = False) -> MemStore:
        """Return the store, for a command that reads or changes facts.

        Parameters
        ----------
        with_kv
            Whether the KV cache follows what the command changes; a command that only reads leaves it closed.
        replace_damaged_kv
            Whether a KV cache that is damaged, or of another release, is moved aside for an empty one.

        Raises
        ------
        BlobStoreDamaged
        """
        records = open_records(self.location, self.settings)
        try:
            stored = stored_fingerprint(records)
        finally:
            records.close()
        store = MemStore(
            self.location,
            embedder=StoredEmbedder(stored, self.load_embedder),
            settings=self.settings,
            blobs=self._open_blobs(replace_damaged=replace_damaged_kv) if with_kv else None,
        )
        return self._stack.enter_context(store)

    def load_embedder(self, model: str | None = None) -> Embedder:
        """Load the embedder that the settings name, or `model`."""
        settings = self.settings if model is None else self.settings.model_copy(update={"embedder_model": model})
        try:
            return self.host.load_embedder(settings)
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            name = settings.embedder_model or "that ships with the package"
            raise EmbeddingError(f"the embedder {name} cannot be loaded: {error}") from error

    def _open_blobs(self, *, replace_damaged: bool) -> KVBlobs | None:
        if self.kv_path is None:
            return None
        blobs = KVBlobs(self.kv_path, settings=self.settings, replace_damaged=replace_damaged)
        return self._stack.enter_context(blobs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _is_begun(directory: Path | None) -> bool:
    # On a server, an empty store and none are the same.
    return directory is None or (directory / FILE_NAME).exists()
