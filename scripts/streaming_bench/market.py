"""An endless stream of invented market data: a candle a minute for each symbol, and events in between."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Literal

SYMBOLS = ("ORVA", "KELT", "MIRU", "TSOL")
_OPENING_MINUTE = 9 * 60 + 30
_EVENT_SHARE = 0.06  # of minutes, for each symbol
_HALT_SHARE = 0.4  # of events, while the symbol trades

Kind = Literal["halted", "resumed", "guidance raised", "guidance cut", "dividend declared"]


@dataclass(frozen=True, slots=True)
class Candle:
    """One minute of one symbol; prices in cents, volume in shares."""

    minute: int
    symbol: str
    open: int
    high: int
    low: int
    close: int
    volume: int


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a symbol; between `halted` and `resumed` it has no candles."""

    minute: int
    symbol: str
    kind: Kind


Record = Candle | Event


def records(seed: int) -> Iterator[Record]:
    """The stream of a seed: prices walk at random, and each candle opens where the last one closed."""
    rng = random.Random(seed)
    closes = {symbol: rng.randint(2_000, 40_000) for symbol in SYMBOLS}
    halted: set[str] = set()
    for minute in count(_OPENING_MINUTE):
        for symbol in SYMBOLS:
            if rng.random() < _EVENT_SHARE:
                yield Event(minute, symbol, _kind(rng, symbol, halted))
            if symbol not in halted:
                candle = _candle(rng, minute, symbol, closes[symbol])
                closes[symbol] = candle.close
                yield candle


def _kind(rng: random.Random, symbol: str, halted: set[str]) -> Kind:
    if symbol in halted:
        halted.remove(symbol)
        return "resumed"
    if rng.random() < _HALT_SHARE:
        halted.add(symbol)
        return "halted"
    news: tuple[Kind, ...] = ("guidance raised", "guidance cut", "dividend declared")
    return rng.choice(news)


def _candle(rng: random.Random, minute: int, symbol: str, opened: int) -> Candle:
    step = max(opened // 200, 5)
    closed = max(opened + rng.randint(-step, step), 100)
    high = max(opened, closed) + rng.randint(0, step // 2)
    low = max(min(opened, closed) - rng.randint(0, step // 2), 50)
    return Candle(minute, symbol, opened, high, low, closed, 100 * rng.randint(1, 90))


def line(record: Record) -> str:
    """A record as a model reads it."""
    clock = f"{record.minute // 60:02}:{record.minute % 60:02} {record.symbol}"
    if isinstance(record, Event):
        return f"{clock} news: {record.kind}\n"
    prices = ((name, getattr(record, name)) for name in ("open", "high", "low", "close"))
    return f"{clock} {' '.join(f'{name} {price(cents)}' for name, cents in prices)} volume {record.volume}\n"


def price(cents: int) -> str:
    """A price as the stream and the answers write it."""
    return f"{cents // 100}.{cents % 100:02}"
