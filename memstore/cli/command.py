"""Registering a command: the options that every command has, and the session that it runs in."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, get_type_hints

import typer

from memstore.cli.failures import discard_output
from memstore.cli.session import Host, Session

Run = TypeVar("Run", bound=Callable[..., None])

StoreOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar="MEMSTORE_URL",
        metavar="URL",
        help="A directory, sqlite:///DIR, redis://... or rediss://...; see docs/store.md.",
    ),
]
KVOption: TypeAlias = Annotated[
    Path | None,
    typer.Option("--kv", metavar="DIR", help="KV cache to keep in step. [default: kv in the store's directory]"),
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

OwnerOption: TypeAlias = Annotated[str, typer.Option("--owner", metavar="OWNER", help="Whose facts.")]
FactArgument: TypeAlias = Annotated[str, typer.Argument(metavar="ID", help="The fact's id.", show_default=False)]
DryRunOption: TypeAlias = Annotated[bool, typer.Option("--dry-run", help="Say what would happen, and change nothing.")]


def command(group: typer.Typer, name: str, *, makes_store: bool = False) -> Callable[[Run], Run]:
    """Register a function as a command: a session is its first argument, its options come before the common ones.

    Parameters
    ----------
    makes_store
        Whether the command may begin a new store.
    """

    def register(run: Run) -> Run:
        def called(context: typer.Context, store: str | None, kv: Path | None, as_json: bool, **own: Any) -> None:
            host = context.find_object(Host) or Host()
            try:
                with Session(host, location=store, kv=kv, as_json=as_json, makes_store=makes_store) as session:
                    run(session, **own)
            except BrokenPipeError:
                raise typer.Exit(discard_output()) from None

        # Typer reads a command's options from its signature.
        hints = get_type_hints(run, include_extras=True)
        _, *own = inspect.signature(run).parameters.values()
        common: dict[str, tuple[Any, Any]] = {
            "store": (StoreOption, None),
            "kv": (KVOption, None),
            "as_json": (JsonOption, False),
        }
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter("context", keyword, annotation=typer.Context),
            *(parameter.replace(kind=keyword, annotation=hints[parameter.name]) for parameter in own),
            *(inspect.Parameter(n, keyword, annotation=a, default=d) for n, (a, d) in common.items()),
        ]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        called.__doc__ = run.__doc__
        group.command(name)(called)
        return run

    return register
