"""What a reader may and may not conclude, in words that cite the run's own n and intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from locomo.scoring.statistics import FEWEST_GROUPS

from .contents import format_interval, format_number
from .fidelity import served_as
from .key_figures import BARS
from .provenance import model_of
from .scores import ArmScore, Estimate, arms_of, finite, main_k, spread

TARGET = BARS["kl_over_shuffle_floor"].at_most or 1.5


@dataclass(frozen=True, slots=True)
class Conclusions:
    """Sentences on what follows from a run, and on what does not."""

    may: Sequence[str]
    may_not: Sequence[str]


def conclusions(score: Mapping[str, Any], benches: Mapping[str, Mapping[str, Any]]) -> Conclusions:
    """Only what the run has is cited; the rest holds for every run of a model this small."""
    arms = arms_of(score)
    may = [*_on_fidelity(score, arms), *_on_speed(benches)]
    may.append(
        "How two arms of this run differ, from the paired differences alone: they are over the questions that both "
        "arms have, which n counts. Two arms' own figures may be over different questions, where one failed or was not "
        "spliced. Many arms are compared here and no interval is corrected for that."
    )
    may_not = [*_on_accuracy(score, arms), *_on_intervals(arms)]
    may_not += [
        "That a larger model behaves alike. How splicing degrades depends on depth, heads and training; run the same "
        "harness on the model in question.",
        "Anything from this page's numbers set beside the published ones: model, judge, facts, retriever and hardware "
        "differ.",
        "How much faster another machine or model would be. The ratio of prefill to copying KV is this machine's and "
        "this model's; where prefill is cheap, the advantage shrinks.",
        "That answers are right. Fidelity compares with the same model reading the same facts as text: a faithful arm "
        "repeats that model's mistakes too.",
    ]
    return Conclusions(may, may_not)


def _cite(value: Estimate, digits: int = 2) -> str:
    return " ".join(filter(None, (format_number(value.mean, digits), format_interval(value, digits))))


def _on_fidelity(score: Mapping[str, Any], arms: Sequence[ArmScore]) -> list[str]:
    """The best spliced arm over retrieved facts, as the score chose it."""
    best = (score.get("arms") or {}).get(score.get("best_arm") or "")
    if best is None:
        return []
    arm = next(arm for arm in arms if arm.values is best)
    ratio = arm.estimate("kl_over_shuffle_floor")
    if ratio is None:
        return []
    high, low = ratio.high, ratio.low
    if high is None or low is None:
        verdict = "there is no interval, so nothing is decided"
    elif high <= 1:
        verdict = "closer to full prefill than the same facts in another order are"
    elif high <= TARGET:
        verdict = f"the target of {TARGET:g} is met, interval included"
    elif low > TARGET:
        verdict = f"the target of {TARGET:g} is missed, interval included"
    else:
        verdict = f"the interval holds the target of {TARGET:g}, so this run does not decide it"
    of = f" of {varied}" if (varied := spread([ratio])) and ratio.over == "conversations" else ""
    sentences = [
        f"On this model, at k = {main_k(score)} and n = {ratio.n} questions{of}, the best spliced arm "
        f"({arm.name.label}) has {_cite(ratio)} times the KL that reordering the same facts causes: {verdict}."
    ]
    asked, measured = arm.number("n"), arm.number("fidelity_measured")
    if asked is not None and measured is not None and measured < asked:
        sentences[0] += (
            f" It was asked {asked:.0f} questions and served them as {served_as(arm)}; only spliced ones count."
        )
    chosen_from = score.get("best_of") or {}
    if len(chosen_from.get("arms") or ()) > 1:
        sentences[0] += (
            f" It was chosen as the best of {len(chosen_from['arms'])} on {chosen_from['n']} of these same questions, "
            "which flatters it."
        )
    if share := arm.estimate("share_of_information_kept"):
        sentences.append(f"That arm keeps {_cite(share)} of what the facts tell this model about the gold answer.")
    return sentences


def _on_speed(benches: Mapping[str, Mapping[str, Any]]) -> list[str]:
    bars: dict[str, Any] = {}
    for bench in benches.values():
        bars.update(bench.get("bars") or {})
    found = []
    if (ratio := finite(bars.get("ttft_text_over_splice_k50"))) is not None:
        found.append(
            f"On this machine, with this model and k = 50, text at the tail takes {format_number(ratio, 1)} times as "
            "long to the first token as splicing, retrieval included."
        )
    if (ratio := finite(bars.get("qps_ratio_16_users_k50"))) is not None:
        found.append(
            f"On this machine, 16 users at k = 50 get {format_number(ratio, 1)} times the requests per second of text "
            "at the tail."
        )
    return found


def _on_accuracy(score: Mapping[str, Any], arms: Sequence[ArmScore]) -> list[str]:
    """How good the model is with all the facts as text: what differences in accuracy could be seen at all."""
    model = model_of(score)
    if model is None:
        who = "a model whose name the run does not have"
    else:
        who = model if "135m" in model.lower() else f"{model} (this text was written for a 135M model)"
    text = next((arm for arm in arms if arm.name.series == "text/tail" and arm.name.k == main_k(score)), None)
    cited = []
    if text is not None:
        if (f1 := text.number("official_f1", "all")) is not None:
            cited.append(f"an official F1 of {format_number(f1)}")
        if choice := text.estimate("forced_choice"):
            chance = text.number("forced_choice_chance")
            guessing = f", where guessing gets {chance:.2g}" if chance is not None else ""
            cited.append(f"{_cite(choice)} in the forced choice{guessing}")
    with_text = f" With the same facts as text it has {' and '.join(cited)}." if cited else ""
    return [
        f"How well a memory answers questions, from the accuracy of {who}.{with_text} Where the model can hardly use a "
        "fact it reads, arms look alike whether or not they lose information: read fidelity first."
    ]


def _on_intervals(arms: Sequence[ArmScore]) -> list[str]:
    found = [value for arm in arms for key in ("kl_answer", "forced_choice") if (value := arm.estimate(key))]
    if any(value.over == "questions" for value in found):
        return [
            "Anything of other conversations: this run has one, and its intervals are over questions. They say how the "
            "figures vary within it."
        ]
    groups = [value.groups for value in found if value.groups is not None]
    if groups and min(groups) < FEWEST_GROUPS:
        return [
            f"How certain a figure of fewer than {FEWEST_GROUPS} conversations is: there is no interval from so few, "
            "and nothing is decided by them."
        ]
    return [
        f"Small differences. Intervals are over {spread(found) or 'a handful of conversations'}, few by any measure; "
        "one that barely leaves zero or one settles little. For runs: python -m locomo compare."
    ]
