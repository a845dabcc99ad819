"""How far an arm is from full prefill of the same ids, and what of the answer's information it keeps."""

from __future__ import annotations

from typing import Any

from locomo.reporting.arm_names import ArmName
from locomo.runs.config import reference_of
from locomo.scores import estimates
from locomo.scores.rows import Arm, Figures, Rows

FLOOR = "floor/shuffled"


def distance_of(arm: Arm, rows: Rows) -> dict[str, Any]:
    """Every figure of one arm's fidelity; null where no question has it.

    Each is paired over the questions where all arms in it have figures, of a splice arm those that were spliced.

    ``nll_per_token_difference`` is the mean over questions of the NLL per gold token, nats, less the reference's.
    ``information_in_text`` is the mean over questions of NLL without memory less the reference's, each NLL that of the
    whole answer, nats; ``share_of_information_kept`` is the sum of the same of the arm over that of the reference, and
    null unless the interval of ``information_in_text`` lies above 0: there is no share of what may be nothing.
    ``kl_over_shuffle_floor`` is the ratio of the means of ``kl_answer`` of the arm and of ``floor/shuffled`` at the
    same k and placement; the floor has the retrieved facts, so that arms with other facts have no such ratio, nor does
    the reference, whose distance is 0 by definition. ``forced_choice_chance`` is what guessing would get in the forced
    choice: a question with fewer other answers to choose from than nine has more. ``unlisted_probability`` is the mean
    probability of all tokens that the arm's distributions do not list, whose share in a divergence is pooled.
    """
    reference = rows.arm(reference_of(arm.name, rows.config) or "")
    nothing = rows.arm("none")
    floor = floor_of(arm.name, rows)
    kl_answer = arm.figure("kl_answer")
    information = _information(arm, reference, nothing) if reference and nothing else ({}, {})
    in_text = estimates.mean(information[1])
    has_information = in_text is not None and in_text["interval"] is not None and in_text["interval"][0] > 0
    return {
        "kl_first": estimates.mean(arm.figure("kl_first"), within=estimates.POSITIVE),
        "kl_answer": estimates.mean(kl_answer, within=estimates.POSITIVE),
        "unlisted_probability": estimates.mean(arm.figure("unlisted"), within=estimates.SHARE),
        "top1_first": estimates.mean(arm.figure("top1_first"), within=estimates.SHARE),
        "nll_per_token_difference": estimates.mean_difference(arm.figure("nll"), reference.figure("nll"))
        if reference
        else None,
        "information_in_text": in_text,
        "share_of_information_kept": estimates.ratio(*information) if has_information else None,
        "forced_choice": estimates.mean(arm.forced_choice(), within=estimates.SHARE),
        "forced_choice_chance": chance["mean"] if (chance := estimates.mean(arm.forced_choice_chance())) else None,
        "kl_over_shuffle_floor": estimates.ratio(kl_answer, floor.figure("kl_answer")) if floor else None,
    }


def floor_of(arm: ArmName, rows: Rows) -> Arm | None:
    """The floor that an arm is held against: the same facts in another order, at the same place."""
    has_the_retrieved_facts = arm.kind in ("splice", "floor") and not arm.oracle
    floor = f"{FLOOR}/head" if arm.placement == "head" else FLOOR
    return rows.arm(f"{floor}@{arm.k}") if has_the_retrieved_facts and arm.k is not None else None


def _information(arm: Arm, reference: Arm, nothing: Arm) -> tuple[Figures, Figures]:
    """Nats that each question's facts are worth, to the arm and to the reference, where all three have figures."""
    with_arm, with_text, without = arm.answer_nats(), reference.answer_nats(), nothing.answer_nats()
    shared = [key for key in with_arm if key in with_text and key in without]
    return (
        {key: without[key] - with_arm[key] for key in shared},
        {key: without[key] - with_text[key] for key in shared},
    )
