"""Which units each arm puts before the model."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from locomo.arms.base import Selection, Served
from locomo.dataset import Question
from locomo.errors import NothingToServe
from locomo.reporting.arm_names import ArmName
from locomo.retrieval.units import Unit
from locomo.runs.config import selection_of


def served_by(
    arm: ArmName, question: Question, *, retrieved: Sequence[str], units: Mapping[str, Unit], seed: int
) -> Served:
    """What one arm serves for one question.

    Parameters
    ----------
    retrieved
        Unit ids, best first: at least one more than the arm's k where there are so many.
    units
        All of the conversation, by id, in its order.

    Raises
    ------
    NothingToServe
        A floor that has no other order, or no unit to swap.
    """
    placement, policy = arm.placement or "tail", arm.policy
    # The best nearest the question, as the server's own default has it.
    best = list(reversed(retrieved[: arm.k or 0]))
    draw = random.Random(f"{seed} {question.sample_id} {question.index}")
    match selection_of(arm):
        case Selection.NOTHING:
            chosen: list[str] = []
        case Selection.EVERYTHING:
            chosen = list(units)
        case Selection.EVIDENCE:
            evidence = set(question.evidence)
            chosen = [unit.id for unit in units.values() if evidence & set(unit.covers)][: arm.k]
        case Selection.SHUFFLED:
            chosen = _other_order(best, draw)
        case Selection.SWAPPED:
            chosen = _one_swapped(best, retrieved[arm.k or 0 :], question, units, draw)
        case Selection.RETRIEVED:
            chosen = best
    return Served(tuple(chosen), placement, policy, arm.repair or "none")


def _other_order(ids: Sequence[str], draw: random.Random) -> list[str]:
    if len(ids) < 2:
        raise NothingToServe(f"{len(ids)} retrieved: there is no other order")
    shuffled = list(ids)
    while shuffled == list(ids):
        draw.shuffle(shuffled)
    return shuffled


def _one_swapped(
    ids: Sequence[str], others: Sequence[str], question: Question, units: Mapping[str, Unit], draw: random.Random
) -> list[str]:
    """One unit that answers nothing, replaced by the next best that answers nothing either."""
    evidence = set(question.evidence)
    distractors = [at for at, unit in enumerate(ids) if not evidence & set(units[unit].covers)]
    spare = [unit for unit in others if not evidence & set(units[unit].covers)]
    if not distractors:
        raise NothingToServe("everything retrieved is evidence: there is no distractor to swap")
    if not spare:
        raise NothingToServe("nothing else was retrieved that is no evidence: there is no distractor to swap in")
    swapped = list(ids)
    swapped[draw.choice(distractors)] = spare[0]
    return swapped
