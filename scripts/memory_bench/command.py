"""What the benchmarks' command lines share."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from locomo.command_line import failing_in_one_line
from locomo.errors import ConfigError, RunError
from locomo.retrieval.units import UnitKind
from sgl_stateful.model_files import default_model_dir

from .output import Output, say
from .subject import Subject, default_data, subject_of

Measure = Callable[[argparse.Namespace, Subject, Output], None]
MeasureOver = Callable[[argparse.Namespace, Sequence[Subject], Output], None]


def run(
    measure: Measure,
    *,
    program: str,
    doc: str,
    bars: Sequence[str],
    options: Mapping[str, Mapping[str, Any]],
    argv: Sequence[str] | None = None,
) -> None:
    """Parse, measure, print; whatever goes wrong is one line, and the rows until then are in the file.

    Parameters
    ----------
    options
        More of them, each with its arguments of `argparse.ArgumentParser.add_argument`.
    argv
        By default the process's.
    """
    conversation = {"type": int, "default": 0, "help": "which of the file, from 0"}

    def of_one(args: argparse.Namespace, given: Sequence[str]) -> list[Subject]:
        return [subject_of(args, args.conversation, program=program, argv=given)]

    _run(
        lambda args, subjects, output: measure(args, subjects[0], output),
        of_one,
        program=program,
        doc=doc,
        bars=bars,
        options={"conversation": conversation, **options},
        argv=argv,
    )


def run_over(
    measure: MeasureOver,
    *,
    program: str,
    doc: str,
    bars: Sequence[str],
    options: Mapping[str, Mapping[str, Any]],
    argv: Sequence[str] | None = None,
) -> None:
    """As `run`, over several conversations of the file."""
    conversations = {"type": integers, "default": (0, 1, 2, 3, 4), "help": "which of the file, from 0, comma-separated"}

    def of_many(args: argparse.Namespace, given: Sequence[str]) -> list[Subject]:
        numbers = args.conversations if args.data is not None else (0,)
        if not numbers:
            raise ConfigError("--conversations names none")
        return [subject_of(args, number, program=program, argv=given) for number in numbers]

    options = {"conversations": conversations, **options}
    _run(measure, of_many, program=program, doc=doc, bars=bars, options=options, argv=argv)


def _run(
    measure: MeasureOver,
    read: Callable[[argparse.Namespace, Sequence[str]], list[Subject]],
    *,
    program: str,
    doc: str,
    bars: Sequence[str],
    options: Mapping[str, Mapping[str, Any]],
    argv: Sequence[str] | None,
) -> None:
    given = sys.argv[1:] if argv is None else list(argv)
    args = _parser(program, doc, options).parse_args(given)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends too
    with failing_in_one_line(program):
        subjects = read(args, given)
        output = Output(args.json, bars=bars, meta=subjects[0].meta, official=not subjects[0].is_demo)
        is_finished = False
        try:
            measure(args, subjects, output)
            is_finished = True
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        except OSError as error:  # such as a temporary folder on a full disk
            raise RunError(f"{type(error).__name__}: {error}") from error
        finally:
            if output.rows and not is_finished:
                say(f"ended before it was done: {output.describe()}")


def integers(text: str) -> tuple[int, ...]:
    """Comma-separated numbers from 0, each once.

    Raises
    ------
    ValueError
        Something else.
    """
    found = tuple(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    if any(number < 0 for number in found):
        raise ValueError(text)
    return found


def positive(text: str) -> int:
    """A number from 1.

    Raises
    ------
    ValueError
        Something else.
    """
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def rates(text: str) -> tuple[float, ...]:
    """Comma-separated numbers above 0, each once.

    Raises
    ------
    ValueError
        Something else.
    """
    found = tuple(dict.fromkeys(float(part) for part in text.split(",") if part.strip()))
    if not all(0 < rate < float("inf") for rate in found):
        raise ValueError(text)
    return found


def _parser(program: str, doc: str, options: Mapping[str, Mapping[str, Any]]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=doc.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="OUT", help="write bars and rows to this file")
    parser.add_argument("--data", type=Path, default=default_data(), help="LoCoMo's file; LOCOMO_DATA names it too")
    parser.add_argument("--allow-data-changes", action="store_true", help="go on with a file of another hash")
    parser.add_argument("--units", choices=[kind.value for kind in UnitKind], default=UnitKind.TURNS.value)
    parser.add_argument("--model", type=Path, default=default_model_dir(os.environ))
    for name, arguments in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **arguments)
    return parser
