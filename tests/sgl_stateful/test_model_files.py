import json
from pathlib import Path

import pytest

from sgl_stateful.model_files import MANIFEST, default_model_dir, is_complete, main

ABC_SHA256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # the test vector of FIPS 180-2


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_bytes(b"abc")
    manifest = {"files": {"config.json": {"size_bytes": 3, "sha256": ABC_SHA256}}}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    return tmp_path


def test_a_directory_that_fits_its_manifest_is_complete(model_dir: Path) -> None:
    assert is_complete(model_dir)
    assert is_complete(model_dir, verify=True)


@pytest.mark.parametrize("damage", ["absent file", "short file", "no manifest", "broken manifest"])
def test_a_half_made_directory_is_not_complete(model_dir: Path, damage: str) -> None:
    match damage:
        case "absent file":
            (model_dir / "config.json").unlink()
        case "short file":
            (model_dir / "config.json").write_bytes(b"ab")
        case "no manifest":
            (model_dir / MANIFEST).unlink()
        case "broken manifest":
            (model_dir / MANIFEST).write_text("{", encoding="utf-8")
    assert not is_complete(model_dir)


def test_only_verify_sees_changed_bytes_of_the_same_size(model_dir: Path) -> None:
    (model_dir / "config.json").write_bytes(b"abd")
    assert is_complete(model_dir)
    assert not is_complete(model_dir, verify=True)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SGL_STATEFUL_CACHE": "/c", "XDG_CACHE_HOME": "/x"}, "/c/sgl-stateful/models/SmolLM2-135M-Instruct"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/sgl-stateful/models/SmolLM2-135M-Instruct"),
    ],
)
def test_the_cache_folder_follows_the_environment(environ: dict[str, str], expected: str) -> None:
    assert default_model_dir(environ) == Path(expected)


def test_a_users_directory_without_a_model_is_one_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model-path", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "is not a Hugging Face model directory" in captured.err
