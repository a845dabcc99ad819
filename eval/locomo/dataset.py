"""LoCoMo's file format: long conversations of two people, with questions and the turns that answer them.

The published file has irregularities that this loader repairs or keeps out of the way; `Question.evidence_raw` and
`Turn.date_time` stay as they were published.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from locomo.errors import DatasetFormatError, DatasetNotFoundError

_SESSION_KEY = re.compile(r"session_(\d+)")
_DIA_ID = re.compile(r"D:?(\d+):(\d+)")  # "D:11:26" and "D30:05" occur


class Category(IntEnum):
    """The published ids. Key everything by them: the names are permuted between published tables."""

    MULTI_HOP = 1
    TEMPORAL = 2
    OPEN_DOMAIN = 3
    SINGLE_HOP = 4
    ADVERSARIAL = 5


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. `date_time` is its session's, verbatim (`""` where the file has none)."""

    dia_id: str
    speaker: str
    utterance: str
    image_caption: str | None
    session: int
    date_time: str

    @property
    def text(self) -> str:
        """The utterance, and after it the caption of the image where one was sent."""
        if self.image_caption is None:
            return self.utterance
        return f"{self.utterance} [shares {self.image_caption}]".lstrip()


@dataclass(frozen=True, slots=True)
class Observation:
    """A ready-made fact about one speaker, with the turns that it was drawn from."""

    speaker: str
    text: str
    evidence: tuple[str, ...]
    session: int
    date_time: str


@dataclass(frozen=True, slots=True)
class Question:
    """One question, identified by `(sample_id, index)`: texts repeat within a conversation.

    `evidence` holds the ids that name a turn, repaired and without duplicates; `evidence_raw` what the file says.
    """

    sample_id: str
    index: int
    question: str
    answer: str | None
    adversarial_answer: str | None
    evidence: tuple[str, ...]
    evidence_raw: tuple[str, ...]
    category: Category


@dataclass(frozen=True, slots=True)
class Conversation:
    """One sample: turns in order of sessions, then its questions and its ready-made observations."""

    sample_id: str
    speakers: tuple[str, str]
    turns: tuple[Turn, ...]
    questions: tuple[Question, ...]
    observations: tuple[Observation, ...]

    @property
    def sessions(self) -> tuple[int, ...]:
        """Numbers of the sessions that have turns, ascending."""
        return tuple(sorted({turn.session for turn in self.turns}))


def demo_conversation_path() -> Path:
    """Return the small invented conversation that ships with this package."""
    return Path(__file__).parent / "data" / "demo_conversation.json"


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a data file in hex, to be recorded beside every result."""
    return hashlib.sha256(_read(path)).hexdigest()


def load(path: Path) -> list[Conversation]:
    """Read every conversation of a LoCoMo file.

    Raises:
        DatasetNotFoundError: there is no file at `path`.
        DatasetFormatError: it is truncated, or is not in LoCoMo's schema.
    """
    try:
        samples = json.loads(_read(path))
    except ValueError as error:
        raise DatasetFormatError(f"{path} is not JSON ({error}): truncated? Download it again.") from error
    if not isinstance(samples, list):
        raise DatasetFormatError(f"{path}: expected a list of samples, found {type(samples).__name__}")
    try:
        return [_conversation(sample) for sample in samples]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DatasetFormatError(f"{path} is not in LoCoMo's schema: {type(error).__name__}: {error}") from error


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise DatasetNotFoundError(
            f"no LoCoMo file at {path}. Get data/locomo10.json from https://github.com/snap-research/locomo "
            "(licence CC BY-NC 4.0) and name it with --data or LOCOMO_DATA."
        )
    return path.read_bytes()


def _conversation(sample: dict[str, Any]) -> Conversation:
    sample_id, body = str(sample["sample_id"]), sample["conversation"]
    dates = {key.removesuffix("_date_time"): date for key, date in body.items() if key.endswith("_date_time")}
    numbered = [(int(match[1]), body[key]) for key in body if (match := _SESSION_KEY.fullmatch(key))]
    turns = tuple(
        _turn(item, session=number, date_time=dates.get(f"session_{number}", ""))
        for number, items in sorted(numbered, key=lambda pair: pair[0])
        for item in items
    )
    if not turns:
        raise DatasetFormatError(f"sample {sample_id} has no session with turns")
    known = {turn.dia_id for turn in turns}
    observations = tuple(
        Observation(speaker, text.strip(), _repair(evidence, known), number, dates.get(f"session_{number}", ""))
        for number, _ in sorted(numbered, key=lambda pair: pair[0])
        for speaker, facts in sample.get("observation", {}).get(f"session_{number}_observation", {}).items()
        for text, evidence in facts
    )
    questions = tuple(_question(item, sample_id, index, known) for index, item in enumerate(sample.get("qa", [])))
    return Conversation(sample_id, (body["speaker_a"], body["speaker_b"]), turns, questions, observations)


def _turn(item: dict[str, Any], *, session: int, date_time: str) -> Turn:
    caption = (item.get("blip_caption") or "").strip() or None
    return Turn(item["dia_id"], item["speaker"].strip(), item["text"].strip(), caption, session, date_time)


def _question(item: dict[str, Any], sample_id: str, index: int, known: set[str]) -> Question:
    raw = tuple(item.get("evidence", ()))
    answer, adversarial = (None if item.get(k) is None else str(item[k]) for k in ("answer", "adversarial_answer"))
    text, category = item["question"].strip(), Category(item["category"])
    return Question(sample_id, index, text, answer, adversarial, _repair(raw, known), raw, category)


def _repair(evidence: str | list[str] | tuple[str, ...], known: set[str]) -> tuple[str, ...]:
    """Read the ids out of evidence strings, several of which may be joined in one, and keep those that name a turn."""
    joined = evidence if isinstance(evidence, str) else " ".join(evidence)
    ids = (f"D{int(session)}:{int(turn)}" for session, turn in _DIA_ID.findall(joined))
    return tuple(dict.fromkeys(dia_id for dia_id in ids if dia_id in known))
