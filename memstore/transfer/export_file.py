"""The file that facts are exported to: a header, then one line of JSON for each fact.

::

    {"format": "memstore", "schema_version": 1, "owners": 2, "facts": 3, ..., "sha256": "..."}
    {"id": ..., "owner": "ana", "text": ..., every other field but the seq, "history": [former versions]}
    ...

The hash is of the header without its hash and of all lines, so that no byte of the file can be another. Facts are
sorted by owner and then by their order in the store. A line ends in one line feed and holds no other.
"""

import dataclasses
import hashlib
import json
import math
import re
from array import array
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import xxhash

from memstore.errors import InvalidExport, InvalidInput
from memstore.types import Fact, FactId, FactState, NewFact, OwnerId
from memstore.validation import validate_fact, validate_owner

FORMAT = "memstore"
SCHEMA_VERSION = 1

# Removing a fact looks for every version that it may have had.
_MAX_VERSION = 1_000_000
_UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.ASCII)
_FIELDS = tuple(spec.name for spec in dataclasses.fields(Fact) if spec.name != "seq")
_FORMER_FIELDS = tuple(name for name in _FIELDS if name not in ("id", "owner"))
_CONTENT_FIELDS = tuple(spec.name for spec in dataclasses.fields(NewFact))


class Header(NamedTuple):
    """What the first line says of the rest."""

    owners: int
    facts: int
    """Superseded ones included."""

    former_versions: int
    exported_at: float
    """Unix seconds."""

    sha256: str = ""

    def line(self) -> bytes:
        """Return the header as it stands in the file; without a hash, as the hash takes it in."""
        fields = {"format": FORMAT, "schema_version": SCHEMA_VERSION, **self._asdict()}
        if not self.sha256:
            del fields["sha256"]
        return json.dumps(fields, allow_nan=False).encode() + b"\n"


class ExportedFact(NamedTuple):
    """One line."""

    fact: Fact
    """With a seq of 0: the store that it goes into assigns one."""

    history: tuple[Fact, ...]
    """Former versions, oldest first."""


class Checked(NamedTuple):
    """A file whose every byte is what was exported, and whose every fact can be stored."""

    header: Header
    lines_of: dict[FactId, int]
    """Number of each fact's line."""

    ids_of: dict[OwnerId, list[FactId]]
    digests: "array[int]"
    """Of each line of a fact, to see that it is the same when it is read again."""


def fact_line(exported: ExportedFact) -> bytes:
    """Return the line of a fact."""
    fields = _values(exported.fact, _FIELDS)
    fields["history"] = [_values(former, _FORMER_FIELDS) for former in exported.history]
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def content_of(fact: Fact) -> NewFact:
    """Return what `fact` says."""
    return NewFact(**{name: getattr(fact, name) for name in _CONTENT_FIELDS})


def check_file(file: IO[bytes]) -> Checked:
    """Read all of `file`, from where it stands.

    Raises
    ------
    InvalidExport
        Naming the line that is not what an export writes; or the first, where a count or the hash is not that of the
        other lines.
    """
    header = _header(file.readline())
    digest = hashlib.sha256(header._replace(sha256="").line())
    lines_of: dict[FactId, int] = {}
    ids_of: dict[OwnerId, list[FactId]] = {}
    digests = array("Q")
    former_versions = 0
    for number, line in enumerate(file, start=2):
        if number > header.facts + 1:
            raise InvalidExport(f"line {number}: there are more facts than the {header.facts} of the header")
        fact, history = parse_line(line, number)
        if fact.id in lines_of:
            raise InvalidExport(f"line {number}: fact {fact.id!r} is in line {lines_of[fact.id]} already")
        digest.update(line)
        digests.append(xxhash.xxh3_64_intdigest(line))
        lines_of[fact.id] = number
        ids_of.setdefault(fact.owner, []).append(fact.id)
        former_versions += len(history)
    if len(lines_of) < header.facts:
        raise InvalidExport(f"line {len(lines_of) + 2}: the file ends after {len(lines_of)} of {header.facts} facts")
    if (len(ids_of), former_versions) != (header.owners, header.former_versions):
        raise InvalidExport("line 1: the number of owners or of former versions is not that of the lines below")
    if digest.hexdigest() != header.sha256:
        raise InvalidExport("line 1: the hash is not that of the file, which has been changed since it was exported")
    return Checked(header, lines_of, ids_of, digests)


