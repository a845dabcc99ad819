"""Checking, compacting and describing a SQLite record store."""

import shutil
import sqlite3
from collections.abc import Iterator
from typing import Any

from memstore.errors import StoreDamaged
from memstore.records.base import Finding, Problem
from memstore.records.codec import content_digest, unpack_vectors, unseal
from memstore.records.sqlite.connection import SQLiteConnections, replacing
from memstore.records.sqlite.schema import LACKS_VECTORS, SLOTS
from memstore.records.sqlite.writes import append_change, drop_vectors
from memstore.types import ChangeKind, Fact, FactId, FactState, OwnerId

_BATCH = 1000
_LOW_SPACE_BYTES = 2**30
_KINDS = frozenset(kind.value for kind in ChangeKind)
_COLUMNS = "seq, id, owner, stream, version, is_current, expires_at, digest"


def check(
    connections: SQLiteConnections, *, embedder: str | None, dimension: int | None, repair: bool, now: float
) -> list[Problem]:
    """Return everything whose parts do not fit together; mend what can be mended if `repair`."""
    problems = _file_problems(connections, repair=repair)
    for rows in _batches(connections, f"SELECT {_COLUMNS}, record FROM facts WHERE seq > ? ORDER BY seq LIMIT ?"):
        for row in rows:
            problem = _fact_problem(row)
            if problem is not None and repair:
                problem = _mended(connections, problem, row, now)
            if problem is not None:
                problems.append(problem)
    for rows in _batches(
        connections, "SELECT rowid, owner, id, version, record FROM history WHERE rowid > ? ORDER BY rowid LIMIT ?"
    ):
        problems += [_history_problem(connections, row, repair=repair) for row in rows if not _is_intact(row[4])]
    if embedder is not None and dimension is not None:
        problems += _vector_problems(connections, embedder, dimension, repair=repair)
    return problems + _feed_problems(connections, repair=repair)


def compact(connections: SQLiteConnections, *, keys_before: float) -> tuple[int, int]:
    """Forget idempotency keys from before `keys_before`, and rewrite the file without its free pages."""
    log = connections.path.with_name(f"{connections.path.name}-wal")
    before = sum(path.stat().st_size for path in (connections.path, log) if path.exists())
    with connections.transaction() as db:
        db.execute("DELETE FROM idempotency WHERE at < ?", [keys_before])
    with connections.exclusive() as db:
        db.execute("VACUUM")
    connections.truncate_log()
    return before, sum(path.stat().st_size for path in (connections.path, log) if path.exists())


def doctor(connections: SQLiteConnections) -> list[Finding]:
    """Return what an operator should know."""
    with connections.exclusive() as db:
        journal, synchronous = (
            db.execute(f"PRAGMA {name}").fetchall()[0][0] for name in ("journal_mode", "synchronous")
        )
    durable = journal == "wal" and synchronous == 2
    findings = [
        Finding(
            "ok" if durable else "error",
            "durability",
            "an acknowledged write is on disk (write-ahead log, synchronous = FULL)"
            if durable
            else f"journal mode {journal}, synchronous {synchronous}: an acknowledged write may be lost",
        ),
        Finding("ok", "sqlite", f"SQLite {sqlite3.sqlite_version}"),
    ]
    free = shutil.disk_usage(connections.path.parent).free
    level = "warning" if free < _LOW_SPACE_BYTES else "ok"
    findings.append(Finding(level, "disk", f"{free / 2**30:.1f} GiB free for {connections.path.parent}"))
    return findings


def _batches(connections: SQLiteConnections, query: str, *, before_first: int = 0) -> Iterator[list[Any]]:
    last = before_first
    while rows := connections.read_damaged(query, last, _BATCH):
        yield rows
        if rows[-1][0] <= last:
            # From here the same rows would come again, without end.
            raise StoreDamaged(f"{connections.path} is damaged: rows are out of order: restore a copy")
        last = rows[-1][0]


def _file_problems(connections: SQLiteConnections, *, repair: bool) -> list[Problem]:
    found = [row[0] for row in connections.read("PRAGMA integrity_check(100)") if row[0] != "ok"]
    if not found:
        return []
    if repair:
        with connections.exclusive() as db:
            db.execute("REINDEX")
        left = {row[0] for row in connections.read("PRAGMA integrity_check(100)") if row[0] != "ok"}
    else:
        left = set(found)
    return [Problem("damaged-file", None, None, detail, repaired=detail not in left) for detail in found]


def _fact_problem(row: Any) -> Problem | None:
    *columns, record = row
    owner, fact_id = OwnerId(row[2]), FactId(row[1])
    try:
        fact = unseal(record, owner=None)
    except (ValueError, TypeError, KeyError) as error:
        return Problem("damaged-record", owner, fact_id, str(error), repaired=False)
    if columns != _expected_columns(fact):
        return Problem("wrong-index", owner, fact_id, f"the columns of seq {row[0]} are not its record's", False)
    return None


def _expected_columns(fact: Fact) -> list[object]:
    is_current = int(fact.state is FactState.CURRENT)
    return [
        fact.seq,
        fact.id,
        fact.owner,
        fact.stream,
        fact.version,
        is_current,
        fact.expires_at,
        content_digest(fact),
    ]


