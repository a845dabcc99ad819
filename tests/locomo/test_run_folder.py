import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from locomo.errors import ConfigError, RunError
from locomo.runs.config import RunConfig
from locomo.runs.folder import RunFolder

CONFIG = RunConfig(("none", "text/tail@5"))
HEADER = {
    "data_sha256": "ab",
    "prompt_sha256": "cd",
    "model_fingerprint": "ef",
    "embedder": "gh",
    "commit": "1",
    "server_flags": ["--disable-cuda-graph"],
    "system": {"policies": ["window:0"], "self_test": {"passed": True, "difference": 1e-6}},
}


def row(index: int) -> dict[str, object]:
    return {"sample_id": "conv-1", "index": index, "arms": {}}


def test_the_config_is_there_before_any_row_and_stays(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.begin(CONFIG, HEADER)
    written = (tmp_path / "run" / "config.json").read_bytes()
    assert json.loads(written) == {"config": CONFIG.as_json(), "header": HEADER}
    assert folder.done() == set()
    # Gone on with under another commit: the first one's header stays.
    RunFolder(tmp_path / "run").begin(CONFIG, {**HEADER, "commit": "2"})
    assert (tmp_path / "run" / "config.json").read_bytes() == written


def test_every_start_is_kept_and_says_what_is_otherwise_than_at_first(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.begin(CONFIG, HEADER) == []
    # The self-test measures anew at every start.
    other_figures = {"policies": ["window:0"], "self_test": {"passed": True, "difference": 2e-6}}
    assert folder.begin(CONFIG, {**HEADER, "system": other_figures}) == []
    changed = {
        **HEADER,
        "commit": "2",
        "server_flags": [],
        "system": {"policies": ["window:0", "anchor:4"]},
        "versions": {"torch": "2.14.1"},
    }
    assert folder.begin(CONFIG, changed) == [
        "commit: '1' at first, '2' now",
        "server_flags: ['--disable-cuda-graph'] at first, [] now",
        "system.policies: ['window:0'] at first, ['window:0', 'anchor:4'] now",
        "versions.torch: None at first, '2.14.1' now",
    ]
    starts = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    times = [datetime.fromisoformat(start.pop("started")) for start in starts]
    assert starts == [HEADER, {**HEADER, "system": other_figures}, changed]
    assert times == sorted(times)
    assert abs((datetime.now(UTC) - times[0]).total_seconds()) < 600


def test_only_one_process_runs_in_a_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new" / "run")
    other = "import sys; from pathlib import Path; from locomo.runs.folder import RunFolder\n"
    other += "with RunFolder(Path(sys.argv[1])).locked(): print('mine')"
    command = [sys.executable, "-c", other, str(folder.path)]
    with folder.locked():
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "is in use: another process runs there" in refused.stderr
        assert refused.returncode != 0
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "mine\n"


def test_a_folder_that_cannot_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(RunError, match="can be no run's folder"), RunFolder(path).locked():
            pass


def test_what_is_known_before_a_server_starts_is_checked(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.check(CONFIG, {"data_sha256": "other"})  # nothing is there yet
    folder.begin(CONFIG, HEADER)
    folder.check(CONFIG, {"data_sha256": "ab"})
    with pytest.raises(ConfigError, match="data_sha256: 'ab' there, 'other' now"):
        folder.check(CONFIG, {"data_sha256": "other"})
    with pytest.raises(ConfigError, match=r"arms: .* there, .* now"):
        folder.check(RunConfig(("none",)), {})


@pytest.mark.parametrize("content", ["[]", '{"config": {}}', '{"config": [], "header": {}}', "{"])
def test_what_is_no_config_is_said(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(RunError, match=r"holds no run|is no run's config"):
        RunFolder(tmp_path).begin(CONFIG, HEADER)


@pytest.mark.parametrize("line", ["[]", "{}", '{"sample_id": "conv-1"}', '{"sample_id": [], "index": 1}'])
def test_a_row_of_no_question_is_said(tmp_path: Path, line: str) -> None:
    folder = RunFolder(tmp_path)
    folder.begin(CONFIG, HEADER)
    (tmp_path / "rows.jsonl").write_text(line + "\n")
    with pytest.raises(RunError, match=r"no row of a run|a row of no question"):
        folder.done()


def test_what_encoding_cost_is_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.encodings() == {}
    counts = {"window:0": {"facts": 3, "fact_tokens": 40, "tokens_prefilled": 50, "bytes": 6000}}
    folder.write_encodings(counts)
    assert RunFolder(tmp_path).encodings() == counts
    assert json.loads((tmp_path / "encoding.json").read_text()) == counts


def test_a_row_of_half_a_character_is_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.begin(CONFIG, HEADER)
    folder.append({**row(0), "prediction": "caf\ud83d"})
    assert [found["prediction"] for found in folder.rows()] == ["caf\ud83d"]


@pytest.mark.parametrize("field", ["data_sha256", "prompt_sha256", "model_fingerprint", "embedder"])
def test_another_run_is_refused_and_says_what_differs(tmp_path: Path, field: str) -> None:
    RunFolder(tmp_path).begin(CONFIG, HEADER)
    with pytest.raises(ConfigError, match=f"{field}: .* there, 'other' now"):
        RunFolder(tmp_path).begin(CONFIG, {**HEADER, field: "other"})


def test_another_config_is_refused(tmp_path: Path) -> None:
    RunFolder(tmp_path).begin(CONFIG, HEADER)
    with pytest.raises(ConfigError, match="seed: 0 there, 1 now"):
        RunFolder(tmp_path).begin(RunConfig(CONFIG.arms, seed=1), HEADER)


def test_a_row_cut_short_is_no_row_and_the_next_one_stands_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.begin(CONFIG, HEADER)
    folder.append(row(0))
    folder.append(row(1))
    rows = tmp_path / "rows.jsonl"
    whole = rows.read_bytes()
    for cut in range(len(whole) // 2 + 1, len(whole)):
        rows.write_bytes(whole[:cut])
        again = RunFolder(tmp_path)
        assert again.done() == {("conv-1", 0)}
        again.begin(CONFIG, HEADER)
        again.append(row(2))
        assert [found["index"] for found in again.rows()] == [0, 2]


def test_a_row_damaged_in_the_middle_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.begin(CONFIG, HEADER)
    (tmp_path / "rows.jsonl").write_bytes(b'{"sample_id": "conv-1", "index": 0}\nnot json\n{}\n')
    with pytest.raises(RunError, match=r"rows\.jsonl, line 2, is not JSON"):
        folder.done()


def test_a_full_disk_says_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.begin(CONFIG, HEADER)
    (tmp_path / "rows.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunError, match="No space left on device"):
        folder.append(row(0))


def test_no_folder_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run"):
        RunFolder(tmp_path / "nothing").read_config()
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(RunError, match="cannot write"):
        RunFolder(blocked / "run").begin(CONFIG, HEADER)
