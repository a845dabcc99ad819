"""The stream in the tokens of a model, as far as it has been sent."""

from collections.abc import Callable
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer

from .market import Record, line, records

_HEADER = "Minute candles and news of four symbols.\n"


class Tape:
    """Grows line by line.

    Parameters
    ----------
    encode
        Token ids of a text.

    Attributes
    ----------
    records
        What has been sent.
    ids
        Its token ids, a header in front.
    """

    def __init__(self, seed: int, encode: Callable[[str], list[int]]) -> None:
        self._stream = records(seed)
        self._encode = encode
        self.records: list[Record] = []
        self.ids = list(encode(_HEADER))

    @classmethod
    def of_model(cls, model: Path, seed: int) -> Self:
        """The stream of a seed in that model's tokens."""
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        return cls(seed, lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids))

    def step(self) -> list[int]:
        """Send one more record; its ids."""
        record = next(self._stream)
        self.records.append(record)
        ids = self._encode(line(record))
        self.ids += ids
        return ids

    def grow(self, num_tokens: int) -> list[int]:
        """Send whole records until there are so many tokens at least; the new ids."""
        before = len(self.ids)
        while len(self.ids) < num_tokens:
            self.step()
        return self.ids[before:]

    def entry(self, text: str, number: int) -> tuple[list[int], list[int]]:
        """Ids of a question's beginning, which is always the same, and of its end, which nobody has asked."""
        before, ask, after = text.rpartition("?")
        return self._encode(before), self._encode(f" (request {number}){ask}{after}")

    def question(self, text: str, *, number: int | None = None) -> list[int]:
        """Ids of a question; with a number it is one that nobody has asked, in almost the same words."""
        return self._encode(text if number is None else f"\n({number}){text}")
