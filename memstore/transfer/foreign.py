"""Facts out of the files of other programs: Mem0's memories, LoCoMo's conversations."""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

from memstore.drafts import Progress
from memstore.errors import InvalidExport, InvalidInput
from memstore.store import MemStore
from memstore.types import NewFact, OwnerId
from memstore.validation import validate_fact, validate_owner

Source: TypeAlias = str | os.PathLike[str] | IO[bytes]
OwnedFact: TypeAlias = tuple[str | None, NewFact]
"""Owner, or None where the file names none, and what is to be remembered."""

_SESSION = re.compile(r"session_\d{1,9}", re.ASCII)
_MEM0_FIELDS = ("memory", "user_id", "run_id", "created_at", "metadata", "hash", "score")


class ForeignReport(NamedTuple):
    """What an import did."""

    created: int
    already_there: int
    """Facts that their owner had, in every field, or that the file has more than once."""


def import_foreign(
    store: MemStore,
    facts: Iterable[OwnedFact],
    *,
    owner: str | None = None,
    on_progress: Progress | None = None,
    batch: int = 256,
) -> ForeignReport:
    """Add facts, as one of the functions below reads them; repeating it adds nothing.

    All are read and checked before anything is written.

    Parameters
    ----------
    owner
        Whose they are, instead of whom the file names.
    on_progress
        Called with (facts dealt with so far, all facts).
    batch
        Facts that are embedded and then stored as one.

    Raises
    ------
    InvalidExport
        Naming what cannot be stored, and where it is. Nothing was written.
    EmbeddingError, StoreError
    """
    if batch < 1:
        raise InvalidInput(f"batch is {batch}: use at least 1")
    pairs = [(_owner(named if owner is None else owner, number), fact) for number, (named, fact) in enumerate(facts, 1)]
    for number, (_, fact) in enumerate(pairs, 1):
        _check(fact, f"fact {number}")
    created = done = 0
    for name, group in groupby(pairs, key=lambda pair: pair[0]):
        of_owner = [fact for _, fact in group]
        for start in range(0, len(of_owner), batch):
            part = of_owner[start : start + batch]
            before = {twin.id for twin in store.records.find_identical(name, part) if twin is not None}
            created += len({fact.id for fact in store.add_many(name, part)} - before)
            done += len(part)
            if on_progress is not None:
                on_progress(done, len(pairs))
    return ForeignReport(created, len(pairs) - created)


def read_mem0(source: Source) -> Iterator[OwnedFact]:
    """Yield the memories of a Mem0 export: a list of them, or what `get_all` returns, as JSON.

    `memory` is the text, `user_id` the owner, `run_id` the stream and `created_at`, verbatim, the time: Mem0 knows no
    other. All other fields are kept in the metadata, behind `mem0_`, but for the hash of the text and a score.

    Raises
    ------
    InvalidExport
        Naming the memory that is none, by its place in the list.
    """
    memories = _json(source)
    if isinstance(memories, dict):
        memories = memories.get("results")
    if not isinstance(memories, list):
        raise InvalidExport("this is no Mem0 export: it is no list of memories, nor an object with one as `results`")
    for number, memory in enumerate(memories, 1):
        where = f"memory {number}"
        if not isinstance(memory, dict):
            raise InvalidExport(f"{where} is not an object")
        if "memory" not in memory or "id" not in memory:
            raise InvalidExport(f"{where} has no `memory` or no `id`: this is no Mem0 export")
        metadata = _object(memory.get("metadata") or {}, f"the metadata of {where}")
        kept = {f"mem0_{name}": memory[name] for name in memory if name not in _MEM0_FIELDS}
        fact = NewFact(
            memory["memory"],
            stream=memory.get("run_id") or "",
            time=memory.get("created_at"),
            metadata={**metadata, **{name: value for name, value in kept.items() if value is not None}},
        )
        yield memory.get("user_id"), _check(fact, where)


def read_locomo(source: Source, sample_id: str | None = None) -> Iterator[OwnedFact]:
    """Yield the turns of LoCoMo conversations, or of one of them, in the order of their sessions.

    The owner is the conversation's `sample_id`, the stream is `session_N`, and the time is the session's, verbatim. A
    photo is its caption behind the text: `Look! [shares a photo of a bee]`. A turn without either is left out.

    Raises
    ------
    InvalidExport
        Naming the sample, session and turn that are not in LoCoMo's schema, or `sample_id` where there is no such one.
    """
    samples = _json(source)
    if not isinstance(samples, list):
        raise InvalidExport("this is no LoCoMo file: it is not a list of samples")
    names = []
    for number, sample in enumerate(samples, 1):
        fields = _object(sample, f"sample {number}")
        names.append(_string(fields, "sample_id", f"sample {number}"))
        if sample_id in (None, names[-1]):
            yield from _turns(fields, names[-1])
    if sample_id is not None and sample_id not in names:
        raise InvalidExport(f"no sample has the id {sample_id!r}: there are {', '.join(names)}")


def _turns(sample: dict[str, Any], name: str) -> Iterator[OwnedFact]:
    conversation = _object(sample.get("conversation"), f"the conversation of sample {name!r}")
    sessions = [key for key in conversation if _SESSION.fullmatch(key)]
    for session in sorted(sessions, key=lambda key: int(key.removeprefix("session_"))):
        place = f"sample {name!r}, {session}"
        turns, time = conversation[session], conversation.get(f"{session}_date_time")
        if not isinstance(turns, list):
            raise InvalidExport(f"{place} is not a list of turns")
        for number, turn in enumerate(turns, 1):
            where = f"{place}, turn {number}"
            fields = _object(turn, where)
            text = _string(fields, "text", where).strip()
            if fields.get("blip_caption") is not None:
                caption = _string(fields, "blip_caption", where).strip()
                text = f"{text} [shares {caption}]".lstrip() if caption else text
            if text:
                speaker, dia_id = _string(fields, "speaker", where).strip(), _string(fields, "dia_id", where)
                fact = NewFact(text, session, speaker, time or None, {"dia_id": dia_id})
                yield name, _check(fact, where)


def _json(source: Source) -> Any:
    content = Path(source).read_bytes() if isinstance(source, str | os.PathLike) else source.read()
    try:
        return json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InvalidExport(f"the file is not JSON: {error}") from error


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidExport(f"{where} is not an object")
    return value


def _string(fields: dict[str, Any], name: str, where: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise InvalidExport(f"{where}: `{name}` is missing, or no string")
    return value


def _owner(name: str | None, number: int) -> OwnerId:
    if name is None:
        raise InvalidExport(f"fact {number}: the file does not say whose it is: name an owner")
    try:
        return validate_owner(name)
    except InvalidInput as error:
        raise InvalidExport(f"fact {number}: {error}") from error


def _check(fact: NewFact, where: str) -> NewFact:
    try:
        validate_fact(fact, now=-math.inf)
    except InvalidInput as error:
        raise InvalidExport(f"{where}: {error}") from error
    return fact
