"""Sessions on the Redis server that has the facts."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence

from memstore.errors import SessionExists, SessionGone, StoreDamaged, StoreUnreachable
from memstore.records.redis.connection import RedisConnections
from memstore.records.redis.keys import Keys, decode_owner, encode_owner, encode_session
from memstore.records.redis.options import RedisOptions, parse_location
from memstore.records.redis.schema import open_schema
from memstore.records.redis.scripts import Scripts
from memstore.records.redis.server_files import rewrite_files
from memstore.records.redis.walk import chunks
from memstore.session_log.base import LogEntry, SessionHeader, SessionId
from memstore.session_log.codec import pack_entry, pack_header, pack_stamp, read_header, read_log
from memstore.session_log.contract import are_text, check_first, check_names, check_next, gone, moved
from memstore.session_log.redis_scripts import SessionScripts
from memstore.types import OwnerId

logger = logging.getLogger(__name__)

_PAGE = 500


class RedisSessionLog:
    """A ``SessionLog`` under the prefix of a store on a Redis server; see `memstore.records.redis` for the keys.

    When a write is acknowledged it is in the server's memory; whether also on its disk is up to ``appendfsync``.

    Parameters
    ----------
    location
        ``redis://``, ``rediss://``, ``redis+sentinel://`` or ``rediss+sentinel://``, see `parse_location`.

    Raises
    ------
    InvalidLocation, StoreUnreachable, StoreRefused, StoreTLSError, StoreBusy, StoreDamaged, StoreTooNew
    """

    def __init__(self, location: str, options: RedisOptions | None = None) -> None:
        self._options = options or RedisOptions()
        place = parse_location(location, self._options)
        self._keys = Keys(place.prefix)
        self._redis = RedisConnections(place, self._options)
        self._scripts = SessionScripts(self._redis, self._keys.sessions)
        try:
            open_schema(self._redis, self._keys, Scripts(self._redis, self._keys))
        except StoreUnreachable as error:
            self.close()
            self._redis.explain_refused_handshake(error)
            raise
        except BaseException:
            self.close()
            raise

    # ---- writing ----

    def create(self, header: SessionHeader, entry: LogEntry) -> None:
        """Keep a new session with its first version."""
        check_first(entry)
        reply = self._scripts.run(
            "create",
            encode_session(header.id),
            encode_owner(header.owner),
            pack_header(header),
            pack_stamp(header.id, header.used_at),
            entry.version,
            pack_entry(header.id, entry, at=header.used_at),
        )
        if reply != b"ok":
            raise SessionExists(f"there is a session {header.id!r}")

    def append(self, owner: OwnerId, session_id: SessionId, entry: LogEntry, *, used_at: float) -> None:
        """Add the next version."""
        check_next(entry)
        check_names(owner, session_id)
        written = pack_entry(session_id, entry, at=used_at)
        self._write("append", owner, session_id, entry.version, entry.base, written, pack_stamp(session_id, used_at))

    def update(self, header: SessionHeader) -> None:
        """Replace the header."""
        check_names(header.owner, header.id)
        stamp = pack_stamp(header.id, header.used_at)
        self._write("update", header.owner, header.id, pack_header(header), stamp)

    def touch(self, used: Mapping[SessionId, float]) -> None:
        """Set ``used_at`` of many at once, several hundred in one go."""
        known = [(session_id, at) for session_id, at in used.items() if are_text(session_id)]
        for some in chunks(known):
            stamps = [(encode_session(session_id), pack_stamp(session_id, at)) for session_id, at in some]
            self._scripts.run("touch", *(argument for pair in stamps for argument in pair))

    def compact(self, owner: OwnerId, session_id: SessionId, entry: LogEntry) -> None:
        """Replace every entry by one that builds on none."""
        check_first(entry)
        check_names(owner, session_id)
        self._write("compact", owner, session_id, entry.version, pack_entry(session_id, entry, at=0.0))

    def delete(self, owner: OwnerId, session_id: SessionId) -> bool:
        """Remove a session."""
        if not are_text(owner, session_id):
            return False
        reply = self._scripts.run("delete", uuid.uuid4().hex, encode_session(session_id), encode_owner(owner))
        return int(reply) == 1

    def purge(self, owner: OwnerId) -> int:
        """Remove every session of an owner, and have the server rewrite its files where there was any.

        What is still in them, where the server does not do so, is logged; the purge of a store tells it in its receipt.
        """
        count = int(self._scripts.run("purge", uuid.uuid4().hex, encode_owner(owner)))
        remains = rewrite_files(self._redis, wait_s=self._options.disk_wait_s) if count else None
        if remains is not None:
            logger.warning("sessions of a purged owner may still be in %s", remains)
        return count

    # ---- reading ----

    def header(self, session_id: SessionId) -> SessionHeader | None:
        """The session of that id, whoever owns it."""
        return self._headers([session_id])[0] if are_text(session_id) else None

    def headers(self, *, after: SessionId | None = None, limit: int = 1000) -> Sequence[SessionHeader]:
        """A page of all sessions by id."""
        found: list[SessionHeader] = []
        start = "-" if after is None else f"({encode_session(after)}"
        while len(found) < limit:
            asked = min(limit - len(found), _PAGE)
            names = self._redis.do("zrangebylex", self._keys.sessions, start, "+", 0, asked)
            # Some may go between the two looks.
            found += [header for header in self._headers([self._named(name) for name in names]) if header is not None]
            if len(names) < asked:
                break
            start = f"({names[-1].decode()}"
        return found

    def entries(self, owner: OwnerId, session_id: SessionId) -> Sequence[LogEntry]:
        """Every version that is kept."""
        check_names(owner, session_id)
        reply = self._scripts.run("entries", encode_session(session_id), encode_owner(owner))
        if reply is None:
            raise self._missing(session_id)
        first, last, *stored = reply
        return read_log(self._redis.where, session_id, stored, first=_number(first), last=_number(last))

    def count(self, owner: OwnerId) -> int:
        """How many sessions an owner has."""
        return int(self._redis.do("zcard", f"{self._keys.of(owner)}sessions"))

    def close(self) -> None:
        """Release the connections; may be called twice."""
        self._redis.close()

    def _write(self, script: str, owner: OwnerId, session_id: SessionId, *arguments: bytes | str | int) -> None:
        reply = self._scripts.run(script, encode_session(session_id), encode_owner(owner), *arguments)
        if reply == b"gone":
            raise self._missing(session_id)
        if reply != b"ok":
            raise moved(session_id, reply.decode(errors="replace"))

    def _missing(self, session_id: SessionId) -> SessionGone:
        # Where whose it is was damaged, that is raised instead.
        self.header(session_id)
        return gone(session_id)

    def _headers(self, session_ids: Sequence[SessionId]) -> list[SessionHeader | None]:
        asked = [("hmget", self._keys.session(session_id), "owner", "header", "used") for session_id in session_ids]
        replies = self._redis.together(*asked) if asked else []
        return [
            None if values == [None, None, None] else self._header(session_id, *values)
            for session_id, values in zip(session_ids, replies, strict=True)
        ]

    def _header(
        self, session_id: SessionId, owner: bytes | None, sealed: bytes | None, stamp: bytes | None
    ) -> SessionHeader:
        # What is missing fails as what is damaged does.
        try:
            whose = decode_owner(owner or b"")
        except ValueError:
            whose = OwnerId("")
        return read_header(self._redis.where, session_id, whose, sealed or b"", stamp or b"")

    def _named(self, encoded: bytes) -> SessionId:
        try:
            return SessionId(bytes.fromhex(encoded.decode()).decode())
        except ValueError as error:
            raise StoreDamaged(
                f"{self._redis.where}: {encoded!r} is no session's id: remove it from {self._keys.sessions}"
            ) from error


def _number(value: bytes | None) -> int | bytes | None:
    return int(value) if value is not None and value.isdigit() else value
