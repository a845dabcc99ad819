"""``sgl-stateful``: SGLang's own server with a memory."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from sgl_stateful import flash_cli, session_cli
from sgl_stateful.errors import IncompatibleServer
from sgl_stateful.faithfulness.choice import Target
from sgl_stateful.settings import ENV_PREFIX, KVStorage, StatefulSettings

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(session_cli.app, name="session")
app.add_typer(flash_cli.app, name="flash")


@app.callback()
def _root() -> None:
    """Memory facts as KV for SGLang servers."""


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Option("--model", "--model-path", help="Model directory or hub id.")],
    memory: Annotated[
        str | None, typer.Option(help="The memory store: DIR, sqlite:///DIR (made if absent) or redis://HOST:PORT/DB.")
    ] = None,
    kv_dir: Annotated[Path | None, typer.Option(help="Directory of the facts' KV, on this machine.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="How facts are encoded: 'anchor:N', 'window:W', 'ladder:N+N' or 'ladder:live+N'.")
    ] = None,
    also_encode: Annotated[str | None, typer.Option(help="More policies to choose from, comma-separated.")] = None,
    repair: Annotated[
        str | None,
        typer.Option(
            help="Tokens of spliced facts to compute anew: "
            "'none', 'first:M', 'share:P%', 'last:N', 'last:P%', or several with a plus between."
        ),
    ] = None,
    faithfulness: Annotated[
        Target | None,
        typer.Option(
            help="How near to full prefill spliced answers must be, as measured after start-up, or facts are served as "
            "text: less than half as far as without facts ('fast', the default), no further than the same facts in "
            "another order ('floor'), half as far ('strict'); 'off' measures nothing.",
        ),
    ] = None,
    embedder: Annotated[str | None, typer.Option(help="Sentence-transformers path or hub id.")] = None,
    arena_mib: Annotated[int | None, typer.Option(min=1, help="Memory for encoded facts, MiB.")] = None,
    kv_storage: Annotated[
        KVStorage | None,
        typer.Option(help="Encoded facts in memory and on disk: 'int8' (default), or 'native' in the KV pool's dtype."),
    ] = None,
    promote_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Most tokens of recurring prompts with facts to prefill exactly in idle time; by default an eighth of "
            "the KV pool.",
        ),
    ] = None,
    strict_forgetting: Annotated[
        bool | None,
        typer.Option("--strict-forgetting", help="Drop KV at once that saw a fact which was changed or deleted."),
    ] = None,
    session_budget_tokens: Annotated[
        int | None, typer.Option(min=0, help="Cells of the KV pool for pinned sessions in all; by default half of it.")
    ] = None,
    session_quota_tokens: Annotated[
        int | None, typer.Option(min=0, help="Cells for pinned sessions of one owner; by default the whole budget.")
    ] = None,
    allow_unverified_splice: Annotated[
        bool | None, typer.Option("--allow-unverified-splice", help="Serve although the self-test failed.")
    ] = None,
) -> None:
    """Serve a model with a memory; every other flag is SGLang's own.

    Options that are not given come from the environment (SGL_STATEFUL_*), and then from the defaults.
    """
    values = {
        "memory": memory,
        "kv_dir": kv_dir,
        "policy": policy,
        "also_encode": also_encode,
        "repair": repair,
        "faithfulness": faithfulness,
        "embedder": embedder,
        "arena_mib": arena_mib,
        "kv_storage": kv_storage,
        "promote_tokens": promote_tokens,
        "strict_forgetting": strict_forgetting,
        "session_budget_tokens": session_budget_tokens,
        "session_quota_tokens": session_quota_tokens,
        "allow_unverified_splice": allow_unverified_splice,
    }
    # SGLang's subprocesses read their settings from the environment.
    os.environ.update({f"{ENV_PREFIX}{name.upper()}": str(v) for name, v in values.items() if v is not None})
    try:
        settings = StatefulSettings()
        settings.ladders()
    except ValidationError as error:
        _fail(_problems(error))
    except ValueError as error:
        _fail(str(error))
    if settings.memory is not None:
        _check_memory(settings.memory, settings)
    _launch(["--model-path", model, "--radix-cache-backend", "stateful", *context.args])


def _check_memory(memory: str, settings: StatefulSettings) -> None:
    """Fail in this process, in one line, for what SGLang would report from a subprocess."""
    from memstore import EmbedderMismatch, MemStoreError, OwnerId
    from memstore.location import open_records
    from memstore.searchable import vectors_name
    from memstore.store import embedder_of

    try:
        store_settings = settings.store_settings()
        with closing(open_records(memory, store_settings)) as records:
            stored = records.head(OwnerId("any")).embedder
        # Loading a model takes seconds, which a new store need not wait for.
        if stored is not None and (offered := vectors_name(embedder_of(store_settings))) != stored:
            raise EmbedderMismatch(stored=stored, offered=offered)
        kv_path = settings.kv_path()
    except ValidationError as error:
        _fail(_problems(error, "MEMSTORE_"))
    except MemStoreError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"the embedder cannot be loaded: {' '.join(str(error).split())}")
    try:
        kv_path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _fail(f"the directory of the facts' KV cannot be made: {error}")


def _problems(error: ValidationError, prefix: str = "") -> str:
    return "; ".join(f"{prefix}{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors())


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
