"""``python -m locomo.oracle``: start a server in fp32, splice, and compare with the reference model."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, NoReturn, cast, get_args

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from locomo.dataset import load
from locomo.errors import LocomoError, OracleError
from locomo.server import ServerProcess
from memstore import KVBlobs, MemStoreError

from .cases import DEFAULT_KS, DEFAULT_PLACEMENTS, DEFAULT_POLICIES, Case, cases_of, conversations_path
from .reference import ReferenceModel
from .run import CaseRunner, Row
from .rungs import rungs_of
from .serving import Placement
from .table import failures, record_of, table_of

_POOL_TOKENS = 6000


def main(
    model: Annotated[Path, typer.Option(help="Model directory.")],
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="A file in LoCoMo's schema; by default two short invented conversations.")
    ] = None,
    policies: Annotated[str, typer.Option(help="Policies to serve, comma-separated.")] = ",".join(DEFAULT_POLICIES),
    placements: Annotated[str, typer.Option(help="'system', 'tail' or both.")] = ",".join(DEFAULT_PLACEMENTS),
    k: Annotated[str, typer.Option(help="Numbers of facts, comma-separated.")] = ",".join(map(str, DEFAULT_KS)),
    tolerance: Annotated[float, typer.Option(min=0, help="Largest difference that passes.")] = 1e-3,
    steps: Annotated[int, typer.Option(min=0, help="Tokens of the answer, decoded and then forced.")] = 4,
    top: Annotated[int, typer.Option(min=1, help="Tokens listed behind each token of a prompt.")] = 1000,
    seed: Annotated[int, typer.Option(help="Draws and orders the facts.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Of the reference model; else as torch has it.")] = None,
) -> None:
    """Compare spliced prompts with one forward of the reference model; exit with 1 where one differs."""
    console = Console()
    if threads is not None:
        torch.set_num_threads(threads)
    rows: list[Row] = []
    try:
        conversations = load(data or conversations_path())
        names, ks = _names(policies), _numbers(k)
        lengths = [len(conversation.turns) for conversation in conversations]
        cases = cases_of(names, _placements(placements), ks, lengths=lengths, seed=seed)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="locomo-oracle-")))
            console.print(f"starting the server (log: {folder / 'server.log'}) ...")
            memory = folder / "memory"
            flags = ["--policy", names[0], "--also-encode", ",".join(names[1:]), "--dtype", "float32"]
            flags += ["--kv-storage", "native"]
            flags += ["--max-total-tokens", str(_POOL_TOKENS)]
            server = stack.enter_context(ServerProcess(model, memory, flags=flags, log=folder / "server.log"))
            blobs = stack.enter_context(KVBlobs(memory / "kv", replace_damaged=False))
            runner = CaseRunner(server.url, blobs, ReferenceModel(model), top=top, steps=steps)
            stack.callback(runner.close)
            for conversation in conversations:
                with _progress(console, f"encoding {len(conversation.turns)} turns") as update:
                    runner.add(conversation, on_progress=update)
            described = runner.model_description()
            # One number of facts is enough to show, of every policy and placement, that the check can fail.
            _run(console, runner, cases, rows, control_k=ks[len(ks) // 2])
    except (LocomoError, MemStoreError) as error:
        _fail(str(error))
    finally:
        # Also where the server died on the way, or the user had seen enough.
        if rows:
            console.print(table_of(rows))
    if json_out is not None:
        options = {"steps": steps, "top": top, "seed": seed, "policies": names}
        record = record_of(rows, tolerance=tolerance, model=described, options=options)
        json_out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    if wrong := failures(rows, tolerance):
        _fail("\n".join(wrong))
    console.print(f"every difference is at most {tolerance:g}")


def _run(console: Console, runner: CaseRunner, cases: Sequence[Case], rows: list[Row], *, control_k: int) -> None:
    with _progress(console, "comparing with the reference") as update:
        for case in cases:
            rows.append(runner.run(case, with_control=case.k == control_k))
            update(len(rows), len(cases))


def _names(policies: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in policies.split(",") if name.strip()))
    if not names:
        raise OracleError(f"--policies {policies!r} names no policy")
    for name in names:
        rungs_of(name)
    return names


def _numbers(k: str) -> list[int]:
    try:
        numbers = [int(part) for part in k.split(",")]
    except ValueError:
        raise OracleError(f"--k {k!r} is no list of numbers, such as 1,5,20") from None
    if min(numbers) < 1:
        raise OracleError(f"--k {k!r}: without facts nothing is spliced")
    return sorted(set(numbers))


def _placements(text: str) -> list[Placement]:
    known = get_args(Placement)
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise OracleError(f"--placements {', '.join(unknown)}: choose from {', '.join(known)}")
    return [cast(Placement, name) for name in dict.fromkeys(names)]


@contextmanager
def _progress(console: Console, title: str) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _fail(message: str) -> NoReturn:
    typer.echo(f"oracle: {message}", err=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
