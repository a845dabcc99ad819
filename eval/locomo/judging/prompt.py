"""The judge's prompt: ours, or a file of the user's with the same three placeholders."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from locomo.errors import JudgePromptError

_PLACEHOLDER = re.compile(r"\{(question|gold|prediction)\}")
_OURS = Path(__file__).parent / "prompt.txt"


@dataclass(frozen=True, slots=True)
class JudgePrompt:
    """A template with ``{question}``, ``{gold}`` and ``{prediction}``; other braces are text."""

    template: str

    @property
    def sha256(self) -> str:
        """Hash of the template in hex, to be recorded beside every verdict's count."""
        return hashlib.sha256(self.template.encode()).hexdigest()

    def render(self, *, question: str, gold: str, prediction: str) -> str:
        """Fill the template in one pass: a placeholder's name inside of an answer stays as it is."""
        values = {"question": question, "gold": gold, "prediction": prediction}
        return _PLACEHOLDER.sub(lambda match: values[match[1]], self.template)


def load_prompt(path: Path | None = None) -> JudgePrompt:
    """Read a prompt, ours where no path is given.

    It must ask for a JSON object with a ``verdict`` (or ``label``) of ``correct``, ``wrong`` or ``abstained``, or for
    one of these words alone; case does not matter. A prompt that knows only the first two works: nothing is then
    counted as abstained by the judge.

    Raises
    ------
    JudgePromptError
        The file cannot be read or lacks a placeholder.
    """
    source = _OURS if path is None else path
    try:
        template = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise JudgePromptError(f"cannot read the judge's prompt {source}: {error}") from error
    if missing := {"question", "gold", "prediction"} - set(_PLACEHOLDER.findall(template)):
        names = ", ".join(f"{{{name}}}" for name in sorted(missing))
        raise JudgePromptError(f"the judge's prompt {source} lacks {names}")
    return JudgePrompt(template)
