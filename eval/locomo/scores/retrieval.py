"""How much of the evidence the run's own retriever found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from locomo.dataset import Conversation
from locomo.errors import RunError
from locomo.retrieval.units import UnitKind, covers_of, units_of
from locomo.scores.rows import Figures, Rows
from locomo.scoring.recall import DEFAULT_KS, RecallTable, covered_turns, repaired_recall, repaired_table


def recall_of(rows: Rows, conversations: Sequence[Conversation]) -> RecallTable | None:
    """Recall of the repaired evidence over the questions of ids 1 to 4 that have any.

    At the ks of the run's arms and the usual ones, up to the run's largest: no row has more units. None where the run
    retrieves nothing.

    Raises
    ------
    RunError
        A row holds the id of no unit of its conversation.
    """
    own = {arm.k for arm in rows.config.parsed_arms() if arm.k is not None}
    if not own:
        return None
    ks = sorted(k for k in own.union(DEFAULT_KS) if k <= max(own))
    return repaired_table(rows.retrieved, ks, _covers(rows, conversations))


def all_evidence_at(k: int, rows: Rows, conversations: Sequence[Conversation]) -> Figures:
    """1 where all of a question's evidence is among the first `k` units, else 0; of the questions of `recall_of`.

    Empty where the run retrieves fewer.
    """
    if max((arm.k or 0 for arm in rows.config.parsed_arms()), default=0) < k:
        return {}
    covers = _covers(rows, conversations)
    found = {
        (question.sample_id, question.index): repaired_recall(
            question, covered_turns(units[:k], covers[question.sample_id])
        )
        for question, units in rows.retrieved
    }
    return {key: recall.all for key, recall in found.items() if recall is not None}


def _covers(rows: Rows, conversations: Sequence[Conversation]) -> Mapping[str, Mapping[str, Sequence[str]]]:
    kind = UnitKind(rows.config.units)
    covers = covers_of({sample.sample_id: units_of(sample, kind) for sample in conversations})
    for question, retrieved in rows.retrieved:
        if unknown := [unit for unit in retrieved if unit not in covers[question.sample_id]]:
            raise RunError(f"{unknown[0]}, retrieved for {question.sample_id}, is none of the data's {kind.value}")
    return covers
