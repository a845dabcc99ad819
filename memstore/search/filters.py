"""Which facts a search may return: filters over stream, speaker, event time and metadata.

A filter is a JSON object whose clauses must all hold::

    {"stream": "chat-7", "speaker": {"in": ["Ana", None]}, "time": {"gte": "2023-05-01", "lt": "2023-06-01"},
     "metadata.rating": {"gt": 3}}

A bare scalar asks for equality as JSON has it: 1 and 1.0 are equal, 1, True and "1" are not. `{"in": [...]}` asks for
one of several, `{"gt" | "gte" | "lt" | "lte": bound}` for a range, of event times or of numbers in metadata. What comes
after the first dot of `metadata.KEY` is one key of the metadata object, dots included. A fact without that key, or with
a list or an object there, fails every clause about it; None asks for a null that is there, or for no speaker.

Times are written as `memstore.event_time` reads them. A date without a time of day is that whole day of UTC:
`{"lte": "2023-05-08"}` includes it, `{"gt": "2023-05-08"}` begins behind it, equality is any moment of it. A fact that
has no event time fails every clause about time.
"""

import math
from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from sys import intern
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memstore.errors import InvalidQuery
from memstore.event_time import Period, parse_period
from memstore.types import Fact

Number: TypeAlias = int | float
Scalar: TypeAlias = str | int | float | bool | None
Int64s: TypeAlias = npt.NDArray[np.int64]
Seqs: TypeAlias = "array[int]"
Key: TypeAlias = str | int | float | tuple[bool] | None
"""A scalar so that dict lookup is JSON equality: a bool, which Python takes for a number, is wrapped."""

_METADATA = "metadata."
_FIELDS = "stream, speaker, time, metadata.KEY"
_BOUNDS = ("gt", "gte", "lt", "lte")
# From so many changes at once, sorting anew when next asked is cheaper than keeping the order.
_PAIR_BYTES = 190
_BULK = 1000


@dataclass(frozen=True, slots=True)
class OneOf:
    """The value of the field is one of `keys`."""

    field: str
    keys: frozenset[Key]


@dataclass(frozen=True, slots=True)
class NumberRange:
    """`low <= x < high`, where `above_low` and `with_high` move an end to behind its own value."""

    low: Number = -math.inf
    high: Number = math.inf
    above_low: bool = False
    with_high: bool = True


@dataclass(frozen=True, slots=True)
class InRanges:
    """The value of the field is a number in one of `ranges`."""

    field: str
    ranges: tuple[NumberRange, ...]


@dataclass(frozen=True, slots=True)
class FactFilter:
    """Clauses that must all hold."""

    clauses: tuple[OneOf | InRanges, ...]


