"""Stores worth exporting, and export files that the code under test has no part in."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from typing import Any

from memstore import Fact, MemStore, NewFact

ODD = "o:n/e *\n?ü🔑 "
ANA = "ana"
FOREVER = 4e9
METADATA: dict[str, Any] = {
    "z": [1, 2.5, -0.0, 1e-300, None, True, 2**70, -1],
    "a": {"ü 🔑": "NUL \0 and \u2028 \x7f \r\n", "": {}, "deep": [[[[[[[[[[{"x": []}]]]]]]]]]]},
    "long": "x" * 100_000,
}


def populate(store: MemStore) -> None:
    """Two owners with every kind of fact: changed, superseded, restated, expiring, with all that text can hold."""
    old = store.add(ANA, "Ana's office is on floor 2", stream="work", speaker="Ana", time="3 May 2023")
    store.update(ANA, old.id, text="Ana's office is on floor 3", metadata={"source": "badge"})
    middle = store.supersede(ANA, old.id, "Ana's office is on floor 5", time="8 May 2023")
    store.supersede(ANA, middle.id, "Ana works from home", expires_at=FOREVER)
    odd = store.add(ANA, "line\u2028one\r\nline\ttwo \x0b鍵 🔑 é e\u0301 <|im_end|>", metadata=METADATA)
    for number in range(3):
        store.update(ANA, odd.id, text=f"version {number}", metadata=METADATA | {"number": number})
    store.add_many(ODD, [NewFact(f"fact {i}", f"stream {i % 3}", expires_at=FOREVER + i) for i in range(20)])
    store.update(ODD, store.list(ODD)[3].id, expires_at=None)
    store.add(ODD, "Ana works from home")


def all_facts(store: MemStore) -> list[tuple[Fact, list[Fact]]]:
    """Every fact without its seq, in order, with its former versions."""
    return [
        (
            dataclasses.replace(fact, seq=0),
            [dataclasses.replace(f, seq=0) for f in store.records.history(owner, fact.id)],
        )
        for owner in store.owners()
        for fact in store.list(owner, limit=10_000, superseded=True)
    ]


def record_lines(export: bytes) -> list[bytes]:
    return export.split(b"\n")[1:-1]


def sealed(records: Iterable[dict[str, Any] | bytes], **header: Any) -> bytes:
    """An export of these records whose counts and hash are right, unless `header` says otherwise."""
    lines = [one if isinstance(one, bytes) else json.dumps(one, ensure_ascii=False).encode() for one in records]
    loaded = [fields for line in lines if isinstance(fields := _parsed(line), dict)]
    fields = {
        "format": "memstore",
        "schema_version": 1,
        "owners": len({str(record.get("owner")) for record in loaded}),
        "facts": len(lines),
        "former_versions": sum(len(r["history"]) for r in loaded if isinstance(r.get("history"), list)),
        "exported_at": 5.0,
    } | {name: value for name, value in header.items() if name != "sha256"}
    body = b"".join(line + b"\n" for line in lines)
    digest = hashlib.sha256(json.dumps(fields).encode() + b"\n" + body).hexdigest()
    return json.dumps(fields | {"sha256": header.get("sha256", digest)}).encode() + b"\n" + body


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def record(number: int = 1, **fields: Any) -> dict[str, Any]:
    """One record as it stands in a file."""
    return {
        "id": f"0190163d-8694-7000-8000-{number:012}",
        "owner": ANA,
        "text": f"fact {number}",
        "stream": "",
        "speaker": None,
        "time": None,
        "metadata": {},
        "version": 1,
        "created_at": 10.5,
        "updated_at": 11,
        "state": "current",
        "event_at": None,
        "expires_at": None,
        "supersedes": None,
        "history": [],
    } | fields


def former(**fields: Any) -> dict[str, Any]:
    """A former version as it stands in the history of a record."""
    return {name: value for name, value in (record() | fields).items() if name not in ("id", "owner", "history")}
