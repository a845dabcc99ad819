"""Names of keys, and the values that are not a sealed record."""

import base64
import hashlib
from typing import NamedTuple

import numpy as np

from memstore.embedding import Vectors
from memstore.records.codec import content_digest
from memstore.types import Fact, FactState, OwnerId

_DIGEST_DIGITS = 32
_NEVER = "-"

OWNER_KEYS: dict[str, str] = {
    "head": "hash",
    "changes": "stream",
    "records": "hash",
    "index": "hash",
    "current": "zset",
    "superseded": "zset",
    "streams": "zset",
    "digests": "hash",
    "expiry": "zset",
    "history": "hash",
    "idempotency": "hash",
    "damaged": "hash",
    "sessions": "zset",
}
"""Name after the owner's prefix, and type; `vectors:{digest}` comes on top."""


class Keys:
    """Names of the keys of one store."""

    def __init__(self, prefix: str) -> None:
        self.root = f"{prefix}:"
        self.meta, self.embedders = f"{prefix}:meta", f"{prefix}:embedders"
        self.seq, self.position = f"{prefix}:seq", f"{prefix}:position"
        self.feed, self.owners, self.ids = f"{prefix}:feed", f"{prefix}:owners", f"{prefix}:ids"
        self.sessions = f"{prefix}:sessions"

    def of(self, owner: OwnerId) -> str:
        """Return what the names of all keys of `owner` start with."""
        return f"{self.root}o:{encode_owner(owner)}:"

    def session(self, session_id: str) -> str:
        """Return the key of what holds for a session as a whole."""
        return f"{self.root}session:{encode_session(session_id)}"

    def vectors(self, owner: OwnerId, embedder: str) -> str:
        """Return the key of the vectors that `embedder` made for `owner`."""
        return f"{self.of(owner)}vectors:{short_digest(embedder)}"


def encode_owner(owner: str) -> str:
    """Return `owner` in an alphabet without `:` and without wildcards, so that no name is a part of another."""
    return base64.urlsafe_b64encode(owner.encode()).rstrip(b"=").decode()


def encode_session(session_id: str) -> str:
    """Return a session's id in hex, which sorts as the ids do."""
    return session_id.encode().hex()


def decode_owner(encoded: bytes | str) -> OwnerId:
    """Return the owner; raise `ValueError` where it is not what `encode_owner` returns."""
    text = encoded if isinstance(encoded, str) else encoded.decode("ascii")
    owner = OwnerId(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True).decode())
    if encode_owner(owner) != text:
        raise ValueError(f"{text!r} is no encoded owner")
    return owner


def read_owner(encoded: bytes) -> OwnerId | None:
    """Return the owner in a stored value, or None where it is none."""
    try:
        return decode_owner(encoded)
    except ValueError:
        return None


def short_digest(text: str) -> str:
    """Return 32 hex digits for a string that may be too long or too strange to be part of a name."""
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_DIGITS]


class IndexEntry(NamedTuple):
    """What the other keys know of one fact: all that a script has to know to unlink it."""

    seq: int
    version: int
    state: str
    """`c` or `s`."""

    digest: str
    stream: str
    """Digest of its name."""

    expires: str
    text_bytes: int

    @property
    def stream_member(self) -> str:
        """Its start in `streams`, up to the id: sorts by state, stream and seq."""
        return f"{self.state}:{self.stream}:{self.seq:016d}:"

    @property
    def expires_at(self) -> float | None:
        """Unix seconds."""
        return None if self.expires == _NEVER else float(self.expires)

    def __str__(self) -> str:
        return " ".join(map(str, self))


def index_entry(fact: Fact) -> IndexEntry:
    """Return the entry that follows from a record."""
    return IndexEntry(
        fact.seq,
        fact.version,
        "c" if fact.state is FactState.CURRENT else "s",
        content_digest(fact),
        short_digest(fact.stream),
        _NEVER if fact.expires_at is None else repr(float(fact.expires_at)),
        len(fact.text.encode()),
    )


def parse_entry(raw: bytes) -> IndexEntry:
    """Return the entry in a stored value; raise `ValueError` where it is none."""
    seq, version, state, digest, stream, expires, text_bytes = raw.decode("ascii").split(" ")
    return IndexEntry(int(seq), int(version), state, digest, stream, expires, int(text_bytes))


def read_entry(raw: bytes | None) -> IndexEntry | None:
    """Return the entry in a stored value, or None where there is none."""
    try:
        return None if raw is None else parse_entry(raw)
    except ValueError:
        return None


# Not as `codec.pack_vectors`: a script assigns the seq, so it makes the checksum too, and SHA-1 is what it can compute.


def pack_rows(vectors: Vectors) -> bytes:
    """Return vectors `[num_chunks, dimension]` as float32; a script adds version and checksum, since it has the seq."""
    return np.ascontiguousarray(np.atleast_2d(vectors), dtype="<f4").tobytes()


def unpack_rows(seq: int, value: bytes, *, dimension: int | None) -> tuple[int, Vectors | None]:
    """Return the version and the vectors `[num_chunks, dimension]`; None where they are not what was stored.

    A stored value is `version:sha1("seq:version:rows"):rows`.
    """
    version, _, rest = value.partition(b":")
    digest, _, rows = rest.partition(b":")
    if not version.isdigit():
        return 0, None
    if hashlib.sha1(b"%d:%b:%b" % (seq, version, rows)).hexdigest().encode() != digest:
        return int(version), None
    width = dimension or len(rows) // 4
    if not rows or len(rows) % (4 * width):
        return int(version), None
    return int(version), np.frombuffer(rows, dtype="<f4").reshape(-1, width)
