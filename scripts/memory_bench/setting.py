"""What all three benchmarks share: the data, the server with its facts encoded, and the gate before any timing."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sessions_bench.environment import description

from locomo.arms.base import Served
from locomo.arms.stateful import StatefulServer
from locomo.dataset import Category, Conversation, demo_conversation_path, file_sha256, load
from locomo.fidelity import kl_divergence
from locomo.retrieval.units import UnitKind, UnitText, units_of
from locomo.server import ServerProcess
from sgl_stateful.model_files import default_model_dir

DEFAULT_POLICY = "ladder:0+4"
_GATE_K, _GATE_QUESTIONS, _GATE_TOP = 10, 4, 1000


class RedGate(RuntimeError):
    """What is to be timed does not do what it should."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A ready server with one conversation encoded.

    Attributes
    ----------
    owner
        Of the facts.
    questions
        Whose answer is in the conversation, in its order, without repetitions.
    """

    url: str
    server: StatefulServer
    owner: str
    questions: tuple[str, ...]
    policy: str


def arguments(doc: str, **more: Any) -> argparse.ArgumentParser:
    """Options that every benchmark has."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="OUT", help="write bars and rows to this file")
    parser.add_argument("--data", type=Path, default=os.environ.get("LOCOMO_DATA"), help="LoCoMo's file")
    parser.add_argument("--conversation", type=int, default=0, help="which of the file")
    parser.add_argument("--units", choices=[kind.value for kind in UnitKind], default=UnitKind.TURNS.value)
    parser.add_argument("--model", type=Path, default=default_model_dir(os.environ))
    for name, options in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    return parser


def conversation_of(args: argparse.Namespace) -> Conversation:
    """The conversation to serve: of the user's file, or the shipped one."""
    return load(args.data or demo_conversation_path())[args.conversation]


@contextmanager
def serving(args: argparse.Namespace, *, pool_tokens: int, flags: Sequence[str] = ()) -> Iterator[Setting]:
    """Start a server, encode the conversation, and pass the gate.

    Raises
    ------
    RedGate
        The server's self-test failed, or a spliced answer is no nearer to full prefill than one without facts.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends too
    conversation = conversation_of(args)
    with tempfile.TemporaryDirectory(prefix="memory-bench-") as folder:
        own = ["--policy", DEFAULT_POLICY, "--max-total-tokens", str(pool_tokens), "--enable-metrics", *flags]
        process = ServerProcess(args.model, Path(folder) / "memory", flags=own, log=Path(folder) / "server.log")
        with process, StatefulServer(process.url, args.model, max_tokens=1) as server:
            say(f"encoding {conversation.sample_id}")
            units = units_of(conversation, UnitKind(args.units), text=UnitText.PLAIN, captions=True)
            server.open(conversation, units, lambda done, total: None)
            asked = [q.question for q in conversation.questions if q.category != Category.ADVERSARIAL and q.evidence]
            setting = Setting(process.url, server, server.owner, tuple(dict.fromkeys(asked)), DEFAULT_POLICY)
            check(setting)
            yield setting


def check(setting: Setting) -> None:
    """Refuse to time what is wrong: same prompt, really spliced, and nearer to full prefill than no facts are."""
    server, spread = setting.server, []
    for question in setting.questions[:_GATE_QUESTIONS]:
        facts = tuple(reversed(server.retrieve(question, _GATE_K)))
        spliced, text = Served(facts, "tail", setting.policy), Served(facts, "tail", None)
        server.forget()
        answers = {served: server.answer(question, served) for served in (spliced, text)}
        without = Served((), "tail", None)
        answers[without] = server.answer(question, without)
        if answers[spliced].tier != "spliced":
            raise RedGate(f"{question!r} was served as {answers[spliced].tier}: {answers[spliced].reason}")
        if answers[spliced].tokens["prompt"] != answers[text].tokens["prompt"]:
            raise RedGate(f"{question!r}: {answers[spliced].tokens} spliced, {answers[text].tokens} as text")
        server.forget()
        first = {}
        for served, answer in answers.items():
            [scored] = server.score(question, served, [" "], prompt=answer, top=_GATE_TOP) or []
            first[served] = scored.distributions[0]
        spread.append((kl_divergence(first[text], first[spliced]), kl_divergence(first[text], first[without])))
    near, far = (sum(values) / len(spread) for values in zip(*spread, strict=True))
    say(f"gate: KL to full prefill at the first token {near:.3f} spliced, {far:.3f} without facts")
    if not near < far:
        raise RedGate(
            f"spliced answers are no nearer to full prefill ({near:.3f}) than those without facts ({far:.3f})"
        )


def write(args: argparse.Namespace, bars: Mapping[str, float | None], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the bars, and write all of it where the user said."""
    print(json.dumps(bars))
    if args.json is None:
        return
    data = args.data or demo_conversation_path()
    meta = description() | {
        "model": args.model.name,
        "data_sha256": file_sha256(data),
        "conversation": args.conversation,
        "units": args.units,
    }
    args.json.write_text(json.dumps({"bars": dict(bars), "rows": list(rows), "meta": meta}, indent=1) + "\n")


_STARTED = time.monotonic()


def say(line: str) -> None:
    """What is going on, with the time since the start."""
    print(f"{time.monotonic() - _STARTED:4.0f} s  {line}", file=sys.stderr, flush=True)
