"""Time sessions beside a stock SGLang whose client sends the whole prompt, in one run, on the same ids and kernels.

Answers are compared before anything is timed. Both servers are up all the time and are asked in turns: the one waits
while the other works, and a control shows what an idle neighbour costs. All times are the client's.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sgl_stateful.model_files import default_model_dir

from .environment import description
from .measure import bars_of
from .schedule import schedule
from .shape import FULL, QUICK
from .suite import PARTS, Suite
from .table import table


def main() -> None:
    """Parse, measure, print."""
    args = _arguments()
    # Ended in the ordinary way, so that the servers go too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    shape = QUICK if args.quick else FULL
    shape = replace(shape, load_rounds=args.rounds or shape.load_rounds)
    meta = description() | {"model": args.model.name, "seed": args.seed, "shape": asdict(shape)}
    started = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    directory = Path(tempfile.mkdtemp(dir=args.dir, prefix="bench-sessions-"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("load", total=len(schedule(shape, args.seed)), visible=False)

        def advance() -> None:
            progress.update(task, advance=1, visible=True)

        def say(line: str) -> None:
            progress.console.print(f"{time.monotonic() - started:4.0f} s  {line}", highlight=False, soft_wrap=True)

        say(json.dumps(meta))
        suite = Suite(args.model, directory, shape, only=args.only, seed=args.seed, say=say, advance=advance)
        try:
            suite.run()
        except BaseException:
            say(f"{table(suite.rows)}\nended after these rows; the servers' logs are in {directory}")
            raise
    shutil.rmtree(directory)
    bars = bars_of(suite.measured)
    bars = {name: value if value is None else round(value, 4) for name, value in bars.items()}
    print(table(suite.rows))
    print(json.dumps(bars))
    if args.json is not None:
        meta |= {"servers": suite.servers, "took_s": round(time.monotonic() - started)}
        report = {"bars": bars, "rows": [row.as_json() for row in suite.rows], "meta": meta}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="bench_sessions", description=lines[0])
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--only", type=_parts, default=(), metavar="NAMES", help=f"of {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats: does it run?")
    parser.add_argument("--rounds", type=int, help="of the load; each visits every session once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="where the store is made; the system's temporary directory")
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; by default that of scripts/get_models")
    args = parser.parse_args()
    args.model = args.model or default_model_dir(os.environ)
    if not (args.model / "config.json").exists():
        parser.error(f"no model at {args.model}: run scripts/setup")
    return args


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if unknown := set(parts) - set(PARTS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return parts


if __name__ == "__main__":
    main()
