"""Time stored answers on a stream of market data beside a stock SGLang whose client sends the whole prompt, in one run.

Answers are compared before anything is timed. Both servers are up all the time and are asked in turns: the one waits
while the other works. ``ttft`` is the client's; ``server`` is what the server itself takes to the first token, from the
rendered question on. Intervals are at 95 %, by bootstrap over rounds.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sessions_bench.environment import description
from sessions_bench.table import table

from locomo.whole_file import write_whole
from sgl_stateful.model_files import default_model_dir

from .plot import draw
from .rows import Report
from .shape import FULL, QUICK, Shape
from .suite import PARTS, Suite


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    given = sys.argv[1:] if argv is None else list(argv)
    args = _arguments(given)
    # Ended in the ordinary way, so that the servers go too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    shape = _shape(args)
    command = shlex.join(["scripts/bench_streaming", *given])
    meta = description() | {"model": args.model.name, "seed": args.seed, "shape": asdict(shape), "command": command}
    started = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    directory = Path(tempfile.mkdtemp(dir=args.dir, prefix="bench-streaming-"))
    rounds = len(shape.contexts) * (shape.warm + shape.rounds) + shape.evictions
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("sweep", total=rounds, visible=False)

        def say(line: str) -> None:
            progress.console.print(f"{time.monotonic() - started:4.0f} s  {line}", highlight=False, soft_wrap=True)

        def done(report: Report, *, is_finished: bool = False) -> None:
            """What there is so far, also of a run that is ended before its end."""
            if args.jsonl is not None:
                write_whole(args.jsonl, "".join(json.dumps(line) + "\n" for line in suite.lines))
            if args.plot is not None and suite.samples:
                draw(suite.samples, args.plot)
            if args.json is None:
                return
            more = {"servers": suite.servers, "took_s": round(time.monotonic() - started), "finished": is_finished}
            found = as_json(report, official=not args.quick) | {"meta": meta | more | {"intervals": report.intervals}}
            write_whole(args.json, json.dumps(found, indent=1) + "\n")

        say(json.dumps(meta))
        suite = Suite(
            args.model,
            directory,
            shape,
            only=args.only,
            seed=args.seed,
            say=say,
            advance=lambda: progress.update(task, advance=1, visible=True),
            done=done,
        )
        try:
            suite.run()
        except BaseException:
            say(f"{table(suite.report.rows)}\nended after these rows; the servers' logs are in {directory}")
            raise
    shutil.rmtree(directory)
    done(suite.report, is_finished=True)
    print(table(suite.report.rows))
    for name, (low, high) in suite.report.intervals.items():
        print(f"{name}: {suite.report.bars[name]:.3f}, 95 % interval {low:.3f}-{high:.3f}")
    print(json.dumps(as_json(suite.report, official=not args.quick)["bars"]))


def as_json(report: Report, *, official: bool) -> dict[str, object]:
    """Bars and rows with their numbers rounded; no bar where the sizes are not those that the bars are about."""
    bars = {name: round(value, 4) if official and value is not None else None for name, value in report.bars.items()}
    return {"bars": bars, "rows": [row.as_json() for row in report.rows]}


def _shape(args: argparse.Namespace) -> Shape:
    shape = QUICK if args.quick else FULL
    given = {name: getattr(args, name) for name in ("rounds", "blocks", "interleavings", "gate_versions")}
    return replace(shape, **{name: value for name, value in given.items() if value is not None})


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="bench_streaming", description=lines[0])
    parser.add_argument("--json", type=Path, metavar="OUT", help="bars and rows")
    parser.add_argument("--jsonl", type=Path, metavar="OUT", help="every sample, a line each")
    parser.add_argument("--plot", type=Path, metavar="OUT", help="a PNG: time to the first token against context")
    parser.add_argument("--only", type=_parts, default=(), metavar="NAMES", help=f"of {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats: does it run?")
    parser.add_argument("--rounds", type=_positive, help="of the sweep, at each length")
    parser.add_argument("--blocks", type=_positive, help="with and without registered questions; an even number")
    parser.add_argument("--interleavings", type=_positive)
    parser.add_argument("--gate-versions", type=_positive, help="half of them to learn from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="where the store is made; the system's temporary directory")
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; by default that of scripts/get_models")
    args = parser.parse_args(argv)
    args.model = args.model or default_model_dir(os.environ)
    if not (args.model / "config.json").exists():
        parser.error(f"no model at {args.model}: run scripts/setup")
    if args.blocks is not None and args.blocks % 2:
        parser.error(f"--blocks has to be even, as half of them have registered questions: {args.blocks}")
    return args


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if unknown := set(parts) - set(PARTS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return parts


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


if __name__ == "__main__":
    main()
