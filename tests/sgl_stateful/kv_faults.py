"""A KV store that does not take a write."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from memstore import BlobStoreFull, KVBlobs
from memstore.kv.rows import Rows


@contextmanager
def unwritable(blobs: KVBlobs, *, readable: bool = True) -> Iterator[None]:
    """Every write is refused, as on a full disk; every read too unless it is `readable`."""
    working = blobs._rows

    @contextmanager
    def refusing(*, write: bool = False, buffers: bool = False) -> Iterator[Rows]:
        if write or not readable:
            raise BlobStoreFull("no space left on the device")
        with working(write=write, buffers=buffers) as rows:
            yield rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blobs, "_rows", refusing)
        patch.setattr(blobs._writer, "_open_rows", refusing)
        yield
