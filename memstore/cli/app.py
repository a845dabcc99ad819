"""The command line as a whole."""

from importlib.metadata import version
from typing import Annotated

import typer

from memstore.cli import fact_changes, facts, overview, owners, transfer, upkeep
from memstore.cli.failures import Root

app = typer.Typer(cls=Root, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
fact_changes.register(facts.app)
app.add_typer(facts.app, name="facts")
app.add_typer(owners.app, name="owners")
transfer.register(app)
upkeep.register(app)
overview.register(app)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"memstore {version('sgl-stateful')}")
        raise typer.Exit


@app.callback()
def _root(
    is_asked: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Look into a store of facts, change it, check it, mend it and move it."""
