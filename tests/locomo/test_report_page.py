import copy
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from report_samples import ReadPage, sample_benches, sample_score, with_interval

from locomo.errors import ReportInputError
from locomo.reporting import read_object, write_report
from locomo.reporting.fidelity import fidelity

FIDELITY = "Distance from full prefill, 95 % intervals"
OFFICIAL = "Official LoCoMo F1, by category id"
MEM0 = "Mem0's metrics (set overlap without stems; sentence BLEU): not the official F1"
JUDGE = "LLM judge, 95 % intervals over 10 conversations"
PAIRED = "Paired differences, on the questions that both arms have, 95 % intervals"
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
    n = values["fidelity_measured"]
    assert (fidelity["Asked"], fidelity["n"], fidelity["Served as"]) == (str(values["n"]), str(n), "spliced 7, text 3")
    assert fidelity["KL, answer tokens (nats)"] == with_interval(values["kl_answer"], 4, n=n)
    assert fidelity["KL, first token (nats)"] == with_interval(values["kl_first"], 4, n=n)
    assert fidelity["÷ floor of another order"] == with_interval(values["kl_over_shuffle_floor"], 2, n=n)
    assert fidelity["Same first token"] == with_interval(values["top1_first"], 3, n=n)
    assert fidelity["Probability not listed"] == with_interval(values["unlisted_probability"], 4, n=n)
    assert fidelity["ΔNLL (nats per token)"] == with_interval(values["nll_per_token_difference"], 3, n=n)
    information = page.row(INFORMATION, Arm=label, k=k)
    assert information["n"] == str(n)
    in_text = information["Information in the text, nats per answer"]
    assert in_text == with_interval(values["information_in_text"], 3, n=n)
    assert information["Share of information kept"] == with_interval(values["share_of_information_kept"], 3, n=n)
    assert information["Forced choice, share right"] == with_interval(values["forced_choice"], 3, n=n)
    assert information["Guessing"] == f"{values['forced_choice_chance']:.3f}"
    official = page.row(OFFICIAL, Arm=label, k=k)
    named = {"all": "all ids", "4": "4 single-hop", "1": "1 multi-hop", "2": "2 temporal", "3": "3 open-domain"}
    for key, column in {**named, "5": "5 adversarial"}.items():
        assert official[column] == f"{values['official_f1'][key]:.3f} n = {values['answered'][key]}"
    assert official["failed"] == str(values["errors"])
    mem0 = page.row(MEM0, Arm=label, k=k)
    assert mem0["n"] == str(values["mem0_answered"])
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
    assert row["Answers"] == str(values["n"])
    counts = (str(values["abstained"]), str(values["unjudged"]), str(values["tied"]))
    assert (row["Abstained"], row["Unjudged"], row["Tied"]) == counts


def test_paired_differences_have_the_n_of_their_own_questions(page: ReadPage) -> None:
    values = sample_score()["arms"]["splice/window:2/tail@10"]
    shown = {"less_text": "facts as text", "less_shuffled": "the same facts in another order"}
    for key, against in shown.items():
        row = page.row(PAIRED, Arm="splice, window 2, tail", k="10", Less=against)
        n = max(estimate["n"] for estimate in values[key].values())
        assert row["n"] == str(n)
        assert row["Official F1"] == with_interval(values[key]["official_f1"], 3, n=n)
        assert row["KL, answer tokens (nats)"] == with_interval(values[key]["kl_answer"], 4, n=n)
    assert {row["Arm"] for row in page.tables[PAIRED]} == {
        row["Arm"] for row in page.tables[FIDELITY] if row["Arm"].startswith("splice")
    }


def test_everything_stands_there_without_audited_errors_too(tmp_path: Path) -> None:
    score, other = sample_score(), sample_score()
    name = "splice/window:2/tail@10"
    other["arms"][name]["kl_answer"] |= {"mean": 0.0123, "n": 77}
    other["arms"]["text/tail@10"]["judge"]["abstained"] = 4321
    audited = {key: other[key] for key in ("bars", "best_arm", "best_of", "arms", "recall")}
    score |= {"audit": {"excluded": 13, "listed": 20, "gold_is_right": 0}, "audited": audited}
    page = ReadPage(write_report(score, out=tmp_path).read_text(encoding="utf-8"))
    captions = [caption for caption in page.tables if not caption.startswith(("Without", "Published", "Conf", "Vers"))]
    assert {f"Without audited errors: {caption}" for caption in captions} <= set(page.tables)
    row = page.row(f"Without audited errors: {FIDELITY}", Arm="splice, window 2, tail", k="10")
    assert row["KL, answer tokens (nats)"].startswith("0.0123 [")
    assert row["KL, answer tokens (nats)"].endswith("n = 77")
    judged = page.row(f"Without audited errors: {JUDGE}", Arm="text, tail")
    assert judged["Abstained"].replace("\N{NARROW NO-BREAK SPACE}", "") == "4321"
    assert "without the 13 of these questions" in "".join(page.text)