class AttributeIndex:
    """What the facts of one owner can be filtered by, in memory; not thread-safe.

    Equality reads inverted lists, a range the values of its field in order. Those are sorted when a range of that field
    is first asked for, and kept so.
    """

    def __init__(self) -> None:
        self._scalars: dict[int, tuple[tuple[str, Key], ...]] = {}
        # Ascending, in both.
        self._seqs: dict[str, dict[Key, Seqs]] = {}
        self._numbers: dict[str, _Numbers] = {}
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._scalars)

    @property
    def nbytes(self) -> int:
        """Memory of the index, about."""
        return self._nbytes

    def add(self, facts: Sequence[Fact]) -> None:
        """Add `facts`; one whose seq is present takes its place, also within one call."""
        latest = {fact.seq: fact for fact in facts}
        self.remove(list(latest))
        self._expect(len(latest))
        for seq, fact in latest.items():
            self._scalars[seq] = tuple(_scalars(fact))
            self._nbytes += _num_bytes(self._scalars[seq])
            for field, key in self._scalars[seq]:
                insort(self._seqs.setdefault(field, {}).setdefault(key, array("q")), seq)
                if field in self._numbers and isinstance(key, int | float):
                    self._numbers[field].add(key, seq)

    def remove(self, seqs: Sequence[int]) -> None:
        """Remove the facts of `seqs`, where present."""
        present = self._scalars.keys() & seqs
        self._expect(len(present))
        for seq in present:
            scalars = self._scalars.pop(seq)
            self._nbytes -= _num_bytes(scalars)
            for field, key in scalars:
                having = self._seqs[field][key]
                del having[bisect_left(having, seq)]
                if not having:
                    del self._seqs[field][key]
                if field in self._numbers and isinstance(key, int | float):
                    self._numbers[field].remove(key, seq)

    def matching(self, wanted: FactFilter) -> Int64s:
        """Return the seqs of the facts that meet every clause, ascending, `[num_matching]`."""
        met = sorted((self._meeting(clause) for clause in wanted.clauses), key=len)
        seqs = met[0]
        for others in met[1:]:
            if len(seqs):
                seqs = seqs[others[np.searchsorted(others, seqs).clip(max=len(others) - 1)] == seqs]
        return seqs

    def _expect(self, num_changes: int) -> None:
        if num_changes >= _BULK:
            self._numbers.clear()

    def _meeting(self, clause: OneOf | InRanges) -> Int64s:
        having = self._seqs.get(clause.field, {})
        if isinstance(clause, OneOf):
            # A fact has one value, so nothing is there twice.
            return _merged([having[key] for key in clause.keys if key in having])
        if clause.field not in self._numbers:
            self._numbers[clause.field] = _Numbers(having)
        parts = [self._numbers[clause.field].within(bounds) for bounds in clause.ranges]
        return _merged(parts) if len(parts) == 1 else np.unique(_merged(parts))


class _Numbers:
    """The numbers that one field has, ascending, and whose they are."""

    def __init__(self, having: Mapping[Key, Seqs]) -> None:
        keys = sorted(key for key in having if isinstance(key, int | float))
        self._values: list[Number] = [key for key in keys for _ in having[key]]
        self._seqs = array("q", chain.from_iterable(having[key] for key in keys))

    def add(self, value: Number, seq: int) -> None:
        position = bisect_right(self._values, value)
        self._values.insert(position, value)
        self._seqs.insert(position, seq)

    def remove(self, value: Number, seq: int) -> None:
        position = self._seqs.index(seq, bisect_left(self._values, value), bisect_right(self._values, value))
        del self._values[position], self._seqs[position]

    def within(self, bounds: NumberRange) -> Seqs:
        """Return whose numbers are in `bounds`, in no order."""
        start = (bisect_right if bounds.above_low else bisect_left)(self._values, bounds.low)
        end = (bisect_right if bounds.with_high else bisect_left)(self._values, bounds.high)
        return self._seqs[start:end]


def _num_bytes(scalars: Sequence[tuple[str, Key]]) -> int:
    # The pair, its place in the lists and, where no other fact has the value, a list of its own: measured over 100,000
    # facts.
    return sum(_PAIR_BYTES + (len(key) if isinstance(key, str) else 0) for _, key in scalars)


def _merged(parts: Sequence[Seqs]) -> Int64s:
    """Return what is in `parts`, ascending."""
    return np.sort(np.frombuffer(b"".join(parts), dtype=np.int64))


def _scalars(fact: Fact) -> Iterable[tuple[str, Key]]:
    """Yield every (field, value) of `fact` that a filter can ask for."""
    yield "stream", fact.stream
    yield "speaker", fact.speaker
    if fact.event_at is not None:
        yield "time", fact.event_at
    for name, value in fact.metadata.items():
        if value is None or isinstance(value, str | int | float):
            yield intern(_METADATA + name), _key(value)


def parse_filter(where: Mapping[str, object] | None) -> FactFilter | None:
    """Return `where` as a filter, None where it asks for nothing.

    Raises
    ------
    InvalidQuery
        Naming the clause, what is wrong with it, and what is known.
    """
    if where is None:
        return None
    if not isinstance(where, Mapping):
        raise InvalidQuery(f"where is a {type(where).__name__}: pass an object of clauses over {_FIELDS}")
    clauses = tuple(_clause(field, condition) for field, condition in where.items())
    return FactFilter(clauses) if clauses else None


