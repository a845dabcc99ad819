import copy
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from report_samples import ReadPage, sample_benches, sample_score

from locomo.errors import ReportInputError
from locomo.reporting import read_object, write_report
from locomo.reporting.fidelity import fidelity

FIDELITY = "Distance from full prefill, 95 % intervals"
OFFICIAL = "Official LoCoMo F1, by category id"
MEM0 = "Mem0's metrics (set overlap without stems; sentence BLEU): not the official F1"
JUDGE = "LLM judge, 95 % intervals: Wilson"
INFORMATION = "Information kept and forced choice, 95 % intervals"
FIGURES = {
    "accuracy",
    "encoding",
    "fidelity_arms",
    "fidelity_k",
    "fidelity_length",
    "forced_choice",
    "information_kept",
    "judge",
    "recall",
    "throughput",
    "ttft",
    "ttft_parts",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    assert write_report(sample_score(), benches=sample_benches(), out=out) == out / "report.html"
    return out


@pytest.fixture(scope="module")
def source(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(source: str) -> ReadPage:
    return ReadPage(source)


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = [*value.values(), *(float(key) for key in value if re.fullmatch(r"\d+", str(key)))]
    if isinstance(value, list):
        for item in value:
            yield from numbers_in(item)
    elif isinstance(value, int | float):
        yield float(value)


def with_interval(estimate: dict[str, Any], digits: int) -> str:
    low, high = estimate["interval"]
    return f"{estimate['mean']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def test_it_is_well_formed(page: ReadPage) -> None:
    assert page.unbalanced == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [(attributes.get("href") or attributes.get("xlink:href") or "") for _, attributes in page.tags]
    assert {link.removeprefix("#") for link in links if link.startswith("#")} <= set(ids)


def test_nothing_is_loaded_from_outside(source: str, page: ReadPage) -> None:
    loading = {"script", "link", "iframe", "object", "embed", "img", "source", "video", "audio"}
    assert not loading & {tag for tag, _ in page.tags}
    for tag, attributes in page.tags:
        for name in ("src", "srcset", "data", "poster", "background"):
            assert name not in attributes, (tag, attributes)
    assert "@import" not in source
    assert set(re.findall(r"url\(\s*['\"]?(.)", source)) == {"#"}
    addresses = set(re.findall(r"https?://[^\"'\s<>)]+", source))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_every_chart_is_drawn_into_the_page(page: ReadPage) -> None:
    figures = [attributes["id"] for tag, attributes in page.tags if tag == "figure"]
    assert set(figures) == {f"chart-{name}" for name in FIGURES}
    assert sum(tag == "svg" for tag, _ in page.tags) == len(FIGURES)
    charts = [attributes for _, attributes in page.tags if attributes.get("class") == "chart"]
    assert all(chart["role"] == "img" and chart["aria-label"] for chart in charts)


def test_charts_follow_light_and_dark(source: str) -> None:
    assert "prefers-color-scheme: dark" in source
    for svg in re.findall(r"<svg.*?</svg>", source, flags=re.DOTALL):
        assert "var(--muted)" in svg
        assert re.findall(r"#[0-9a-fA-F]{6}\b", svg) == []


def test_it_is_readable_on_a_phone_and_on_paper(source: str, page: ReadPage) -> None:
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags
    assert "@media print" in source


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_the_pngs_are_wide_enough_and_not_blank(folder: Path, name: str) -> None:
    with Image.open(io.BytesIO((folder / f"{name}.png").read_bytes())) as image:
        assert image.format == "PNG"
        assert image.width == 1400
        assert image.height >= 200
        colours = image.convert("RGB").getcolors(maxcolors=1 << 24)
        assert colours is not None
        assert 0.3 < max(colours)[0] / (image.width * image.height) < 0.99
    assert len(colours) > 20


def test_no_other_files_are_left(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"report.html", *(f"{name}.png" for name in FIGURES)}


def test_every_number_of_the_tables_is_one_of_the_input(page: ReadPage) -> None:
    published = {53.8, 56.8, 59.2, 60.3, 63.3, 37.2, 56.5, 58.2, 58.3, 64.4, 50.5, 57.4, 58.6, 58.8, 64.6}
    published |= {5, 50, 16.6, 33.2, 17.3, 68.3}
    known = {*numbers_in(sample_score()), *numbers_in(sample_benches()), *published}
    assert len(page.values) > 500
    assert {value for value in page.values if value not in known} == set()


@pytest.mark.parametrize(
    ("arm", "label", "k"),
    [
        ("full", "full context", "–"),
        ("none@10", "no memory", "10"),
        ("splice/window:2/tail@10", "splice, window 2, tail", "10"),
        ("splice/ladder:0+4/tail@50", "splice, ladder 0+4, tail", "50"),
        ("oracle/splice/ladder:0+4/tail@10", "evidence as splice, ladder 0+4, tail", "10"),
        ("floor/fp32@10", "floor: bf16 against fp32", "10"),
    ],
)
def test_the_tables_say_what_the_score_says_of_an_arm(page: ReadPage, arm: str, label: str, k: str) -> None:
    values = sample_score()["arms"][arm]
    fidelity = page.row(FIDELITY, Arm=label, k=k)
    assert fidelity["n"] == str(values["n"])
    assert fidelity["KL, answer tokens (nats)"] == with_interval(values["kl_answer"], 4)
    assert fidelity["KL, first token (nats)"] == with_interval(values["kl_first"], 4)
    assert fidelity["÷ floor of another order"] == with_interval(values["kl_over_shuffle_floor"], 2)
    assert fidelity["Same first token"] == with_interval(values["top1_first"], 3)
    assert fidelity["ΔNLL (nats per token)"] == with_interval(values["nll_difference"], 3)
    information = page.row(INFORMATION, Arm=label, k=k)
    assert information["Share of information kept"] == with_interval(values["share_of_information_kept"], 3)
    assert information["Forced choice, share right"] == with_interval(values["forced_choice"], 3)
    official = page.row(OFFICIAL, Arm=label, k=k)
    named = {"all": "all ids", "4": "4 single-hop", "1": "1 multi-hop", "2": "2 temporal", "3": "3 open-domain"}
    for key, column in {**named, "5": "5 adversarial"}.items():
        assert official[column] == f"{values['official_f1'][key]:.3f}"
    assert official["all, without audited errors"] == f"{values['official_f1_audited']:.3f}"
    assert official["failed"] == str(values["errors"])
    mem0 = page.row(MEM0, Arm=label, k=k)
    assert mem0["Mem0 F1"] == f"{values['mem0_f1']:.3f}"
    assert mem0["Mem0 BLEU-1"] == f"{values['mem0_bleu1']:.3f}"


def test_the_judge_has_its_own_table_of_the_arms_that_were_judged(page: ReadPage) -> None:
    judged = {row["Arm"] for row in page.tables[JUDGE]}
    assert judged == {"no memory", "text, head", "text, tail"}
    values = sample_score()["arms"]["text/tail@10"]["judge"]
    row = page.row(JUDGE, Arm="text, tail")
    low, high = values["interval"]
    assert row["Accuracy"] == f"{values['accuracy']:.3f} [{low:.3f}, {high:.3f}]"
    assert row["Each run"] == f"{values['runs'][0]:.3f} / {values['runs'][1]:.3f} / –"
    assert (row["Abstained"], row["Unjudged"]) == (str(values["abstained"]), str(values["unjudged"]))


def test_other_metrics_never_share_a_column_or_table_with_the_official_f1(page: ReadPage) -> None:
    assert not [column for column in page.tables[OFFICIAL][0] if "Mem0" in column or "judge" in column.lower()]
    assert list(page.tables[MEM0][0]) == ["Arm", "k", "n", "Mem0 F1", "Mem0 BLEU-1"]


def test_recall_and_speed_tables(page: ReadPage) -> None:
    score, benches = sample_score(), sample_benches()
    recall = page.row("Recall of evidence among the first k units (0 to 1)", Unit="observations", k="20")
    for kind, column in {"all": "All evidence", "share": "Share of evidence", "any": "Any evidence"}.items():
        assert recall[column] == f"{score['recall']['observations'][kind]['20']:.3f}"
    [bench] = [
        row
        for row in benches["bench_ttft"]["rows"]
        if (row["arm"], row["k"], row["case"]) == ("splice/ladder:0+4/tail", 10, "new")
    ]
    shown = page.row(
        "Time to first token and the mean of its parts", Arm="splice, ladder 0+4, tail", k="10", Facts="new"
    )
    assert shown["p50, ms"] == f"{bench['ttft_ms']['p50']:.1f}"
    assert shown["p95, ms"] == f"{bench['ttft_ms']['p95']:.1f}"
    assert shown["Repeats"] == "30"
    assert shown["prefill, ms"] == f"{bench['parts_ms']['prefill']:.2f}"
    under_load = benches["bench_throughput"]["rows"]
    [bench] = [row for row in under_load if (row["arm"], row["rate_per_s"]) == ("text/tail", 4.0)]
    shown = page.row("Throughput and time to first token under load", Arm="text, tail", Loop="open", Users="–",
                     **{"Arrivals per s": "4.00"})  # fmt: skip
    assert shown["Requests per s"] == f"{bench['qps']:.2f}"
    assert shown["TTFT p95, ms"] == f"{bench['ttft_ms']['p95']:.1f}"
    assert shown["Arena, MiB"] == f"{bench['arena_mib']:.1f}"
    bench = benches["bench_encode"]["rows"][1]
    shown = page.row("Cost of encoding, by policy", Policy="anchor:4")
    assert shown["Tokens prefilled per fact token"] == f"{bench['tokens_prefilled_per_fact_token']:.2f}"
    assert shown["Bytes per fact"].replace("\N{NARROW NO-BREAK SPACE}", "") == str(bench["bytes_per_fact"])


def test_published_numbers_stand_in_a_section_of_their_own(source: str, page: ReadPage) -> None:
    inside = source[source.index('<section id="published"') : source.index('<section id="conclusions"')]
    found = ReadPage(inside)
    assert list(found.tables) == [caption for caption in page.tables if caption.startswith("Published: ")]
    assert "Not measured here." in inside
    row = found.row("Published: LLM-judge accuracy in percent, k = 50, category ids 1 to 4", Model="Mistral-7B")
    assert list(row.values())[1:] == ["37.2", "56.5", "58.2", "58.3", "64.4"]
    row = found.row("Published: time to first token in ms, InferScale's engine", k="50")
    assert (row["Spliced"], row["As text"]) == ("17.3", "68.3")


def test_key_figures_are_held_against_their_targets(source: str) -> None:
    shown = re.findall(
        r'<dt>(.*?)</dt><dd data-value="(.*?)">(.*?)</dd>\s*(?:<dd class="target">(.*?)</dd>)?</div>', source
    )
    verdicts = {float(value): (text, re.sub("<.*?>", "", target)) for _, value, text, target in shown}
    assert verdicts == {
        0.913: ("0.91", "target ≤ 1.5: met"),
        0.961: ("0.961", ""),
        0.5364: ("0.536", ""),
        31.62: ("31.6", "target ≥ 25: met"),
        2.043: ("2.04", ""),
        4.126: ("4.13", "target ≥ 4.5: missed"),
        2.018: ("2.02", ""),
    }


def test_text_is_escaped(source: str, page: ReadPage) -> None:
    assert "<script" not in source
    assert page.row("Configuration", Setting="note")["Value"] == "<script>alert('x')</script> & more"


def test_names_of_arms_cannot_bring_markup_into_a_chart(tmp_path: Path) -> None:
    name = r"splice/<img src=x onerror=alert(1)>$\frac{\$</svg>"
    score = {"arms": {f"{name}/tail@10": sample_score()["arms"]["full"]}}
    page = ReadPage(write_report(score, out=tmp_path).read_text(encoding="utf-8"))
    assert page.unbalanced == []
    assert "img" not in {tag for tag, _ in page.tags}
    assert name.removeprefix("splice/") in "".join(page.text)


def test_model_commit_and_machine_stand_under_the_title(source: str) -> None:
    [facts] = re.findall(r'<p class="facts">(.*?)</p>', source)
    assert re.findall(r"<span>(.*?)</span>", facts)[:1] == ["model SmolLM2-135M-Instruct"]
    assert re.findall(r"<span>(.*?)</span>", facts)[2:] == [
        "commit 0123456789ab-dirty",
        "machine Invented CPU, 2 cores",
    ]


def test_config_and_header_are_shown(page: ReadPage) -> None:
    assert page.row("Configuration", Setting="k")["Value"] == "10, 50"
    assert page.row("Versions, hashes and machine", Setting="versions.torch")["Value"] == "2.9.1"


def test_the_reference_has_no_distance_to_show() -> None:
    score = sample_score()
    score["arms"]["text/tail@10"]["kl_answer"] = {"mean": 0.0, "interval": [0.0, 0.0]}
    rows = [row[0].text for part in fidelity(score).parts if hasattr(part, "rows") for row in part.rows]
    assert "text, tail" not in rows
    assert "text, head" in rows


def test_what_is_missing_is_one_line_with_the_command(tmp_path: Path) -> None:
    score = {"arms": {"text/tail@10": {"n": 3, "official_f1": {"all": 0.25}}}, "config": {}, "header": {}}
    source = write_report(score, out=tmp_path / "new/folder").read_text(encoding="utf-8")
    missing = re.findall(r'<p class="missing">(.*?): not in this run\. To make it: <code>(.*?)</code></p>', source)
    assert dict(missing).keys() == {
        "Distance from full prefill",
        "Share of the answer&#39;s information kept and forced choice",
        "The judge&#39;s verdicts",
        "Retrieval recall",
        "Time to first token",
        "Throughput",
        "Cost of encoding",
    }
    commands = " ".join(dict(missing).values())
    for name in ("bench_ttft", "bench_throughput", "bench_encode"):
        assert f"scripts/{name} --json" in commands
    assert {path.name for path in (tmp_path / "new/folder").iterdir()} == {"report.html", "accuracy.png"}


def test_an_empty_score_still_makes_a_page(tmp_path: Path) -> None:
    page = ReadPage(write_report({}, out=tmp_path).read_text(encoding="utf-8"))
    assert all(caption.startswith("Published: ") for caption in page.tables)


def test_nulls_and_nan_show_as_absent(tmp_path: Path) -> None:
    score = {"arms": {"full": sample_score()["arms"]["full"]}}
    score["arms"]["full"].update(
        kl_first=None, kl_answer={"mean": float("nan"), "interval": [None, None]}, mem0_f1=None
    )
    page = ReadPage(write_report(score, out=tmp_path).read_text(encoding="utf-8"))
    row = page.row(FIDELITY, Arm="full context")
    assert (row["KL, first token (nats)"], row["KL, answer tokens (nats)"]) == ("–", "–")
    assert page.row(MEM0, Arm="full context")["Mem0 F1"] == "–"


def test_the_same_input_gives_the_same_bytes_and_is_left_as_it_was(folder: Path, tmp_path: Path) -> None:
    score, benches = sample_score(), sample_benches()
    before = copy.deepcopy((score, benches))
    write_report(score, benches=benches, out=tmp_path)
    assert (score, benches) == before
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def conclusions_of(score: dict[str, Any], out: Path) -> str:
    source = write_report(score, out=out).read_text(encoding="utf-8")
    return re.sub(r"\s+", " ", source[source.index('<section id="conclusions"') :])


def test_conclusions_cite_the_run(source: str) -> None:
    ratios = {
        name: values["kl_over_shuffle_floor"]
        for name, values in sample_score()["arms"].items()
        if name.startswith("splice") and name.endswith("@10")
    }
    best = min(ratios, key=lambda name: ratios[name]["mean"])
    n = sample_score()["arms"][best]["n"]
    text = source[source.index('<section id="conclusions"') :]
    assert f"at k = 10 and n = {n} questions" in text
    assert f"{with_interval(ratios[best], 2)} times the KL" in text
    assert "best of 5 on these same questions" in text
    forced = sample_score()["arms"]["text/tail@10"]["forced_choice"]
    assert f"{with_interval(forced, 2)} in the forced choice" in text
    assert "31.6 times as long" in text
    assert "135M model" in text


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
    ratio = {"mean": mean, "interval": [low, high], "over": "questions"}
    arm = {
        "n": 40,
        "kl_over_shuffle_floor": ratio,
        "kl_answer": {"mean": 0.1, "interval": [0.09, 0.2], "over": "questions"},
    }
    text = conclusions_of({"arms": {"splice/window:2/tail@10": arm}}, tmp_path)
    assert said in text
    assert "chosen as the best" not in text
    assert "its intervals are over questions. At n = 40" in text


def test_a_larger_model_is_not_called_small(tmp_path: Path) -> None:
    text = conclusions_of({"config": {"model": "Qwen2.5-7B"}}, tmp_path)
    assert "Qwen2.5-7B (this text was written for a 135M model)" in text


def test_a_benchmark_of_another_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportInputError, match="rows are not a list of objects"):
        write_report({}, benches={"bench_ttft": {"rows": ["x"]}}, out=tmp_path)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "score.json"
    with pytest.raises(ReportInputError, match=r"cannot read .*score\.json: No such file"):
        read_object(broken)
    broken.write_text('{"arms": {', encoding="utf-8")
    with pytest.raises(ReportInputError, match="cut short"):
        read_object(broken)
    broken.write_text("[1]", encoding="utf-8")
    with pytest.raises(ReportInputError, match="no JSON object"):
        read_object(broken)
