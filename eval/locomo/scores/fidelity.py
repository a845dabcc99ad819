"""How far an arm is from full prefill of the same ids, and what of the answer's information it keeps."""

from __future__ import annotations

from typing import Any

from locomo.reporting.arm_names import ArmName
from locomo.runs.config import reference_of
from locomo.scores import estimates
from locomo.scores.rows import Arm, Rows

FLOOR = "floor/shuffled"


def fidelity_of(arm: Arm, rows: Rows) -> dict[str, Any]:
    """Every fidelity figure of one arm; null where no question has it.

    Each is paired over the questions where all arms in it have figures, of a splice arm those that were spliced.

    ``nll_difference`` is the mean over questions of the NLL per gold token, nats, less the reference's.
    ``share_of_information_kept`` is the sum over questions of NLL without memory less the arm's, over the same with the
    reference, each NLL that of the whole answer. ``kl_over_shuffle_floor`` is the ratio of the means of ``kl_answer``
    of the arm and of ``floor/shuffled`` at the same k and placement; the floor has the retrieved facts, so that arms with other facts
    have no such ratio, nor does the reference, whose distance is 0 by definition.
    """
    reference = rows.arm(reference_of(arm.name, rows.config) or "")
    nothing = rows.arm("none")
    kl_answer = arm.figure("kl_answer")
    return {
        "kl_first": estimates.mean(arm.figure("kl_first")),
        "kl_answer": estimates.mean(kl_answer),
        "top1_first": estimates.mean(arm.figure("top1_first")),
        "nll_difference": estimates.mean_difference(arm.figure("nll"), reference.figure("nll")) if reference else None,
        "share_of_information_kept": _share_kept(arm, reference, nothing) if reference and nothing else None,
        "forced_choice": estimates.mean(arm.forced_choice()),
        "kl_over_shuffle_floor": estimates.ratio(kl_answer, floor.figure("kl_answer"))
        if (floor := _floor_of(arm.name, rows))
        else None,
    }


def _share_kept(arm: Arm, reference: Arm, nothing: Arm) -> estimates.Estimate | None:
    with_arm, with_text, without = arm.answer_nats(), reference.answer_nats(), nothing.answer_nats()
    kept = {key: without[key] - nats for key, nats in with_arm.items() if key in without}
    all_there_is = {key: without[key] - nats for key, nats in with_text.items() if key in without}
    return estimates.ratio(kept, all_there_is)


def _floor_of(arm: ArmName, rows: Rows) -> Arm | None:
    has_the_retrieved_facts = arm.kind in ("splice", "floor") and not arm.oracle
    floor = f"{FLOOR}/head" if arm.placement == "head" else FLOOR
    return rows.arm(f"{floor}@{arm.k}") if has_the_retrieved_facts and arm.k is not None else None
