"""``python -m locomo score|report|compare`` on a small invented run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from judge_endpoint import Answer, Endpoint, completion, serve
from report_samples import ReadPage, sample_benches
from score_samples import LADDER, SYNTHETIC, TEXT, WINDOW, sample_rows, write_run
from typer.testing import CliRunner

from locomo.cli import app


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def succeed(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def fail(*arguments: object) -> str:
    """The one line of a failure."""
    result = invoke(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("locomo: ")
    return line


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", sample_rows())


def test_score_prints_a_line_an_arm_and_the_bars(run_folder: Path, tmp_path: Path) -> None:
    shown = succeed("score", run_folder, "--data", SYNTHETIC, "--json", tmp_path / "bars.json")
    lines = shown.splitlines()
    [window] = [line for line in lines if line.startswith(f"│ {WINDOW} ")]
    # The figures are those of test_score_run, worked out there.
    assert [cell.strip() for cell in window.strip("│").split("│")] == [
        WINDOW,
        "6",
        "3",
        "0.3000",  # without an interval: of two conversations
        "1.50",
        "-",
        "0.667",
        "0.667",
        "0.667",
        "0.874",  # (0.8 + 4/9 + 1 + 1 + 1 + 1) / 6
        "exact 1, spliced 4, text 1",
        "0",
    ]
    assert sum(line.startswith("│ ") for line in lines) == 5
    ratio = f"0.1429  (of {LADDER}, the splice arm at k = 10 with the least KL of 2 on 3 questions)"
    assert f"kl_over_shuffle_floor: {ratio}" in lines
    assert "recall_all_at_10: 0.6000  (of the questions with evidence)" in lines
    assert "[low, high]: 95 %, by Student's t over 2 to 3 conversations; none under 5" in lines
    assert f"{WINDOW}: 2 of 6 not spliced (1 exact, 1 text), left out of its fidelity" in lines
    assert f"{TEXT}: 1 of 6 without an answer, left out of its F1" in lines
    written = json.loads((tmp_path / "bars.json").read_text())
    bars = {name: value for name, value in written["bars"].items() if value is not None}
    assert bars == pytest.approx({"kl_over_shuffle_floor": 1 / 7, "recall_all_at_10": 0.6})
    assert written["best_arm"] == LADDER
    assert written == json.loads((run_folder / "score.json").read_text())


def test_score_refuses_other_data_than_the_runs(run_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_bytes(SYNTHETIC.read_bytes() + b"\n")
    line = fail("score", run_folder, "--data", other)
    assert "is not the data that" in line
    assert "--allow-data-changes" in line
    assert not (run_folder / "score.json").exists()
    result = invoke("score", run_folder, "--data", other, "--allow-data-changes")
    assert (result.exit_code, result.stderr.startswith("warning: ")) == (0, True)
    assert json.loads((run_folder / "score.json").read_text())["bars"]["recall_all_at_10"] == pytest.approx(0.6)


def test_score_leaves_out_what_a_list_says_is_wrong(run_folder: Path, tmp_path: Path) -> None:
    listed = tmp_path / "wrong.txt"
    listed.write_text("locomo_901_qa0\n")
    assert "audited: 1 of these questions have a wrong gold" in succeed(
        "score", run_folder, "--data", SYNTHETIC, "--audit", listed
    )
    score = json.loads((run_folder / "score.json").read_text())
    assert score["audited"]["arms"][TEXT]["official_f1"]["all"] == pytest.approx((0.8 + 1 + 1 + 1) / 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--judge-url", "http://127.0.0.1:1/v1"], "needs --judge-url and --judge-model"),
        (["--judge-model", "judge"], "needs --judge-url and --judge-model"),
        (
            ["--judge-url", "http://x.invalid", "--judge-model", "judge", "--judge-key-env", "LOCOMO_NO_SUCH_KEY"],
            "no LOCOMO_NO_SUCH_KEY",
        ),
        (["--audit", "absent.txt"], "cannot read the list of wrong golds absent.txt"),
    ],
)
def test_score_fails_in_one_line(run_folder: Path, arguments: list[str], message: str) -> None:
    assert message in fail("score", run_folder, "--data", SYNTHETIC, *arguments)


def test_score_without_a_run_or_its_data_says_so(run_folder: Path, tmp_path: Path) -> None:
    assert "holds no run" in fail("score", tmp_path / "empty", "--data", SYNTHETIC)
    assert "CC BY-NC 4.0" in fail("score", run_folder, "--data", tmp_path / "absent.json")
    (run_folder / "rows.jsonl").unlink()
    assert "no row yet" in fail("score", run_folder, "--data", SYNTHETIC)


def exact(body: dict[str, Any], number: int) -> Answer:
    """A judge to whom only the gold's own words are correct."""
    _, gold, prediction = body["messages"][0]["content"].split("|")
    return completion(json.dumps({"verdict": "correct" if prediction == gold else "wrong"}))


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serve(exact) as found:
        yield found


