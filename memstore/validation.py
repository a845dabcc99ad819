"""What the store accepts: the one place that refuses input from outside."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from memstore.errors import InvalidFact, InvalidInput, InvalidOwner, InvalidQuery
from memstore.types import FactId, NewFact, OwnerId

MAX_OWNER_BYTES = 512
MAX_KEY_BYTES = 512
MAX_METADATA_DEPTH = 100

# Where the integers end that a float holds exactly, as every backend compares them.
_EXACT = 2**53


def validate_owner(owner: str) -> OwnerId:
    """Return `owner` as an `OwnerId`, or raise `InvalidOwner`."""
    size_bytes = _storable("owner", owner, InvalidOwner)
    if not size_bytes:
        raise InvalidOwner("owner is empty: name whose facts these are")
    if size_bytes > MAX_OWNER_BYTES:
        raise InvalidOwner(f"owner has {size_bytes} bytes in UTF-8, more than {MAX_OWNER_BYTES}: use a shorter key")
    return OwnerId(owner)


def is_reserved(owner: str) -> bool:
    """Whether no caller can have this owner: servers keep KV of their own under it, which stands for no fact."""
    return "\0" in owner


def validate_fact(fact: NewFact, *, now: float) -> None:
    """Raise `InvalidFact` unless every field of `fact` can be stored and read back unchanged."""
    _storable("text", fact.text, InvalidFact)
    if not fact.text.strip():
        raise InvalidFact("text is empty: a fact needs at least one visible character")
    _storable("stream", fact.stream, InvalidFact)
    for name, value in (("speaker", fact.speaker), ("time", fact.time)):
        if value is not None:
            _storable(name, value, InvalidFact)
    encode_metadata(fact.metadata)
    validate_expiry(fact.expires_at, now=now)


def validate_expiry(expires_at: float | None, *, now: float) -> None:
    """Raise `InvalidFact` unless `expires_at` is None or a time after `now`, in Unix seconds."""
    if expires_at is None:
        return
    is_number = isinstance(expires_at, int | float) and not isinstance(expires_at, bool)
    if not is_number or not abs(expires_at) <= _EXACT:
        shown = repr(expires_at) if isinstance(expires_at, float) else f"of type {type(expires_at).__name__}"
        raise InvalidFact(f"expires_at is {shown}: pass Unix seconds up to 2**53, or None to keep the fact")
    if expires_at <= now:
        raise InvalidFact(f"expires_at is {expires_at!r}, which has passed: the fact would be gone at once")


def validate_key(key: str) -> str:
    """Return an idempotency key, or raise `InvalidInput`."""
    size_bytes = _storable("idempotency key", key, InvalidInput)
    if not 0 < size_bytes <= MAX_KEY_BYTES:
        raise InvalidInput(f"idempotency key has {size_bytes} bytes in UTF-8: use 1 to {MAX_KEY_BYTES}")
    return key


def encode_metadata(metadata: Mapping[str, object]) -> str:
    """Return `metadata` as JSON text.

    Raises
    ------
    InvalidFact
        Where it is no object, or JSON would change it (NaN, tuples, keys that are no strings, lone surrogates).
    """
    if not isinstance(metadata, Mapping):
        raise InvalidFact(f"metadata is a {type(metadata).__name__}: pass a JSON object")
    plain = dict(metadata)
    if _is_deeper(plain, MAX_METADATA_DEPTH):
        raise InvalidFact(f"metadata is nested deeper than {MAX_METADATA_DEPTH}: flatten it")
    try:
        text = json.dumps(plain, ensure_ascii=False, allow_nan=False)
        text.encode()
        unchanged = json.loads(text) == plain
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidFact(f"metadata is not JSON: {error}") from error
    if not unchanged:
        raise InvalidFact("metadata would be changed by JSON: use string keys, and lists instead of tuples")
    return text


def possible_ids(fact_ids: Sequence[str]) -> list[FactId]:
    """Return those of `fact_ids` that can be the id of a fact: the others are as unknown as an id that nobody has."""
    return [FactId(fact_id) for fact_id in fact_ids if isinstance(fact_id, str) and _is_text(fact_id)]


def validate_stream(stream: str | None) -> str | None:
    """Return a stream to look at, None for all, or raise `InvalidQuery`."""
    if stream is not None:
        _storable("stream", stream, InvalidQuery)
    return stream


def validate_query(query: str, *, k: int, min_score: float | None) -> int:
    """Return `k` as `validate_count` does; raise `InvalidQuery` unless all of it asks for something."""
    _storable("query", query, InvalidQuery)
    if not query.strip():
        raise InvalidQuery("query is empty: there is nothing to compare facts with")
    if min_score is not None and not (isinstance(min_score, int | float) and not math.isnan(min_score)):
        raise InvalidQuery(f"min_score is {min_score!r}: pass a score in [-1, 1] or None")
    return validate_count("k", k)


def validate_count(name: str, value: int) -> int:
    """Return `value`, at most 2**53, more than any store counts; `InvalidQuery` unless an integer of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidQuery(f"{name} is {value!r}: pass an integer of at least 0")
    return min(value, _EXACT)


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _storable(name: str, value: str, refusal: type[InvalidInput]) -> int:
    """Return the size of `value` in bytes of UTF-8, or raise `refusal`."""
    if not isinstance(value, str):
        raise refusal(f"{name} is a {type(value).__name__}: pass a string")
    if "\0" in value:
        raise refusal(f"{name} holds a NUL character at {value.index(chr(0))}: remove it")
    try:
        return len(value.encode())
    except UnicodeEncodeError as error:
        raise refusal(f"{name} holds a lone surrogate at {error.start}: it is not text in any encoding") from error


def _is_deeper(value: object, depth: int) -> bool:
    """Return whether containers are nested more than `depth` times in `value`, which is one."""
    # A limit of our own, since that of Python depends on how deep the caller is.
    level: list[Any] = [value]
    for _ in range(depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
            if isinstance(inner, Mapping | list | tuple)
        ]
        if not level:
            return False
    return True
