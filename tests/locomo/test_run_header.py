from pathlib import Path

from locomo.runs.header import header_of, model_name_of

# What a server of ours says of itself, shortened.
DESCRIBED = {
    "model": {"fingerprint": "5a1e-0", "model": "c0ffee", "dtype": "bfloat16"},
    "embedder": "st:91ab:d384:l2:max128",
    "policies": ["ladder:0+4", "anchor:4"],
}


def test_the_header_names_the_model_the_embedder_and_the_servers_flags() -> None:
    header = header_of("ab", DESCRIBED, model_name="SmolLM2-135M-Instruct", server_flags=("--dtype", "float32"))
    assert header["model_name"] == "SmolLM2-135M-Instruct"
    assert header["embedder"] == "st:91ab:d384:l2:max128"
    assert header["server_flags"] == ["--dtype", "float32"]
    assert (header["data_sha256"], header["model_fingerprint"]) == ("ab", "5a1e-0")
    assert header["system"] == {"model": DESCRIBED["model"], "policies": DESCRIBED["policies"]}
    assert "sglang" in header["versions"]


def test_an_endpoints_model_is_known_by_its_name_alone() -> None:
    described = {"model": {"name": "m-1"}, "endpoint": "https://host.invalid/v1/", "embedder": "st:1"}
    assert header_of("ab", described, model_name="m-1")["model_fingerprint"] == "m-1"


def test_a_model_is_named_by_its_directory_or_its_hub_id(tmp_path: Path) -> None:
    directory = tmp_path / "Tiny-1B"
    directory.mkdir()
    assert model_name_of(directory) == model_name_of(directory / ".." / "Tiny-1B") == "Tiny-1B"
    assert model_name_of(Path("invented/Tiny-1B")) == "invented/Tiny-1B"
