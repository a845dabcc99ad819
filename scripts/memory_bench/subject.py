"""What is measured on: a conversation of a data file, and a model."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sessions_bench.environment import description

from locomo.command_line import unlike_published
from locomo.dataset import Category, Conversation, demo_conversation_path, file_sha256, load
from locomo.errors import ConfigError
from locomo.retrieval.reference import PUBLISHED_SHA256
from locomo.retrieval.units import Unit, UnitKind, UnitText, units_of

from .output import say


@dataclass(frozen=True, slots=True)
class Subject:
    """One conversation to be served by one model.

    Attributes
    ----------
    units
        Its facts.
    questions
        Whose answer is in the conversation, in its order, without repetitions.
    is_demo
        Whether it is the conversation that ships with the package, which bars do not hold of.
    meta
        What a reader of the rows must know.
    """

    conversation: Conversation
    units: tuple[Unit, ...]
    questions: tuple[str, ...]
    model: Path
    is_demo: bool
    meta: dict[str, Any]


def subject_of(args: argparse.Namespace, number: int, *, program: str, argv: Sequence[str]) -> Subject:
    """Read what the command line names, and conversation ``number`` of it.

    Raises
    ------
    LocomoError
        There is no such file, conversation or model, or the file is not the published one and that was not allowed.
    """
    path = args.data or demo_conversation_path()
    conversations, digest = load(path), file_sha256(path)
    if args.data is None:
        print(
            "warning: no --data: this is the small conversation that ships with the package, and there are no bars",
            file=sys.stderr,
        )
    elif said := unlike_published(path, digest, allowed=args.allow_data_changes):
        print(f"warning: {said}", file=sys.stderr)
    if not 0 <= number < len(conversations):
        raise ConfigError(f"there is no conversation {number}: {path} has {len(conversations)}, from 0")
    if not (args.model / "config.json").is_file():
        raise ConfigError(f"there is no model in {args.model}: scripts/get_models fetches one, --model names another")
    conversation = conversations[number]
    asked = [q.question for q in conversation.questions if q.category != Category.ADVERSARIAL and q.evidence]
    units = units_of(conversation, UnitKind(args.units), text=UnitText.PLAIN, captions=True)
    say(f"{conversation.sample_id}: {len(units)} facts, {len(dict.fromkeys(asked))} questions")
    return Subject(
        conversation=conversation,
        units=tuple(units),
        questions=tuple(dict.fromkeys(asked)),
        model=args.model,
        is_demo=args.data is None,
        meta=description()
        | {
            "model": args.model.resolve().name,
            "data": "the conversation that ships with the package" if args.data is None else path.name,
            "data_sha256": digest,
            "data_is_published": digest == PUBLISHED_SHA256,
            "conversation": number,
            "units": args.units,
            "command": shlex.join([f"scripts/{program}", *argv]),
        },
    )


def require_questions(subject: Subject, count: int, what: str) -> None:
    """Make sure that no question is asked twice, whose facts would no longer be new.

    Raises
    ------
    ConfigError
        The conversation has too few.
    """
    if count > len(subject.questions):
        raise ConfigError(
            f"{what} needs {count} different questions, and {subject.conversation.sample_id} has "
            f"{len(subject.questions)}: ask for fewer, or name another --conversation"
        )


def require_facts(subject: Subject, k: int) -> None:
    """Make sure that there are as many facts as a request is to have.

    Raises
    ------
    ConfigError
        There are fewer.
    """
    if k > len(subject.units):
        raise ConfigError(f"{k} facts are asked for, and {subject.conversation.sample_id} has {len(subject.units)}")


def default_data() -> Path | None:
    """The file that ``LOCOMO_DATA`` names; None where it is unset or empty."""
    return Path(found) if (found := os.environ.get("LOCOMO_DATA")) else None