def test_score_has_the_answers_judged(
    run_folder: Path, tmp_path: Path, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INVENTED_JUDGE_KEY", "a-key")
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("{question}|{gold}|{prediction}")
    judge = ["--judge-url", endpoint.url, "--judge-model", "judge", "--judge-key-env", "INVENTED_JUDGE_KEY"]
    arguments = ["score", run_folder, "--data", SYNTHETIC, *judge, "--judge-prompt", prompt, "--judge-runs", 2]
    succeed(*arguments)
    score = json.loads((run_folder / "score.json").read_text())
    # Of ids 1 to 4: the year, "Likely yes" and (but for the text arm, which failed there) "Nils" are the gold.
    assert score["arms"][TEXT]["judge"]["accuracy"] == pytest.approx(2 / 4)
    assert score["arms"][WINDOW]["judge"]["accuracy"] == pytest.approx(3 / 5)
    assert score["arms"][WINDOW]["judge"]["runs"] == pytest.approx([3 / 5, 3 / 5])
    assert [run["known_wrong_accepted"] for run in score["judge"]["controls"]] == [0.0, 0.0]
    assert {headers["Authorization"] for headers in endpoint.headers} == {"Bearer a-key"}
    asked, before = len(endpoint.bodies), (run_folder / "score.json").read_bytes()
    succeed(*arguments)
    assert len(endpoint.bodies) == asked  # every verdict is remembered
    assert (run_folder / "score.json").read_bytes() == before
    assert "a-key" not in before.decode()


def test_score_asks_for_a_k_that_the_run_has(run_folder: Path) -> None:
    assert "no arm at k = 20" in fail("score", run_folder, "--data", SYNTHETIC, "--k", 20)
    succeed("score", run_folder, "--data", SYNTHETIC, "--k", 10)


def test_score_without_a_willing_judge_is_written_and_fails(run_folder: Path, tmp_path: Path) -> None:
    with serve(lambda body, number: (403, {}, b"The harbour school is not to be judged.")) as found:
        judge = ["--judge-url", found.url, "--judge-model", "judge"]
        result = invoke("score", run_folder, "--data", SYNTHETIC, *judge, "--json", tmp_path / "bars.json")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(
        "locomo: the judge refused with 403: the score is without verdicts"
    )
    written = (tmp_path / "bars.json").read_text()
    assert json.loads(written)["judge_refused"] == "the judge refused with 403"
    assert json.loads(written)["bars"]["recall_all_at_10"] == pytest.approx(0.6)
    assert "not to be judged" not in written


def test_report_and_compare_refuse_a_score_of_fewer_rows_than_there_are(run_folder: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", sample_rows()[:4])
    for folder in (run_folder, other):
        succeed("score", folder, "--data", SYNTHETIC)
    write_run(other, sample_rows()[:5])
    for line in (fail("report", other), fail("compare", run_folder, other)):
        assert "has 5 rows and a score.json of 4" in line
    succeed("score", other, "--data", SYNTHETIC)
    succeed("report", other)
    assert "The run is unfinished: 5 of 6 questions." in (other / "report.html").read_text()
    content = (other / "rows.jsonl").read_bytes()
    (other / "rows.jsonl").write_bytes(content + b'{"sample_id": "conv-9')  # a row that is being written
    succeed("report", other)


def test_report_prefers_the_benchmark_that_was_given(run_folder: Path, tmp_path: Path) -> None:
    succeed("score", run_folder, "--data", SYNTHETIC)
    bench = sample_benches()["bench_encode"]
    for path, figure in ((run_folder / "bench_encode.json", 2.5), (tmp_path / "later.json", 3.5)):
        path.write_text(json.dumps({**bench, "bars": {"encode_tokens_per_fact_token": figure}}))
    (run_folder / "encoding.json").write_text(json.dumps({"window:0": {"facts": 31, "bytes": 12}}))
    succeed("report", run_folder, "--bench", tmp_path / "later.json")
    page = ReadPage((run_folder / "report.html").read_text())
    assert (3.5 in page.values, 2.5 in page.values) == (True, False)
    assert page.row("What this run encoded, by policy", Policy="window:0")["Facts"] == "31"


def test_report_draws_the_score_and_the_benchmarks(run_folder: Path, tmp_path: Path) -> None:
    assert f"python -m locomo score {run_folder}" in fail("report", run_folder)
    succeed("score", run_folder, "--data", SYNTHETIC)
    benches = sample_benches()
    (run_folder / "bench_ttft.json").write_text(json.dumps(benches["bench_ttft"]))
    throughput = tmp_path / "of-monday.json"
    throughput.write_text(json.dumps(benches["bench_throughput"]))
    assert succeed("report", run_folder, "--bench", throughput).strip() == str(run_folder / "report.html")
    page = ReadPage((run_folder / "report.html").read_text())
    # 0.3, 1.5: figures of the score, worked out in test_score_run.
    row = page.row("Distance from full prefill, 95 % intervals", Arm="splice, window 0, tail")
    assert row["KL, answer tokens (nats)"].startswith("0.3")
    assert row["÷ floor of another order"].startswith("1.50")
    assert 31.62 in page.values  # a bar of bench_ttft
    assert 4.126 in page.values  # and one of bench_throughput
    assert (run_folder / "fidelity_arms.png").read_bytes().startswith(b"\x89PNG")


def test_report_refuses_a_file_that_is_no_benchmark(run_folder: Path, tmp_path: Path) -> None:
    succeed("score", run_folder, "--data", SYNTHETIC)
    other = tmp_path / "other.json"
    other.write_text('{"bars": {"heat": 1}, "rows": []}')
    assert "no known benchmark" in fail("report", run_folder, "--bench", other)
    assert "cannot read" in fail("report", run_folder, "--bench", tmp_path / "absent.json")


def test_compare_pairs_the_questions_of_two_runs(run_folder: Path, tmp_path: Path) -> None:
    rows = sample_rows()
    for row in rows:
        row["arms"][WINDOW]["prediction"] = "never"
    other = write_run(tmp_path / "other", rows)
    for folder in (run_folder, other):
        assert "python -m locomo score" in fail("compare", run_folder, other)
        succeed("score", folder, "--data", SYNTHETIC)
    page = tmp_path / "compared.html"
    succeed("compare", run_folder, other, "--html", page)
    found = ReadPage(page.read_text())
    row = found.row("other less run", Arm="splice, window 0, tail", Metric="official F1")
    # All six are wrong now; before their mean was (0.8 + 4/9 + 4) / 6.
    assert (row["run"], row["other"], row["n"]) == ("0.874", "0.000", "6")
    assert row["Difference, 95 %"].replace("−", "-").startswith("-0.874")
    # As in the score: of what was spliced, three questions of the window's six.
    kl = found.row("other less run", Arm="splice, window 0, tail", Metric="KL, answer tokens (nats)")
    assert (kl["run"], kl["other"], kl["n"]) == ("0.3000", "0.3000", "3")


def test_runs_of_one_folder_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name / "run", sample_rows()) for name in ("monday", "tuesday")]
    for folder in folders:
        succeed("score", folder, "--data", SYNTHETIC)
    shown = succeed("compare", *folders)
    assert "monday/run" in shown
    assert "tuesday/run" in shown
    assert "two runs or more" in fail("compare", folders[0])
