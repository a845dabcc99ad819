"""Questions about the stream, with answers that follow from the data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .market import SYMBOLS, Candle, Event, Record, price

YES, NO = " Yes", " No"
_ENDING = "\nAnswer:"  # behind the only question mark

Answer = Callable[[Sequence[Record]], str | None]


@dataclass(frozen=True, slots=True)
class Question:
    """One question.

    Attributes
    ----------
    choices
        The closed set of its answers; empty: it is open.
    answer
        From all records so far; None while the data do not say.
    """

    name: str
    text: str
    answer: Answer
    choices: tuple[str, ...] = ()

    def is_right(self, said: str, records: Sequence[Record]) -> bool | None:
        """Whether a text answers it rightly, by its first word; None where the data do not say."""
        if (right := self.answer(records)) is None:
            return None
        words = said.split()
        return bool(words) and words[0].strip(".,;:!$").casefold() == right.strip().casefold()


def questions() -> list[Question]:
    """Five kinds for each symbol: two are open, three have a closed set of answers."""
    return [make(symbol) for symbol in SYMBOLS for make in (last_close, highest, closed_above, is_halted, is_up)]


def last_close(symbol: str) -> Question:
    """At what price the symbol's last candle closed."""

    def answer(records: Sequence[Record]) -> str | None:
        candles = _candles(records, symbol)
        return price(candles[-1].close) if candles else None

    return Question(f"last-{symbol}", f"\nWhat was the last close of {symbol}?{_ENDING}", answer)


def highest(symbol: str) -> Question:
    """The symbol's highest price so far."""

    def answer(records: Sequence[Record]) -> str | None:
        candles = _candles(records, symbol)
        return price(max(candle.high for candle in candles)) if candles else None

    return Question(f"highest-{symbol}", f"\nWhat is the highest price of {symbol} so far?{_ENDING}", answer)


def closed_above(symbol: str) -> Question:
    """Whether the symbol's last candle closed above its open."""

    def answer(records: Sequence[Record]) -> str | None:
        candles = _candles(records, symbol)
        return _yes_or_no(candles[-1].close > candles[-1].open) if candles else None

    text = f"\nDid the last candle of {symbol} close above its open, Yes or No?{_ENDING}"
    return Question(f"above-{symbol}", text, answer, (YES, NO))


def is_halted(symbol: str) -> Question:
    """Whether trading in the symbol is halted."""

    def answer(records: Sequence[Record]) -> str | None:
        kinds = [one.kind for one in records if isinstance(one, Event) and one.symbol == symbol]
        switches = [kind for kind in kinds if kind in ("halted", "resumed")]
        return _yes_or_no(bool(switches) and switches[-1] == "halted")

    return Question(f"halted-{symbol}", f"\nIs trading in {symbol} halted, Yes or No?{_ENDING}", answer, (YES, NO))


def is_up(symbol: str) -> Question:
    """Whether the symbol's last close is above its first open."""

    def answer(records: Sequence[Record]) -> str | None:
        candles = _candles(records, symbol)
        return _yes_or_no(candles[-1].close > candles[0].open) if candles else None

    text = f"\nIs the last close of {symbol} above its first open, Yes or No?{_ENDING}"
    return Question(f"up-{symbol}", text, answer, (YES, NO))


def _candles(records: Sequence[Record], symbol: str) -> list[Candle]:
    return [one for one in records if isinstance(one, Candle) and one.symbol == symbol]


def _yes_or_no(is_so: bool) -> str:
    return YES if is_so else NO
