"""``sgl-stateful``: SGLang's own server with a memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from sgl_stateful.errors import IncompatibleServer
from sgl_stateful.settings import ENV_PREFIX, StatefulSettings

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _root() -> None:
    """Memory facts as KV for SGLang servers."""


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Option("--model", "--model-path", help="Model directory or hub id.")],
    memory: Annotated[Path | None, typer.Option(help="Directory of the memory store; made if absent.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="How facts are encoded: 'anchor:N', 'window:W' or 'ladder:N+N'.")
    ] = None,
    also_encode: Annotated[str | None, typer.Option(help="More policies to choose from, comma-separated.")] = None,
    embedder: Annotated[str | None, typer.Option(help="Sentence-transformers path or hub id.")] = None,
    arena_mib: Annotated[int | None, typer.Option(min=1, help="Memory for encoded facts, MiB.")] = None,
    allow_unverified_splice: Annotated[
        bool | None, typer.Option("--allow-unverified-splice", help="Serve although the self-test failed.")
    ] = None,
) -> None:
    """Serve a model with a memory; every other flag is SGLang's own.

    Options that are not given come from the environment (SGL_STATEFUL_*), and then from the defaults.
    """
    values = {
        "memory": memory,
        "policy": policy,
        "also_encode": also_encode,
        "embedder": embedder,
        "arena_mib": arena_mib,
        "allow_unverified_splice": allow_unverified_splice,
    }
    # SGLang's subprocesses read their settings from the environment.
    os.environ.update({f"{ENV_PREFIX}{name.upper()}": str(v) for name, v in values.items() if v is not None})
    try:
        settings = StatefulSettings()
        settings.ladders()
    except ValidationError as error:
        _fail("; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors()))
    except ValueError as error:
        _fail(str(error))
    if settings.memory is not None:
        _check_memory(settings.memory)
    _launch(["--model-path", model, "--radix-cache-backend", "stateful", *context.args])


def _check_memory(memory: Path) -> None:
    """Fail in this process, in one line, for what SGLang would report from a subprocess."""
    from memstore import StoreError
    from memstore.records.sqlite import SQLiteRecords

    try:
        SQLiteRecords(memory).close()
    except StoreError as error:
        _fail(str(error))


def _launch(arguments: list[str]) -> None:
    from sgl_stateful.sglang_adapter.launch import launch_server

    try:
        launch_server(arguments)
    except IncompatibleServer as error:
        _fail(str(error))


def _fail(message: str) -> None:
    print(f"sgl-stateful: {message}", file=sys.stderr)
    raise typer.Exit(2)


if __name__ == "__main__":
    app()
