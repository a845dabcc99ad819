from pathlib import Path

import pytest

from sgl_stateful.faithfulness.cached import read_result, result_path, write_result
from sgl_stateful.faithfulness.table import FLOOR, Row, Table

TABLE = Table("ladder:0+4", (Row(5, FLOOR, (0.25, 0.5)),), "2024-05-01T10:00:00+00:00")


def path(folder: Path, **other: object) -> Path:
    of = {
        "fingerprint": "f",
        "policy": "ladder:0+4",
        "repairs": ["none", "first:4"],
        "questions_at": {5: 12, 50: 6},
        "conversations": "v1",
    }
    return result_path(folder, **(of | other))  # type: ignore[arg-type]


def test_a_result_is_found_again(tmp_path: Path) -> None:
    at = path(tmp_path / "new" / "folder")
    assert read_result(at) is None
    write_result(at, TABLE)
    assert read_result(at) == TABLE
    assert [file.name for file in at.parent.iterdir()] == [at.name]


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": "g"},
        {"policy": "ladder:0+4+16"},
        {"repairs": ["none"]},
        {"repairs": ["none", "first:4", "last:32"]},
        {"questions_at": {5: 12, 50: 12}},
        {"questions_at": {5: 12}},
        {"conversations": "v2"},
    ],
    ids=str,
)
def test_what_was_measured_otherwise_lies_elsewhere(tmp_path: Path, other: dict[str, object]) -> None:
    assert path(tmp_path, **other) != path(tmp_path)
    assert path(tmp_path, questions_at={50: 6, 5: 12}) == path(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"rows": [{}]}', TABLE.to_json()[:-9]], ids=str)
def test_a_result_that_cannot_be_read_is_none(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    path(tmp_path).write_text(text)
    assert read_result(path(tmp_path)) is None
    assert "measured again" in caplog.text
    write_result(path(tmp_path), TABLE)
    assert read_result(path(tmp_path)) == TABLE


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    write_result(path(tmp_path / "file"), TABLE)
    assert "cannot be kept" in caplog.text
