"""Headers and entries of a token log as bytes that say whether they are still what was written.

Little-endian. Each value starts with 8 bytes of xxh3 over the session's id and the rest, so that what was moved to
another session does not fit either::

    entry    digest  version base keep (int64)  at (float64)  num_segments (int64)
             [num_segments, 2] uint32: kind, length    token ids (int32) of all segments, one behind the other
    header   digest  JSON of every field but used_at, which changes more often
    stamp    used_at as text, a space, the digest in hex: a Lua script can compare it
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Sequence

import numpy as np
import xxhash

from memstore.errors import StoreDamaged
from memstore.session_log.base import LogEntry, Segment, SegmentKind, SessionHeader, SessionId, TokenIds
from memstore.types import OwnerId

_DIGEST_BYTES = 8
_FRONT = struct.Struct("<qqqdq")
_KINDS: tuple[SegmentKind, ...] = ("prefix", "data")
_FIELDS = tuple(spec.name for spec in dataclasses.fields(SessionHeader) if spec.name != "used_at")


def int32_ids(token_ids: TokenIds) -> TokenIds:
    """Return token ids ``[num_tokens]`` as a copy that nobody else holds, or can change."""
    ids = np.array(token_ids, dtype=np.int32)
    assert ids.ndim == 1, f"token ids of shape {ids.shape}"
    assert np.array_equal(ids, token_ids), "token ids beyond 32 bits"
    ids.setflags(write=False)
    return ids


# ---- entries ----


def pack_entry(session_id: SessionId, entry: LogEntry, *, at: float) -> bytes:
    """Return the stored form of an entry; ``at``, when it was written, tells it from another writer's."""
    parts = [int32_ids(segment.token_ids) for segment in entry.segments]
    shape = [(_KINDS.index(segment.kind), len(part)) for segment, part in zip(entry.segments, parts, strict=True)]
    payload = b"".join(
        [
            _FRONT.pack(entry.version, entry.base, entry.keep, at, len(parts)),
            np.array(shape, dtype="<u4").tobytes(),
            *(part.astype("<i4", copy=False).tobytes() for part in parts),
        ]
    )
    return _digest(session_id, payload) + payload


def unpack_entry(session_id: SessionId, data: bytes) -> LogEntry:
    """Return the entry in a stored value; raise ``ValueError`` where it is not what was written."""
    payload = _sound(session_id, data)
    version, base, keep, _, num_segments = _FRONT.unpack_from(payload)
    shape = np.frombuffer(payload, dtype="<u4", count=2 * num_segments, offset=_FRONT.size).reshape(-1, 2)
    ids = np.frombuffer(payload, dtype="<i4", offset=_FRONT.size + shape.nbytes).astype(np.int32, copy=False)
    ends = np.cumsum(shape[:, 1], dtype=np.int64).tolist()
    segments = tuple(
        Segment(ids[end - length : end], _KINDS[kind]) for (kind, length), end in zip(shape.tolist(), ends, strict=True)
    )
    return LogEntry(version, base, keep, segments)


def read_log(
    where: object, session_id: SessionId, stored: Sequence[bytes], *, first: object, last: object
) -> list[LogEntry]:
    """Return every version of a session, ascending; raise ``StoreDamaged`` unless ``first`` to ``last`` are all there.

    Parameters
    ----------
    stored
        The entries, in any order.
    """
    try:
        entries = sorted((unpack_entry(session_id, data) for data in stored), key=lambda entry: entry.version)
        versions = [entry.version for entry in entries]
        wanted = range(first, last + 1) if isinstance(first, int) and isinstance(last, int) else range(0)
        # By their number first: damage may say that there are more than fit into any list.
        if not versions or (wanted.start, wanted.stop) != (versions[0], versions[-1] + 1) or versions != list(wanted):
            raise ValueError(f"versions {first!r} to {last!r} should be there, and not {len(versions)} others")
        num_segments = {0: 0}
        for entry in entries:
            if entry.keep > num_segments.get(entry.base, -1):
                raise ValueError(f"version {entry.version} keeps more of version {entry.base} than there is")
            num_segments[entry.version] = entry.keep + len(entry.segments)
    except ValueError as error:
        raise _damaged(where, session_id, "token log", error) from error
    return entries


# ---- headers ----


def pack_header(header: SessionHeader) -> bytes:
    """Return the stored form of a header, without ``used_at``."""
    fields = {name: getattr(header, name) for name in _FIELDS}
    payload = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    return _digest(header.id, payload) + payload


def pack_stamp(session_id: SessionId, used_at: float) -> bytes:
    """Return the stored form of ``used_at``."""
    assert math.isfinite(used_at), used_at
    at = repr(float(used_at)).encode()
    return at + b" " + _digest(session_id, at).hex().encode()


def unpack_stamp(session_id: SessionId, stamp: bytes) -> float:
    """Return the time in a stored value; raise ``ValueError`` where it is not what was written."""
    at, _, digest = stamp.partition(b" ")
    if _digest(session_id, at).hex().encode() != digest:
        raise ValueError("the checksum of when it was used does not match")
    return float(at)


def read_header(where: object, session_id: SessionId, owner: OwnerId, data: bytes, stamp: bytes) -> SessionHeader:
    """Return a header from what is stored of it; raise ``StoreDamaged`` where that is not what was written."""
    try:
        fields = json.loads(_sound(session_id, data))
        header = SessionHeader(**fields, used_at=unpack_stamp(session_id, stamp))
        if (header.id, header.owner) != (session_id, owner):
            raise ValueError("it is kept as another owner's")
    except (ValueError, TypeError) as error:
        raise _damaged(where, session_id, "header", error) from error
    return header


def _damaged(where: object, session_id: SessionId, what: str, error: Exception) -> StoreDamaged:
    return StoreDamaged(
        f"{where}: the {what} of session {session_id!r} is damaged ({error}): close it, and open another"
    )


def _digest(session_id: SessionId, payload: bytes | memoryview) -> bytes:
    digest = xxhash.xxh3_64()
    name = session_id.encode()
    # With its length: no end of an id is taken for the beginning of a payload.
    digest.update(struct.pack("<q", len(name)) + name)
    digest.update(payload)
    return digest.digest()


def _sound(session_id: SessionId, data: bytes) -> bytes:
    payload = data[_DIGEST_BYTES:]
    if _digest(session_id, payload) != data[:_DIGEST_BYTES]:
        raise ValueError("the checksum does not match")
    return payload
