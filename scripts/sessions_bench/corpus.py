"""Token ids of invented greenhouse readings; content of one number never begins like that of another."""

import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

_NUM_LINES = 2_000
_FIRST_HEAD = 1_000
_NUM_HEADS = 40_000
_QUESTION = "\nWhich bed has been dry the longest, and what was the temperature there? Answer:"


class Corpus:
    """Draws token ids by number and length.

    Parameters
    ----------
    lines
        Token ids of one line each.
    question
        Token ids that a question ends with.
    """

    def __init__(self, lines: Sequence[Sequence[int]], question: Sequence[int]) -> None:
        self._lines = [list(line) for line in lines]
        self._question = list(question)
        self._next = 0

    @classmethod
    def of_model(cls, model: Path) -> "Corpus":
        """Readings in the tokens of that model."""
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        lines = [encoded.ids for encoded in tokenizer.encode_batch(_readings(), add_special_tokens=False)]
        return cls(lines, tokenizer.encode(_QUESTION, add_special_tokens=False).ids)

    def fresh(self) -> int:
        """A number that has not been given before; they begin far behind those of a schedule."""
        self._next += 1
        return _NUM_HEADS // 2 + self._next

    def data(self, number: int, num_tokens: int) -> list[int]:
        """`num_tokens` ids of readings.

        The first id is the number's own, so that no prefix of it is ever found in a cache by accident.
        """
        assert 0 <= number < _NUM_HEADS, number
        rng = random.Random(number)
        ids = [_FIRST_HEAD + number]
        while len(ids) < num_tokens:
            ids += rng.choice(self._lines)
        return ids[:num_tokens]

    def question(self, number: int, num_tokens: int) -> list[int]:
        """`num_tokens` ids, two at least, that end like a question and begin with the number's own id."""
        tail = self._question[1 - num_tokens :]
        return self.data(number, num_tokens - len(tail)) + tail


def _readings() -> list[str]:
    rng = random.Random(11)
    states = ("dry", "damp", "wet", "just watered", "not measured")
    remarks = ("vents open", "vents half open", "shade drawn", "lamp on", "a leaf has yellowed", "seedlings are up")
    return [
        f"{rng.randrange(24):02}:{rng.randrange(60):02} bed {rng.randint(1, 40)}: {rng.randint(4, 39)} °C, "
        f"soil {rng.choice(states)}, {rng.choice(remarks)}.\n"
        for _ in range(_NUM_LINES)
    ]
