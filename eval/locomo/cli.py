"""``python -m locomo``: run questions, score the run, draw its report, compare runs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from locomo import reporting, runs
from locomo.arms.prompts import prompt_hash
from locomo.command_line import failing_in_one_line, unlike_published
from locomo.dataset import file_sha256, load
from locomo.errors import ConfigError, DatasetError, JudgeRefused, RunError
from locomo.judging.judge import Judge, JudgeSettings, open_judge
from locomo.retrieval.command import retrieval
from locomo.retrieval.units import UnitKind
from locomo.runs.config import ANSWERABLE, RunConfig, sample
from locomo.runs.folder import RunFolder
from locomo.runs.header import header_of, model_name_of
from locomo.runs.runner import Runner
from locomo.runs.servers import Endpoint, asking, serving
from locomo.scores import score_run
from locomo.scores.files import write_score
from locomo.scores.inputs import read_benches, read_encoding, read_run, read_score
from locomo.scores.table import render
from locomo.scoring.audited import load_audit

DEFAULT_ARMS = (
    "none",
    "text/tail@10",
    "splice/ladder:live+4+32/tail@10",
    "splice/anchor:4/tail@10",
    "splice/window:0/tail@10",
    "floor/shuffled@10",
)
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
console = Console(stderr=True)

Data = Annotated[Path, typer.Option("--data", envvar="LOCOMO_DATA", help="LoCoMo's file, or one in its schema.")]
Out = Annotated[Path, typer.Argument(help="The run's folder.")]


@app.callback()
def main() -> None:
    """Measure memory on LoCoMo's conversations."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a server of ours ends too


@app.command()
def run(
    out: Out,
    data: Data,
    model: Annotated[
        Path | None, typer.Option(help="Model directory: tokenizer, and weights where a server is started.")
    ] = None,
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
    endpoint: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible endpoint in place of a server of ours, for text arms.")
    ] = None,
    endpoint_model: Annotated[str | None, typer.Option(help="The model's name there.")] = None,
    endpoint_key_env: Annotated[str | None, typer.Option(help="The environment variable with its key.")] = None,
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
            ids=_ids(ids),
            conversations=tuple(part.strip() for part in conversations.split(",") if part.strip()),
            max_tokens=max_tokens,
            fidelity=fidelity and endpoint is None,  # an endpoint gives no log probabilities of the gold
            choices=choices,
            seed=seed,
        )
        config.check()
        samples, digest = load(data), file_sha256(data)
        _check_hash(digest, data, allowed=allow_data_changes)
        sample(samples, config)  # that there are questions, before servers start
        folder, flags = RunFolder(out), tuple(server_flag or ())
        if endpoint is not None:
            connected = asking(found := _endpoint(endpoint, endpoint_model, endpoint_key_env), config)
            name = found.model
        elif model is not None:
            connected = serving(config, model=model, folder=out, url=url, precise_url=precise_url, flags=flags)
            name = model_name_of(model)
        else:
            raise ConfigError("a run needs --model, or --endpoint and --endpoint-model")
        with folder.locked(), _writing_to(out):
            folder.check(config, {"data_sha256": digest, "prompt_sha256": prompt_hash()})
            if endpoint is None:
                console.print(f"servers start; their logs are in {out}", highlight=False)
            with connected as servers, _progress() as progress:
                runner = Runner(config, servers.system, folder, precise=servers.precise, progress=progress)
                header = header_of(digest, servers.system.describe(), model_name=name, server_flags=flags)
                for difference in folder.begin(config, header):
                    console.print(f"warning: {out} was begun otherwise: {difference}", style="yellow", highlight=False)
                asked = runner.run(samples)
        console.print(f"{asked} questions asked, {len(folder.done())} rows in {out}", highlight=False)


