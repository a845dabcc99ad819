"""What is searched for: the turns of a conversation, or the ready-made observations, each as one fact of its owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from locomo.dataset import Conversation


class UnitKind(StrEnum):
    """What a unit is."""

    TURNS = "turns"
    OBSERVATIONS = "observations"


class UnitText(StrEnum):
    """What of a unit is embedded and indexed."""

    DATED = "dated"
    """``({date_time}) {speaker}: {text}``, of an observation, which names its speaker, ``({date_time}) {text}``."""

    SPOKEN = "spoken"
    """``{speaker}: {text}``."""

    PLAIN = "plain"
    """``{text}``, with speaker and time as fields of the fact, which the store's search reads before it."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One fact.

    Attributes
    ----------
    id
        Unique in its conversation: a turn's `dia_id`, or ``"O<number>"``.
    text
        What is embedded and indexed.
    covers
        Turn ids that it stands for: a turn for itself, an observation for its evidence.
    thread
        What its neighbours share: the session of a turn, the session and speaker of an observation. Units of a thread
        follow each other in their order.
    """

    id: str
    text: str
    speaker: str
    date_time: str
    covers: tuple[str, ...]
    thread: str


def units_of(
    conversation: Conversation, kind: UnitKind, *, text: UnitText = UnitText.DATED, captions: bool = False
) -> list[Unit]:
    """Return the units of a conversation, in its order.

    Parameters
    ----------
    captions
        Whether the text of a turn carries the caption of its image. The reference does without.
    """
    if kind is UnitKind.OBSERVATIONS:
        return [
            Unit(
                f"O{number}",
                _text(text, fact.text, "", fact.date_time),
                fact.speaker,
                fact.date_time,
                fact.evidence,
                f"{fact.session} {fact.speaker}",
            )
            for number, fact in enumerate(conversation.observations)
        ]
    return [
        Unit(
            turn.dia_id,
            _text(text, turn.text if captions else turn.utterance, turn.speaker, turn.date_time),
            turn.speaker,
            turn.date_time,
            (turn.dia_id,),
            str(turn.session),
        )
        for turn in conversation.turns
    ]


def covers_of(units: Mapping[str, Sequence[Unit]]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Per sample id, unit id to turn ids, as `locomo.scoring.recall` asks for it."""
    return {sample: {unit.id: unit.covers for unit in of_sample} for sample, of_sample in units.items()}


def _text(form: UnitText, text: str, speaker: str, date_time: str) -> str:
    spoken = f"{speaker}: {text}" if speaker else text
    match form:
        case UnitText.DATED:
            return f"({date_time}) {spoken}"
        case UnitText.SPOKEN:
            return spoken
        case UnitText.PLAIN:
            return text
