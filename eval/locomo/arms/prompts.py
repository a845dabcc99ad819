"""The one wording of every arm's prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from locomo.errors import ConfigError
from locomo.retrieval.units import Unit

SYSTEM = "You answer questions about two people from notes of their conversations."
HEADER = "Here is what was said in earlier conversations:\n"  # what a server of ours puts there by default
QUESTION = "Question: {question}\nAnswer in as few words as possible, with words of the notes.\n"
STOP = "\n"
_SENTINEL = "\ue000notes\ue000"


def prompt_hash() -> str:
    """SHA-256 of the wording, hex: answers under another one are not comparable."""
    return hashlib.sha256("\0".join((SYSTEM, HEADER, QUESTION, STOP)).encode()).hexdigest()


def messages(question: str, *, placement: str, notes: str) -> list[dict[str, str]]:
    """Chat messages with ``notes`` at the head (end of the system message) or at the tail (before the question)."""
    asked = QUESTION.format(question=question)
    if placement == "head":
        return [{"role": "system", "content": f"{SYSTEM}\n{notes}"}, {"role": "user", "content": asked}]
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{notes}{asked}"}]


def notes_of(units: Sequence[Unit]) -> str:
    """Units as text under their header; nothing where there are none."""
    lines = [f"[{unit.date_time}] {unit.speaker}: {' '.join(unit.text.split())}\n" for unit in units]
    return HEADER + "".join(lines) if lines else ""


class PromptIds:
    """Prompts as token ids, split where the notes go.

    Parameters
    ----------
    model
        Directory or hub id of the tokenizer and its chat template.

    Raises
    ------
    ConfigError
        There is no tokenizer, or none with a chat template.
    """

    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{model} has no tokenizer: {str(error).splitlines()[0]}") from error
        if self._tokenizer.chat_template is None:
            raise ConfigError(f"the tokenizer of {model} has no chat template")

    def split(self, question: str, *, placement: str) -> tuple[list[int], list[int]]:
        """Ids before and after the notes."""
        rendered = self._tokenizer.apply_chat_template(
            messages(question, placement=placement, notes=_SENTINEL), tokenize=False, add_generation_prompt=True
        )
        head, tail = rendered.split(_SENTINEL)
        return self.encode(head), self.encode(tail)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids
