"""``python -m locomo``: run questions, score the run, draw its report, compare runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from locomo import runs
from locomo.dataset import file_sha256, load
from locomo.errors import DatasetError, LocomoError
from locomo.retrieval.units import UnitKind
from locomo.runs.config import ANSWERABLE, RunConfig
from locomo.runs.folder import RunFolder
from locomo.runs.header import header_of
from locomo.runs.runner import Runner
from locomo.runs.servers import serving

PUBLISHED_SHA256 = "79fa87e90f04081343b8c8debecb80a9a6842b76a7aa537dc9fdf651ea698ff4"
DEFAULT_ARMS = (
    "none",
    "text/tail@10",
    "splice/ladder:0+4/tail@10",
    "splice/anchor:4/tail@10",
    "splice/window:0/tail@10",
    "floor/shuffled@10",
)

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
console = Console(stderr=True)

Data = Annotated[Path, typer.Option("--data", envvar="LOCOMO_DATA", help="LoCoMo's file, or one in its schema.")]
Out = Annotated[Path, typer.Argument(help="The run's folder.")]


@app.command()
def run(
    out: Out,
    data: Data,
    model: Annotated[Path, typer.Option(help="Model directory: tokenizer, and weights where a server is started.")],
    arms: Annotated[str, typer.Option(help="Comma-separated, as in text/tail@10.")] = ",".join(DEFAULT_ARMS),
    units: Annotated[UnitKind, typer.Option(help="What is a fact.")] = UnitKind.OBSERVATIONS,
    questions: Annotated[int, typer.Option(min=0, help="How many, stratified; 0 takes all.")] = 200,
    ids: Annotated[str, typer.Option(help="Category ids.")] = ",".join(str(int(c)) for c in ANSWERABLE),
    conversations: Annotated[str, typer.Option(help="Sample ids, comma-separated; by default all.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 24,
    fidelity: Annotated[bool, typer.Option(help="Force the gold answer behind every prompt.")] = True,
    choices: Annotated[bool, typer.Option(help="Let the gold compete with nine other answers.")] = True,
    seed: Annotated[int, typer.Option(help="Of the sample of questions.")] = 0,
    url: Annotated[str | None, typer.Option(help="A running server of ours; by default one is started.")] = None,
    precise_url: Annotated[str | None, typer.Option(help="One in fp32, for floor/fp32.")] = None,
    server_flag: Annotated[
        list[str] | None, typer.Option(help="One more argument for the server that is started; repeatable.")
    ] = None,
    allow_data_changes: Annotated[bool, typer.Option(help="Go on with a file of another hash.")] = False,
) -> None:
    """Ask every arm the same questions; run again with the same arguments to go on where it stopped."""
    with _failing_in_one_line():
        config = RunConfig(
            arms=tuple(part.strip() for part in arms.split(",") if part.strip()),
            units=units.value,
            questions=questions,
            ids=tuple(int(part) for part in ids.split(",")),
            conversations=tuple(part.strip() for part in conversations.split(",") if part.strip()),
            max_tokens=max_tokens,
            fidelity=fidelity,
            choices=choices,
            seed=seed,
        )
        config.parsed_arms()
        samples, digest = load(data), file_sha256(data)
        _check_hash(digest, data, allowed=allow_data_changes)
        folder = RunFolder(out)
        out.mkdir(parents=True, exist_ok=True)
        console.print(f"servers start; their logs are in {out}", highlight=False)
        with (
            serving(
                config, model=model, folder=out, url=url, precise_url=precise_url, flags=server_flag or ()
            ) as servers,
            _progress() as progress,
        ):
            folder.begin(config, header_of(digest, servers.system.describe()))
            runner = Runner(config, servers.system, folder, precise=servers.precise, progress=progress)
            asked = runner.run(samples)
        console.print(f"{asked} questions asked, {len(folder.done())} rows in {out}", highlight=False)


@contextmanager
def _progress() -> Iterator[runs.Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        asked = bars.add_task("questions", total=None)
        taking: dict[str, TaskID] = {}

        def taking_in(name: str, done: int, total: int) -> None:
            if name not in taking:
                taking[name] = bars.add_task(f"encoding {name}", total=total)
            bars.update(taking[name], completed=done, total=total, visible=done < total)

        yield runs.Progress(taking_in, lambda done, total: bars.update(asked, completed=done, total=total))


@contextmanager
def _failing_in_one_line() -> Iterator[None]:
    try:
        yield
    except LocomoError as error:
        print(f"locomo: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


def _check_hash(digest: str, path: Path, *, allowed: bool) -> None:
    if digest == PUBLISHED_SHA256:
        return
    said = f"{path} is not the published locomo10.json (SHA-256 {digest[:12]}..., not {PUBLISHED_SHA256[:12]}...)"
    if not allowed:
        raise DatasetError(f"{said}: results are not comparable; go on with --allow-data-changes")
    console.print(f"warning: {said}", style="yellow", highlight=False)