def read_again(file: IO[bytes], checked: Checked) -> Iterator[tuple[int, ExportedFact]]:
    """Yield the lines of a file that has been checked, with their numbers.

    Raises
    ------
    InvalidExport
        Where one is not the same any more.
    """
    file.readline()
    for number, digest in enumerate(checked.digests, start=2):
        line = file.readline()
        if xxhash.xxh3_64_intdigest(line) != digest:
            raise InvalidExport(f"line {number}: the file was changed while it was read")
        yield number, parse_line(line, number)


def parse_line(line: bytes, number: int) -> ExportedFact:
    """Return the fact in a line; raise `InvalidExport` naming the line where it is none that a store could hold."""
    fields = _json_object(line, number)
    try:
        versions = fields.pop("history", None)
        if not isinstance(versions, list):
            raise InvalidExport("history is not a list")
        fact = _fact(fields)
        history = tuple(_former(version, fact) for version in versions)
        numbers = [former.version for former in history]
        if any(later <= earlier for earlier, later in zip(numbers, [*numbers[1:], fact.version], strict=False)):
            raise InvalidExport("the versions do not ascend")
        return ExportedFact(fact, history)
    except InvalidInput as error:
        raise InvalidExport(f"line {number}: {error}") from error


def _values(fact: Fact, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: dict(fact.metadata) if name == "metadata" else getattr(fact, name) for name in names}


def _header(line: bytes) -> Header:
    if not line:
        raise InvalidExport("line 1: the file is empty")
    fields = _json_object(line, 1)
    if fields.pop("format", None) != FORMAT:
        raise InvalidExport("line 1: this is no export of memstore")
    version = fields.pop("schema_version", None)
    if type(version) is int and version > SCHEMA_VERSION:
        raise InvalidExport(
            f"line 1: the export has schema version {version}, and this release reads up to {SCHEMA_VERSION}: "
            "install a newer one"
        )
    if version != SCHEMA_VERSION or set(fields) != set(Header._fields) or not isinstance(fields["sha256"], str):
        raise InvalidExport("line 1: the header is not one that an export writes")
    _check_time("line 1: exported_at", fields["exported_at"])
    header = Header(**fields)
    if any(type(count) is not int or count < 0 for count in header[:3]) or header.line() != line:
        raise InvalidExport("line 1: the header is not one that an export writes")
    return header


def _json_object(line: bytes, number: int) -> dict[str, Any]:
    if not line.endswith(b"\n"):
        raise InvalidExport(f"line {number}: the file was cut off in this line")
    try:
        value = json.loads(line.decode(), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise InvalidExport(f"line {number}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidExport(f"line {number}: not a JSON object")
    return value


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("one name is given twice")
    return fields


def _former(fields: object, fact: Fact) -> Fact:
    if not isinstance(fields, dict) or set(fields) != set(_FORMER_FIELDS):
        raise InvalidExport("a former version has not the fields of one")
    return _fact({"id": fact.id, "owner": fact.owner, **fields})


def _fact(fields: dict[str, Any]) -> Fact:
    if set(fields) != set(_FIELDS):
        odd = sorted(set(fields) ^ set(_FIELDS))[0]
        raise InvalidExport(f"the field {odd!r} is missing, or no field of a fact")
    for name in ("created_at", "updated_at"):
        _check_time(name, fields[name])
    for name in ("event_at", "expires_at"):
        if fields[name] is not None:
            _check_time(name, fields[name])
    if fields["event_at"] is not None and fields["time"] is None:
        raise InvalidExport("event_at without a time")
    version, state = fields["version"], fields["state"]
    if type(version) is not int or not 1 <= version <= _MAX_VERSION:
        raise InvalidExport(f"version is not an integer from 1 to {_MAX_VERSION}")
    if not isinstance(state, str) or state not in set(FactState):
        raise InvalidExport(f"state is not one of {', '.join(FactState)}")
    for name in ("id", "supersedes"):
        value = fields[name]
        if (name == "id" or value is not None) and not (isinstance(value, str) and _UUID7.fullmatch(value)):
            raise InvalidExport(f"{name} is not a UUIDv7 in lower case")
    if fields["supersedes"] == fields["id"]:
        raise InvalidExport("the fact supersedes itself")
    owner = validate_owner(fields["owner"])
    fact = Fact(**{**fields, "owner": owner, "state": FactState(state), "seq": 0})
    validate_fact(content_of(fact), now=-math.inf)
    return fact


def _check_time(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= 2**53:
        raise InvalidExport(f"{name} is no number of Unix seconds")
