"""What a report's reader is told to conclude: notes at its head, verdicts on targets, sentences at its end."""

import re
from pathlib import Path
from typing import Any

import pytest
from report_samples import ReadPage, sample_benches, sample_score, with_interval

from locomo.reporting import write_report
from locomo.reporting.key_figures import key_figures

FIDELITY = "Distance from full prefill, 95 % intervals"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    page = write_report(sample_score(), benches=sample_benches(), out=tmp_path_factory.mktemp("report"))
    return page.read_text(encoding="utf-8")


def test_key_figures_are_held_against_their_targets(source: str) -> None:
    shown = re.findall(
        r'<dt>(.*?)</dt><dd data-value="(.*?)">(.*?)</dd>\s*(?:<dd class="target">(.*?)</dd>)?</div>', source
    )
    tags = re.compile("<.*?>")
    verdicts = {float(value): (tags.sub(" ", text).strip(), tags.sub("", target)) for _, value, text, target in shown}
    assert verdicts == {
        0.913: ("0.91 [0.61, 1.38]", "target ≤ 1.5: met"),
        0.961: ("0.961", ""),
        0.5364: ("0.536", ""),
        31.62: ("31.6 [28.4, 33.9]", "target ≥ 25: met"),
        2.043: ("2.04", ""),
        4.126: ("4.13", "target ≥ 4.5: no interval, no verdict"),
        2.018: ("2.02", ""),
    }


@pytest.mark.parametrize(
    ("name", "interval", "verdict"),
    [
        ("kl_over_shuffle_floor", [1.0, 1.5], "met"),
        ("kl_over_shuffle_floor", [1.4, 1.6], "undecided"),
        ("kl_over_shuffle_floor", [1.51, 1.6], "missed"),
        ("kl_over_shuffle_floor", None, None),
        ("ttft_text_over_splice_k50", [25.0, 40.0], "met"),
        ("ttft_text_over_splice_k50", [24.0, 40.0], "undecided"),
        ("ttft_text_over_splice_k50", [10.0, 24.0], "missed"),
        ("recall_all_at_10", [0.4, 0.6], None),
    ],
)
def test_a_verdict_is_by_the_whole_interval(name: str, interval: list[float] | None, verdict: str | None) -> None:
    [figure] = key_figures({"bars": {name: 1.2, f"{name}_interval": interval}}, {})
    assert figure.verdict == verdict


def test_what_a_reader_must_know_first_stands_at_the_head(tmp_path: Path) -> None:
    score, benches = sample_score(), sample_benches()
    score["questions"]["scored"] = 30
    score["judge_refused"] = "the judge refused with 402"
    benches["bench_ttft"]["meta"] = {**benches["bench_ttft"]["meta"], "model": "Other-1B", "finished": False}
    benches["bench_encode"]["meta"] = {**benches["bench_encode"]["meta"], "data_sha256": "7" * 64}
    source = write_report(score, benches=benches, out=tmp_path).read_text(encoding="utf-8")
    assert "<span>questions 30 of 200</span>" in source
    assert re.findall(r'<p class="note">(.*?)</p>', source) == [
        "The run is unfinished: 30 of 200 questions.",
        "No answer counts as judged: the judge refused with 402 before all were.",
        "bench_ttft is of another model than the run: Other-1B, not SmolLM2-135M-Instruct.",
        "bench_encode is of another data than the run: 777777777777…, not 555555555555….",
        "bench_ttft was ended before it had measured everything.",
    ]


def conclusions_of(score: dict[str, Any], out: Path) -> str:
    source = write_report(score, out=out).read_text(encoding="utf-8")
    return re.sub(r"\s+", " ", source[source.index('<section id="conclusions"') :])