def test_other_metrics_never_share_a_column_or_table_with_the_official_f1(page: ReadPage) -> None:
    assert not [column for column in page.tables[OFFICIAL][0] if "Mem0" in column or "judge" in column.lower()]
    assert list(page.tables[MEM0][0]) == ["Arm", "k", "n", "Mem0 F1", "Mem0 BLEU-1"]


def test_recall_and_speed_tables(page: ReadPage) -> None:
    score, benches = sample_score(), sample_benches()
    recall = page.row("Recall of evidence among the first k units (0 to 1)", Unit="observations", k="20")
    assert recall["n"] == "173"
    for kind, column in {"all": "All evidence", "share": "Share of evidence", "any": "Any evidence"}.items():
        assert recall[column] == f"{score['recall']['observations'][kind]['20']:.3f}"
    [bench] = [
        row
        for row in benches["bench_ttft"]["rows"]
        if (row["arm"], row["k"], row["case"]) == ("splice/ladder:0+4/tail", 10, "new")
    ]
    shown = page.row("Time to first token, and means of its parts", Arm="splice, ladder 0+4, tail", k="10", Facts="new")
    assert shown["p50, ms"] == f"{bench['ttft_ms']['p50']:.1f}"
    assert shown["p95, ms"] == f"{bench['ttft_ms']['p95']:.1f}"
    assert shown["Repeats"] == "30"
    assert shown["Mean, ms"] == f"{bench['ttft_ms']['mean']:.1f}"
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


def test_the_parts_of_the_time_stand_beside_its_mean(source: str) -> None:
    begin = source.index('<figure id="chart-ttft_parts"')
    chart = source[begin : source.index("</figure>", begin)]
    rows = [row for row in sample_benches()["bench_ttft"]["rows"] if row["case"] == "new"]
    assert len(rows) == 9
    assert all(f">{row['ttft_ms']['mean']:.1f}</text>" in chart for row in rows)


def test_published_numbers_stand_in_a_section_of_their_own(source: str, page: ReadPage) -> None:
    inside = source[source.index('<section id="published"') : source.index('<section id="conclusions"')]
    found = ReadPage(inside)
    assert list(found.tables) == [caption for caption in page.tables if caption.startswith("Published: ")]
    assert "Not measured here." in inside
    row = found.row("Published: LLM-judge accuracy in percent, k = 50, category ids 1 to 4", Model="Mistral-7B")
    assert list(row.values())[1:] == ["37.2", "56.5", "58.2", "58.3", "64.4"]
    row = found.row("Published: time to first token in ms, InferScale's engine", k="50")
    assert (row["Spliced"], row["As text"]) == ("17.3", "68.3")


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
    assert re.findall(r"<span>(.*?)</span>", facts) == [
        "model SmolLM2-135M-Instruct",
        "embedder all-MiniLM-L6-v2",
        "questions 200",
        "conversations 10",
        "commit 0123456789ab-dirty",
        "machine Invented CPU, 2 cores",
    ]
    assert 'class="note"' not in source


def test_each_benchmark_says_what_it_ran_on(page: ReadPage) -> None:
    for name in ("bench_ttft", "bench_throughput", "bench_encode"):
        assert page.row(f"What {name} was run on", Setting="cpu")["Value"] == "Invented CPU"
        assert page.row(f"What {name} was run on", Setting="units")["Value"] == "turns"


def test_what_the_run_encoded_is_shown_by_policy(tmp_path: Path) -> None:
    encoded = {
        "ladder:0+4": {"facts": 40, "fact_tokens": 900, "tokens_prefilled": 1836, "bytes": 41_472_000},
        "window:0": {"facts": 40, "fact_tokens": 900, "tokens_prefilled": 902, "bytes": 20_736_000},
    }
    page = ReadPage(write_report(sample_score(), encoded=encoded, out=tmp_path).read_text(encoding="utf-8"))
    rows = page.tables["What this run encoded, by policy"]
    assert [row["Policy"] for row in rows] == ["window:0", "ladder:0+4"]
    shown = {column: value.replace("\N{NARROW NO-BREAK SPACE}", "") for column, value in rows[1].items()}
    assert shown == {
        "Policy": "ladder:0+4",
        "Facts": "40",
        "Fact tokens": "900",
        "Tokens prefilled": "1836",
        "Bytes": "41472000",
    }


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
    score: dict[str, Any] = {
        "arms": {"text/tail@10": {"n": 3, "official_f1": {"all": 0.25}}},
        "config": {},
        "header": {},
    }
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
