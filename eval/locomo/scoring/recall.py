"""How much of a question's evidence a retriever found among its first k units.

Two readings of the evidence. *Strict* is the official one: the strings of the data file, each of which counts as found
where it is, verbatim, one of the retrieved turn ids; no evidence counts 1. *Repaired* takes the ids that the loader
made out of those strings, over the questions of ids 1 to 4 that have any.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from locomo.dataset import Category, Question

DEFAULT_KS = (5, 10, 20, 50)


class Recall(NamedTuple):
    """Whether all and whether any of the evidence was found, and the share of it in [0, 1]; as means after `mean`."""

    all: float
    any: float
    share: float


@dataclass(frozen=True, slots=True)
class RecallTable:
    """Means over the questions that count.

    ``n`` questions; ``overall[k]`` over all of them, ``by_id[category id][k]`` over those of one id.
    """

    n: int
    overall: dict[int, Recall]
    by_id: dict[int, dict[int, Recall]]

    def as_json(self) -> dict[str, dict[str, float]]:
        """``{"all": {"5": x, ...}, "any": {...}, "share": {...}}`` over all questions, shares in [0, 1]."""
        return {
            name: {str(k): float(getattr(recall, name)) for k, recall in self.overall.items()}
            for name in Recall._fields
        }


def covered_turns(units: Iterable[str], covers: Mapping[str, Sequence[str]] | None = None) -> set[str]:
    """Turn ids that units stand for.

    Parameters
    ----------
    units
        Retrieved unit ids.
    covers
        Unit id to the turn ids that the unit was drawn from (an observation may have several, or none); without it a
        unit is the turn of that id.

    Raises
    ------
    KeyError
        A unit is not in `covers`.
    """
    return set(units) if covers is None else {turn for unit in units for turn in covers[unit]}


def strict_recall(question: Question, turns: Collection[str]) -> Recall:
    """Recall of the evidence strings as published: found verbatim among `turns`, or there are none."""
    return _recall(question.evidence_raw, turns)


def repaired_recall(question: Question, turns: Collection[str]) -> Recall | None:
    """Recall of the repaired evidence ids, or `None` for a question that does not count (id 5, or no evidence)."""
    if question.category is Category.ADVERSARIAL or not question.evidence:
        return None
    return _recall(question.evidence, turns)


def strict_table(
    retrieved: Iterable[tuple[Question, Sequence[str]]],
    ks: Sequence[int] = DEFAULT_KS,
    covers: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
) -> RecallTable:
    """Strict recall over every question; parameters as of `repaired_table`."""
    return _table(retrieved, ks, covers, repaired=False)


def repaired_table(
    retrieved: Iterable[tuple[Question, Sequence[str]]],
    ks: Sequence[int] = DEFAULT_KS,
    covers: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
) -> RecallTable:
    """Repaired recall over the questions of ids 1 to 4 with evidence.

    Parameters
    ----------
    retrieved
        Each question with its retrieved unit ids, best first.
    ks
        How many of the first units to look at.
    covers
        Per sample id, unit id to turn ids (see `covered_turns`): ids of turns and units repeat between conversations.
    """
    return _table(retrieved, ks, covers, repaired=True)


def mean(recalls: Collection[Recall]) -> Recall:
    """Mean of each field over one or more questions."""
    assert recalls, "a mean over no question"
    return Recall(*(sum(column) / len(recalls) for column in zip(*recalls, strict=True)))


def _recall(evidence: Sequence[str], turns: Collection[str]) -> Recall:
    if not evidence:
        return Recall(1.0, 1.0, 1.0)
    found = sum(item in turns for item in evidence)
    return Recall(float(found == len(evidence)), float(found > 0), found / len(evidence))


def _table(
    retrieved: Iterable[tuple[Question, Sequence[str]]],
    ks: Sequence[int],
    covers: Mapping[str, Mapping[str, Sequence[str]]] | None,
    *,
    repaired: bool,
) -> RecallTable:
    by_id: dict[int, dict[int, list[Recall]]] = {}
    for question, units in retrieved:
        of_sample = None if covers is None else covers[question.sample_id]
        for k in ks:
            turns = covered_turns(units[:k], of_sample)
            recall = repaired_recall(question, turns) if repaired else strict_recall(question, turns)
            if recall is not None:
                by_id.setdefault(int(question.category), {}).setdefault(k, []).append(recall)
    pooled = {k: [recall for columns in by_id.values() for recall in columns[k]] for k in ks} if by_id else {}
    return RecallTable(
        n=len(pooled[ks[0]]) if pooled else 0,
        overall={k: mean(recalls) for k, recalls in pooled.items()},
        by_id={number: {k: mean(found) for k, found in by_id[number].items()} for number in sorted(by_id)},
    )
