"""How much of what is known a request may begin with: held against decoding token by token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_stateful.flash.ahead import Ends, usable

LETTERS = ("a", "b", "ab", "ba", "c")  # the texts of tokens 0 to 4: a stop may begin and end within one


def decode(token_ids: Sequence[int]) -> str:
    return "".join(LETTERS[i] for i in token_ids)


def decoded(path: Sequence[int], ends: Ends, *, given: int) -> list[int]:
    """What an engine answers that goes along ``path`` and looks at each token but the first ``given`` for an end."""
    out = list(path[:given])
    for token_id in path[given:]:
        out.append(token_id)
        if token_id in ends.stop_ids or any(stop in decode(out) for stop in ends.stop) or len(out) >= ends.max_tokens:
            return out
    return out


@given(
    path=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    known=st.integers(0, 12),
    max_tokens=st.integers(1, 14),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=2),
    stop_ids=st.sets(st.integers(0, 4), max_size=1),
)
def test_an_answer_that_goes_on_is_the_answer(
    path: list[int], known: int, max_tokens: int, stop: list[str], stop_ids: set[int]
) -> None:
    ends = Ends(max_tokens, stop, stop_ids)
    ahead = path[: min(known, len(path) - 1)]  # there is always a token to come
    n = usable(ahead, ends, decode)
    assert 0 <= n <= len(ahead)
    assert decoded(path, ends, given=n) == decoded(path, ends, given=0)
    # Nothing is decoded again that need not be: with one more the end would be missed, or nothing is left to decode.
    if n < len(ahead):
        assert len(decoded(path, ends, given=0)) == n + 1


@pytest.mark.parametrize(
    ("ends", "n"),
    [
        (Ends(100), 6),
        (Ends(6), 5),
        (Ends(1), 0),
        (Ends(100, ["caa"]), 3),
        (Ends(100, ["zz", "ac"]), 1),
        (Ends(100, (), {4}), 1),
        (Ends(100, ["bab"], {1}), 5),
    ],
)
def test_by_hand(ends: Ends, n: int) -> None:
    assert usable([0, 4, 0, 2, 0, 1], ends, decode) == n  # a c a ab a b
