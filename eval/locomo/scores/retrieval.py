"""How much of the evidence the run's own retriever found."""

from __future__ import annotations

from collections.abc import Sequence

from locomo.dataset import Conversation
from locomo.errors import RunError
from locomo.retrieval.units import UnitKind, covers_of, units_of
from locomo.scores.rows import Rows
from locomo.scoring.recall import DEFAULT_KS, RecallTable, repaired_table


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
    kind = UnitKind(rows.config.units)
    covers = covers_of({sample.sample_id: units_of(sample, kind) for sample in conversations})
    for question, retrieved in rows.retrieved:
        if unknown := [unit for unit in retrieved if unit not in covers[question.sample_id]]:
            raise RunError(f"{unknown[0]}, retrieved for {question.sample_id}, is none of the data's {kind.value}")
    return repaired_table(rows.retrieved, ks, covers)