def test_conclusions_cite_the_run(source: str) -> None:
    best = sample_score()["arms"]["splice/window:2/tail@10"]
    ratio = best["kl_over_shuffle_floor"]
    text = source[source.index('<section id="conclusions"') :]
    assert f"at k = 10 and n = {ratio['n']} questions of 10 conversations" in text
    assert f"the best spliced arm (splice, window 2, tail) has {with_interval(ratio, 2)} times the KL" in text
    assert f"asked {best['n']} questions and served them as spliced 7, text 3; only spliced ones count" in text
    assert "best of 5 on 97 of these same questions" in text
    text_arm = sample_score()["arms"]["text/tail@10"]
    guessing = f"where guessing gets {text_arm['forced_choice_chance']:.2g}"
    assert f"{with_interval(text_arm['forced_choice'], 2)} in the forced choice, {guessing}" in text
    assert "31.6 times as long" in text
    assert "from the accuracy of SmolLM2-135M-Instruct." in text


@pytest.mark.parametrize(
    ("low", "mean", "high", "said"),
    [
        (0.5, 0.7, 0.9, "closer to full prefill than the same facts in another order are"),
        (0.9, 1.1, 1.4, "the target of 1.5 is met, interval included"),
        (1.2, 1.4, 1.7, "the interval holds the target of 1.5, so this run does not decide it"),
        (1.6, 1.8, 2.0, "the target of 1.5 is missed, interval included"),
    ],
)
def test_the_verdict_follows_the_interval_and_not_the_mean(
    tmp_path: Path, low: float, mean: float, high: float, said: str
) -> None:
    ratio = {"mean": mean, "interval": [low, high], "over": "questions", "groups": 40, "n": 40}
    arm = {
        "n": 40,
        "kl_over_shuffle_floor": ratio,
        "kl_answer": {"mean": 0.1, "interval": [0.09, 0.2], "over": "questions", "groups": 40, "n": 40},
    }
    name = "splice/window:2/tail@10"
    text = conclusions_of({"arms": {name: arm}, "best_arm": name, "best_of": {"arms": [name], "n": 40}}, tmp_path)
    assert said in text
    assert "chosen as the best" not in text
    assert "this run has one, and its intervals are over questions" in text


def test_three_questions_of_two_hundred_are_said_to_be_three(tmp_path: Path) -> None:
    ratio = {"mean": 0.7, "interval": None, "over": "conversations", "groups": 3, "n": 3}
    arm = {
        "n": 200,
        "fidelity_measured": 3,
        "tiers": {"spliced": 3, "text": 197},
        "kl_answer": {**ratio, "mean": 0.05},
        "kl_over_shuffle_floor": ratio,
    }
    name = "splice/window:2/tail@10"
    score = {"k": 10, "arms": {name: arm}, "best_arm": name, "best_of": {"arms": [name], "n": 3}}
    text = conclusions_of(score, tmp_path)
    assert "at k = 10 and n = 3 questions of 3 conversations" in text
    assert "asked 200 questions and served them as spliced 3, text 197" in text
    assert "there is no interval, so nothing is decided" in text
    assert "fewer than 5 conversations" in text
    row = ReadPage((tmp_path / "report.html").read_text(encoding="utf-8")).row(FIDELITY, Arm="splice, window 2, tail")
    assert (row["Asked"], row["Served as"], row["n"]) == ("200", "spliced 3, text 197", "3")
    assert row["KL, answer tokens (nats)"] == "0.0500"


def test_page_and_bars_name_one_best_arm(source: str) -> None:
    # Of the sample's arms others have a smaller ratio: the score chose by KL on shared questions.
    ratios = {name: arm["kl_over_shuffle_floor"]["mean"] for name, arm in sample_score()["arms"].items()}
    assert min(ratios[name] for name in ratios if name.startswith("splice")) < ratios[sample_score()["best_arm"]]
    assert "the best spliced arm (splice, window 2, tail)" in source


def test_a_larger_model_is_not_called_small(tmp_path: Path) -> None:
    text = conclusions_of({"header": {"model_name": "Qwen2.5-7B"}}, tmp_path)
    assert "Qwen2.5-7B (this text was written for a 135M model)" in text
