"""Questions to leave out because their gold answer is known to be wrong.

The list is the user's file: the public audit's licence keeps it out of this repository. Its ids read
``locomo_{conv}_qa{index}``. ``index`` counts the conversation's questions from 0, in the order of the data file, all
ids together. ``conv`` is, in the public audit, the *position* of the conversation in the data file, from 0; lists with
the conversation's own *number* (26 of ``conv-26``) exist too, and are told apart because one reading must fit every id
of the file. Where both fit and differ, or neither does, the file is refused.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from locomo.dataset import Conversation, Question
from locomo.errors import AuditFormatError

QuestionKey = tuple[str, int]
_ID = re.compile(r"locomo_(?:conv-?)?(\d+)_qa(\d+)")
_ID_FIELDS = ("question_id", "id", "qa_id")
_GOLD_IS_RIGHT = "WRONG_CITATION"


class Audit(NamedTuple):
    """What a list of wrong golds says of this data.

    ``excluded`` are the `(sample_id, index)` of questions with a wrong gold; ``kept`` counts entries that blame only
    the evidence cited (an ``error_type`` of ``WRONG_CITATION``) and so exclude nothing.
    """

    excluded: frozenset[QuestionKey]
    kept: int


@dataclass(frozen=True, slots=True)
class _Entry:
    conv: int
    index: int
    question: str | None
    gold_is_right: bool


def load_audit(path: Path, conversations: Sequence[Conversation]) -> Audit:
    """Read a list of wrong golds: one id a line (``#`` begins a comment), CSV with a header, or a JSON list.

    Items of a JSON list are ids, or objects with the id under ``question_id``, ``id`` or ``qa_id``, as are rows of a
    CSV file. Where an item also gives its ``question``, it must be that of the data file: an id counted differently
    does not pass unnoticed.

    Raises
    ------
    AuditFormatError
        No file there, an id that is not one, fits no question or fits two readings, or another question's text.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise AuditFormatError(f"cannot read the list of wrong golds {path}: {error}") from error
    entries = [_entry(item, path) for item in _items(text, path)]
    by_sample = _reading(entries, conversations, path)
    for entry in entries:
        question = by_sample[entry.conv].questions[entry.index]
        if entry.question is not None and _words(entry.question) != _words(question.question):
            raise AuditFormatError(
                f"{path}: locomo_{entry.conv}_qa{entry.index} comes with another question than "
                f"{question.sample_id} has at index {question.index}: another version of the data, or another count?"
            )
    excluded = (_key(by_sample[entry.conv].questions[entry.index]) for entry in entries if not entry.gold_is_right)
    return Audit(frozenset(excluded), sum(entry.gold_is_right for entry in entries))


def _items(text: str, path: Path) -> list[Any]:
    stripped = text.strip()
    if stripped[:1] in ("[", "{"):
        try:
            items = json.loads(stripped)
        except ValueError as error:
            raise AuditFormatError(f"{path} is not JSON ({error})") from error
        if not isinstance(items, list):
            raise AuditFormatError(f"{path}: expected a JSON list, found an object")
        return items
    header = next(csv.reader(io.StringIO(stripped)), [])
    if any(name in header for name in _ID_FIELDS):
        return list(csv.DictReader(io.StringIO(stripped)))
    lines = (line.split("#", 1)[0].strip() for line in stripped.splitlines())
    return [line for line in lines if line]


def _entry(item: Any, path: Path) -> _Entry:
    fields = item if isinstance(item, Mapping) else {"id": item}
    name = next((fields[field] for field in _ID_FIELDS if fields.get(field)), None)
    match = _ID.fullmatch(name.strip()) if isinstance(name, str) else None
    if match is None:
        raise AuditFormatError(f"{path}: {str(name)[:80]!r} is not an id of the form locomo_0_qa12")
    kind = str(fields.get("error_type") or "").upper()
    return _Entry(int(match[1]), int(match[2]), fields.get("question") or None, kind == _GOLD_IS_RIGHT)


def _reading(
    entries: Sequence[_Entry], conversations: Sequence[Conversation], path: Path
) -> Mapping[int, Conversation]:
    """The one reading of `conv` under which every entry names a question."""
    by_position = dict(enumerate(conversations))
    by_number = {
        int(match[1]): conversation
        for conversation in conversations
        if (match := re.fullmatch(r"conv-?(\d+)", conversation.sample_id))
    }
    fitting = [reading for reading in (by_position, by_number) if all(_fits(entry, reading) for entry in entries)]
    if not fitting:
        lost = [entry for entry in entries if not _fits(entry, by_position)]
        raise AuditFormatError(
            f"{path}: locomo_{lost[0].conv}_qa{lost[0].index} names no question of this data, neither by the "
            "conversation's position nor, for every id of the file, by its number"
        )
    if len(fitting) == 2 and any(by_position[entry.conv] is not by_number[entry.conv] for entry in entries):
        raise AuditFormatError(
            f"{path}: its ids fit this data both by the conversation's position and by its number, and differ"
        )
    return fitting[0]


def _fits(entry: _Entry, reading: Mapping[int, Conversation]) -> bool:
    return entry.conv in reading and entry.index < len(reading[entry.conv].questions)


def _key(question: Question) -> QuestionKey:
    return question.sample_id, question.index


def _words(text: str) -> str:
    return " ".join(text.split()).casefold()
