import json
from pathlib import Path

import pytest

from locomo.errors import ConfigError, RunError
from locomo.runs.config import RunConfig
from locomo.runs.folder import RunFolder

CONFIG = RunConfig(("none", "text/tail@5"))
HEADER = {"data_sha256": "ab", "prompt_sha256": "cd", "model_fingerprint": "ef", "commit": "1"}


def row(index: int) -> dict[str, object]:
    return {"sample_id": "conv-1", "index": index, "arms": {}}


def test_the_config_is_there_before_any_row_and_stays(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.begin(CONFIG, HEADER)
    written = (tmp_path / "run" / "config.json").read_bytes()
    assert json.loads(written) == {"config": CONFIG.as_json(), "header": HEADER}
    assert folder.done() == set()
    # Gone on with under another commit: the first one's header stays.
    assert RunFolder(tmp_path / "run").begin(CONFIG, {**HEADER, "commit": "2"}) == HEADER
    assert (tmp_path / "run" / "config.json").read_bytes() == written


@pytest.mark.parametrize("field", ["data_sha256", "prompt_sha256", "model_fingerprint"])
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