def _clause(field: str, condition: object) -> OneOf | InRanges:
    _check_field(field)
    if not isinstance(condition, Mapping):
        return _one_of(field, [condition])
    unknown = [name for name in condition if name not in ("in", *_BOUNDS)]
    if unknown or not condition:
        what = f"knows no {unknown[0]!r}" if unknown else "is empty"
        raise InvalidQuery(f"the clause of {field!r} {what}: use a scalar, in, or any of {', '.join(_BOUNDS)}")
    if "in" not in condition:
        return InRanges(field, (_range(field, condition),))
    values = condition["in"]
    if len(condition) > 1:
        raise InvalidQuery(f"the clause of {field!r} has more than its in: a list needs no bounds")
    if not isinstance(values, list | tuple):
        raise InvalidQuery(f"in of {field!r} is a {type(values).__name__}: pass a list of scalars")
    return _one_of(field, values)


def _check_field(field: object) -> None:
    if field in ("stream", "speaker", "time") or (isinstance(field, str) and field.startswith(_METADATA)):
        return
    hint = f"; for a metadata key write 'metadata.{field}'" if field != "metadata" else ", with the key behind the dot"
    raise InvalidQuery(f"there is no field {field!r} to filter by: known are {_FIELDS}{hint}")


def _one_of(field: str, values: Iterable[object]) -> OneOf | InRanges:
    if field == "time":
        periods = [_period(value) for value in values]
        return InRanges(field, tuple(NumberRange(start, end, with_high=False) for start, end in periods))
    return OneOf(field, frozenset(_operand(field, value) for value in values))


def _operand(field: str, value: object) -> Key:
    if field == "stream" and not isinstance(value, str):
        raise InvalidQuery(f"stream is compared with {value!r}: pass a string")
    if field == "speaker" and not isinstance(value, str | None):
        raise InvalidQuery(f"speaker is compared with {value!r}: pass a string, or None for no speaker")
    if not isinstance(value, str | int | float | None):
        raise InvalidQuery(f"{field!r} is compared with a {type(value).__name__}: pass a scalar, or in with scalars")
    if not _is_json(value):
        raise InvalidQuery(f"{field!r} is compared with {value!r}, which no JSON value equals")
    return _key(value)


def _is_json(value: Scalar) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _key(value: Scalar) -> Key:
    return (value,) if isinstance(value, bool) else value


def _range(field: str, bounds: Mapping[str, object]) -> NumberRange:
    """Return what all of `bounds` allow."""
    if field in ("stream", "speaker"):
        raise InvalidQuery(f"{field} is text and has no ranges: use a string or in")
    # As (value, whether behind it); of two bounds on one side the tighter one counts.
    lows: list[tuple[Number, bool]] = [(-math.inf, False)]
    highs: list[tuple[Number, bool]] = [(math.inf, True)]
    for name, operand in bounds.items():
        side, behind = (lows, name == "gt") if name in ("gt", "gte") else (highs, name == "lte")
        if field == "time":
            period = _period(operand)
            side.append((period.end if behind else period.start, False))
        elif isinstance(operand, bool) or not isinstance(operand, int | float) or not _is_json(operand):
            raise InvalidQuery(f"{name} of {field!r} is {operand!r}: ranges of metadata compare finite numbers")
        else:
            side.append((operand, behind))
    (low, above_low), (high, with_high) = max(lows), min(highs)
    return NumberRange(low, high, above_low=above_low, with_high=with_high)


def _period(text: object) -> Period:
    period = parse_period(text) if isinstance(text, str) else None
    if period is None:
        raise InvalidQuery(
            f"time is compared with {text!r}, which names no one day: write '2023-05-08', '2023-05-08T13:56:00Z' or "
            "'8 May 2023', with year, month and day"
        )
    return period