def _mended(connections: SQLiteConnections, problem: Problem, row: Any, now: float) -> Problem | None:
    """Mend one fact, and say whether that was possible; None where it is no longer as it was found."""
    seq, fact_id, owner, *_, record = row
    with connections.transaction() as db:
        if _row(db, seq) != row:
            return None
        if problem.kind == "wrong-index":
            fact = unseal(record, owner=None)
            names = _COLUMNS.split(", ")
            try:
                db.execute(
                    f"UPDATE facts SET {', '.join(f'{name} = ?' for name in names)} WHERE seq = ?",
                    [*_expected_columns(fact), seq],
                )
            except sqlite3.IntegrityError as error:
                return problem._replace(detail=f"{problem.detail}; cannot be mended: {error}")
            append_change(db, ChangeKind.UPDATED, fact.owner, fact, now)
        else:
            db.execute(
                "INSERT OR REPLACE INTO damaged (id, owner, record) SELECT ?, ?, record FROM facts WHERE seq = ?",
                [fact_id, owner, seq],
            )
            db.execute("DELETE FROM facts WHERE seq = ?", [seq])
            drop_vectors(db, seq)
            removed = _named(FactId(fact_id), OwnerId(owner), seq)
            append_change(db, ChangeKind.DELETED, OwnerId(owner), removed, now)
    return problem._replace(repaired=True)


def _row(db: sqlite3.Connection, seq: int) -> Any:
    """Return what `check` reads of one fact, or None."""
    usual, db.text_factory = db.text_factory, replacing
    try:
        return db.execute(f"SELECT {_COLUMNS}, record FROM facts WHERE seq = ?", [seq]).fetchone()
    finally:
        db.text_factory = usual


def _named(fact_id: FactId, owner: OwnerId, seq: int) -> Fact:
    """A fact of which no more than its name is known."""
    return Fact(fact_id, owner, "", "", None, None, {}, version=0, seq=seq, created_at=0.0, updated_at=0.0)


def _is_intact(record: str) -> bool:
    try:
        unseal(record, owner=None)
    except (ValueError, TypeError, KeyError):
        return False
    return True


def _history_problem(connections: SQLiteConnections, row: Any, *, repair: bool) -> Problem:
    rowid, owner, fact_id, version, _ = row
    if repair:
        with connections.transaction() as db:
            db.execute("DELETE FROM history WHERE rowid = ?", [rowid])
    return Problem("damaged-history", OwnerId(owner), FactId(fact_id), f"former version {version} is damaged", repair)


def _feed_problems(connections: SQLiteConnections, *, repair: bool) -> list[Problem]:
    damaged = []
    for rows in _batches(
        connections,
        "SELECT position, kind, CAST(owner AS BLOB), CAST(id AS BLOB) FROM changes"
        " WHERE position > ? ORDER BY position LIMIT ?",
    ):
        damaged += [row[0] for row in rows if row[1] not in _KINDS or not (_is_text(row[2]) and _is_text(row[3]))]
    if damaged and repair:
        # As if it had been trimmed: who follows the feed reads the facts anew.
        with connections.transaction() as db:
            db.execute("DELETE FROM changes WHERE position <= ?", [damaged[-1]])
            db.execute("UPDATE meta SET value = ? WHERE key = 'feed_floor'", [str(damaged[-1])])
    return [Problem("damaged-change", None, None, f"change {position} is damaged", repair) for position in damaged]


def _is_text(data: bytes | None) -> bool:
    try:
        (data or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


def _vector_problems(connections: SQLiteConnections, embedder: str, dimension: int, *, repair: bool) -> list[Problem]:
    slots = {fingerprint: slot for slot, fingerprint in connections.read("SELECT slot, fingerprint FROM embedders")}
    bad: list[tuple[int, Problem]] = []
    for rows in _batches(
        connections,
        "SELECT vectors.id, vectors.version, data, facts.version, facts.id, owner, is_current"
        f" FROM vectors LEFT JOIN facts ON facts.seq = vectors.id / {SLOTS} WHERE vectors.id > ?"
        " ORDER BY vectors.id LIMIT ?",
        before_first=-1,
    ):
        for vector_id, version, data, fact_version, fact_id, owner, is_current in rows:
            seq, slot = divmod(vector_id, SLOTS)
            if fact_id is None or not is_current or slot not in slots.values():
                kind, detail = "orphan-vector", f"seq {seq} has a vector and no current fact or embedder"
            elif version != fact_version:
                kind, detail = "stale-vector", f"the vector of seq {seq} is of version {version}, not {fact_version}"
            elif slot == slots.get(embedder) and unpack_vectors(seq, version, data, dimension=dimension) is None:
                kind, detail = "damaged-vector", f"the vector of seq {seq} fails its checksum"
            else:
                continue
            problem = Problem(kind, None, None, detail, repaired=repair)
            if fact_id is not None:
                problem = problem._replace(owner=OwnerId(owner), fact_id=FactId(fact_id))
            bad.append((vector_id, problem))
    if repair and bad:
        with connections.transaction() as db:
            db.executemany("DELETE FROM vectors WHERE id = ?", [(vector_id,) for vector_id, _ in bad])
    query = f"SELECT owner, id FROM facts WHERE is_current = 1 AND {LACKS_VECTORS}"
    missing = [
        Problem("missing-vector", OwnerId(owner), FactId(fact_id), "the fact is found by no search", repaired=False)
        for owner, fact_id in connections.read(query, embedder)
    ]
    return [problem for _, problem in bad] + missing
