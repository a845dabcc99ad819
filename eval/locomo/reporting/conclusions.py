"""What a reader may and may not conclude, in words that cite the run's own n and intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .contents import format_interval, format_number
from .key_figures import BARS
from .provenance import model_of
from .scores import ArmScore, Estimate, arms_of, finite, main_k

TARGET = BARS["kl_over_shuffle_floor"].at_most or 1.5
CHANCE = 0.1


@dataclass(frozen=True, slots=True)
class Conclusions:
    """Sentences on what follows from a run, and on what does not."""

    may: Sequence[str]
    may_not: Sequence[str]


def conclusions(score: Mapping[str, Any], benches: Mapping[str, Mapping[str, Any]]) -> Conclusions:
    """Only what the run has is cited; the rest holds for every run of a model this small."""
    arms = arms_of(score)
    may = [*_on_fidelity(arms), *_on_speed(benches)]
    may.append(
        "All arms answered the same questions over the same retrieved ids: differences between arms of this run are "
        "paired. Many arms are compared here and no interval is corrected for that."
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


def _on_fidelity(arms: Sequence[ArmScore]) -> list[str]:
    """The best spliced arm over retrieved facts, at the k that most arms were run at."""
    k = main_k(arms)
    ratios = [
        (ratio, arm)
        for arm in arms
        if arm.name.kind == "splice" and not arm.name.oracle and arm.name.k == k
        if (ratio := arm.estimate("kl_over_shuffle_floor"))
    ]
    if not ratios:
        return []
    ratio, arm = min(ratios, key=lambda found: found[0].mean)
    high, low = ratio.high, ratio.low
    if high is None or low is None:
        verdict = "no interval was worked out, so nothing is decided"
    elif high <= 1:
        verdict = "closer to full prefill than the same facts in another order are"
    elif high <= TARGET:
        verdict = f"the target of {TARGET:g} is met, interval included"
    elif low > TARGET:
        verdict = f"the target of {TARGET:g} is missed, interval included"
    else:
        verdict = f"the interval holds the target of {TARGET:g}, so this run does not decide it"
    n = arm.number("n")
    sentences = [
        f"On this model, at k = {k} and n = {n or 0:.0f} questions, the best spliced arm ({arm.name.label}) has "
        f"{_cite(ratio)} times the KL that reordering the same facts causes: {verdict}."
    ]
    if len(ratios) > 1:
        sentences[0] += f" It was chosen as the best of {len(ratios)} on these same questions, which flatters it."
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
    small = model is None or "135m" in model.lower()
    who = "a 135M model" if small else f"{model} (this text was written for a 135M model)"
    text = next((arm for arm in arms if arm.name.series == "text/tail" and arm.name.k == main_k(arms)), None)
    cited = []
    if text is not None:
        if (f1 := text.number("official_f1", "all")) is not None:
            cited.append(f"an official F1 of {format_number(f1)}")
        if choice := text.estimate("forced_choice"):
            cited.append(f"{_cite(choice)} in the forced choice, where guessing gets {CHANCE:g}")
    with_text = f" With the same facts as text it has {' and '.join(cited)}." if cited else ""
    return [
        f"How well a memory answers questions, from the accuracy of {who}.{with_text} Where the model can hardly use a "
        "fact it reads, arms look alike whether or not they lose information: read fidelity first."
    ]


def _on_intervals(arms: Sequence[ArmScore]) -> list[str]:
    over = {value.over for arm in arms for key in ("kl_answer", "forced_choice") if (value := arm.estimate(key))}
    counts = [n for arm in arms if (n := arm.number("n")) is not None]
    size = f" At n = {max(counts):.0f}" if counts else " At this n"
    if "questions" in over:
        return [
            f"Anything of other conversations: this run has one, and its intervals are over questions.{size} they say "
            "how the figures vary within it."
        ]
    return [
        f"Small differences.{size} questions over a handful of conversations, the bootstrap over conversations is "
        "coarse; an interval that barely leaves zero or one settles little. For runs: python -m locomo compare."
    ]