def _ids(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--ids {text!r} is no list of category ids, as in 1,2,3,4")
    return tuple(map(int, parts))


def _endpoint(url: str, model: str | None, key_env: str | None) -> Endpoint:
    if model is None:
        raise ConfigError("an endpoint needs --endpoint-model")
    return Endpoint(url, model, _key(key_env, "--endpoint-key-env"))


def _key(variable: str | None, option: str) -> str | None:
    key = None if variable is None else os.environ.get(variable)
    if variable is not None and not key:
        raise ConfigError(f"the environment has no {variable}, where {option} says that the key is")
    return key


app.command()(retrieval)


@app.command()
def score(
    out: Out,
    data: Data,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the score here too, bars included.")] = None,
    k: Annotated[
        int | None,
        typer.Option("--k", min=1, help="Arms at this k have the bars; by default 10, or the run's only k."),
    ] = None,
    judge_url: Annotated[str | None, typer.Option(help="An OpenAI-compatible endpoint, as https://host/v1.")] = None,
    judge_model: Annotated[str | None, typer.Option(help="The judge's full name.")] = None,
    judge_key_env: Annotated[str | None, typer.Option(help="The environment variable with its key.")] = None,
    judge_prompt: Annotated[Path | None, typer.Option(help="In place of the judge's own wording.")] = None,
    judge_runs: Annotated[int, typer.Option(min=1, help="How often each answer is judged.")] = 3,
    audit: Annotated[Path | None, typer.Option(help="A list of questions whose gold is wrong.")] = None,
    allow_data_changes: Annotated[bool, typer.Option(help="Score with a file that is not the run's.")] = False,
) -> None:
    """Compute every figure of a run from its rows and the golds of the data; nothing is asked of a server again."""
    with _failing_in_one_line():
        settings = _judge_settings(judge_url, judge_model, judge_key_env, judge_prompt)
        conversations, digest = load(data), file_sha256(data)
        _check_run_data(RunFolder(out), digest, data, allowed=allow_data_changes)
        listed = None if audit is None else load_audit(audit, conversations)
        with _judging(settings, out) as judge:
            scored = score_run(
                out, conversations, k=k, judge=judge, judge_runs=judge_runs, audit=listed, data_sha256=digest
            )
        if json_file is not None:
            write_score(json_file, scored)
        _print(render(scored))
        if refused := scored["judge_refused"]:
            raise JudgeRefused(f"{refused}: the score is without verdicts, and those had so far are kept")


@app.command()
def report(
    out: Out,
    bench: Annotated[
        list[Path] | None,
        typer.Option(help="A file of a speed benchmark, in place of the folder's own; repeatable."),
    ] = None,
) -> None:
    """Draw a scored run as one HTML page, with its charts as PNG beside it."""
    with _failing_in_one_line(), _writing_to(out):
        score, benches = read_score(out), read_benches(out, bench or ())
        page = reporting.write_report(score, out=out, benches=benches, encoded=read_encoding(out))
        print(page)


@app.command()
def compare(
    outs: Annotated[list[Path], typer.Argument(metavar="OUT OUT...", help="Folders of scored runs.")],
    html: Annotated[Path | None, typer.Option(help="Write the comparison as a page, too.")] = None,
) -> None:
    """Set runs beside the first, paired by question wherever both have rows of it."""
    with _failing_in_one_line():
        pairs = reporting.compare([read_run(out, among=outs) for out in outs])
        _print(reporting.render(pairs))
        if html is not None:
            with _writing_to(html):
                reporting.write_comparison(pairs, html)


def _judge_settings(
    url: str | None, model: str | None, key_env: str | None, prompt: Path | None
) -> JudgeSettings | None:
    if url is None and model is None:
        return None
    if url is None or model is None:
        raise ConfigError("a judge needs --judge-url and --judge-model")
    return JudgeSettings(url, model, api_key=_key(key_env, "--judge-key-env"), prompt_file=prompt)


@contextmanager
def _judging(settings: JudgeSettings | None, out: Path) -> Iterator[Judge | None]:
    if settings is None:
        yield None
        return
    with Progress(*_columns(), console=console) as bars:
        judged = bars.add_task("verdicts", total=None)
        verdicts = out / "verdicts.jsonl"
        with open_judge(
            settings, verdicts, on_progress=lambda done, total: bars.update(judged, completed=done, total=total)
        ) as judge:
            yield judge


@contextmanager
def _writing_to(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write to {path}: {error.strerror or error}") from error


def _print(shown: RenderableType) -> None:
    """On standard output, on lines as long as they are where it is no terminal."""
    Console(width=None if sys.stdout.isatty() else 1000).print(shown, highlight=False)


def _columns() -> tuple[ProgressColumn, ...]:
    return TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()


@contextmanager
def _progress() -> Iterator[runs.Progress]:
    with Progress(*_columns(), console=console) as bars:
        asked = bars.add_task("questions", total=None)
        taking: dict[str, TaskID] = {}

        def taking_in(name: str, done: int, total: int) -> None:
            if name not in taking:
                taking[name] = bars.add_task(f"encoding {name}", total=total)
            bars.update(taking[name], completed=done, total=total, visible=done < total)

        yield runs.Progress(taking_in, lambda done, total: bars.update(asked, completed=done, total=total))


def _failing_in_one_line() -> AbstractContextManager[None]:
    return failing_in_one_line("locomo")


def _check_hash(digest: str, path: Path, *, allowed: bool) -> None:
    if said := unlike_published(path, digest, allowed=allowed):
        console.print(f"warning: {said}", style="yellow", highlight=False)


def _check_run_data(folder: RunFolder, digest: str, path: Path, *, allowed: bool) -> None:
    """Golds of another file are answers to other questions."""
    header = folder.read_config().get("header") or {}
    if digest == header.get("data_sha256"):
        return
    said = (
        f"{path} is not the data that {folder.path} was run on "
        f"(SHA-256 {digest[:12]}..., not {str(header.get('data_sha256'))[:12]}...)"
    )
    if not allowed:
        raise DatasetError(f"{said}: name that file with --data, or go on with --allow-data-changes")
    console.print(f"warning: {said}", style="yellow", highlight=False)
