import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore import EncodingId
from sgl_stateful.directive import (
    DIRECTIVE_KEY,
    Capture,
    CaptureItem,
    Directive,
    KeepProbe,
    Span,
    Splice,
    dump_directive,
    parse_directive,
)


@st.composite
def ascending_spans(draw: st.DrawFn) -> tuple[Span, ...]:
    edges = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=8))
    spans, at = [], 0
    for number, (gap, length, offset) in enumerate(edges):
        spans.append(Span(EncodingId(f"{number:032x}"), at + gap, at + gap + length, offset))
        at = spans[-1].end
    return tuple(spans)


json_values = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8)
items = st.builds(
    CaptureItem,
    st.builds(Span, st.text("0123456789abcdef", max_size=32), st.integers(0, 99), st.integers(100, 199)),
    st.dictionaries(st.text(max_size=5), json_values | st.lists(json_values, max_size=3), max_size=4),
)
directives = (
    st.builds(Splice, ascending_spans(), st.none() | st.text(max_size=8))
    | st.builds(Capture, st.lists(items, max_size=4).map(tuple), st.booleans())
    | st.builds(KeepProbe, st.text(max_size=8), st.integers(0, 99), st.integers(100, 199))
)


@given(directives)
def test_a_directive_comes_back_from_custom_params(directive: Directive) -> None:
    travelled = json.loads(json.dumps({DIRECTIVE_KEY: dump_directive(directive), "caller": 1}))
    assert isinstance(travelled[DIRECTIVE_KEY], str), "SGLang lets one level of values through"
    assert parse_directive(travelled) == directive


@pytest.mark.parametrize("custom_params", [None, {}, {"memory": {}}, {DIRECTIVE_KEY: None}, [], "sgl_stateful", 7])
def test_requests_without_a_directive(custom_params: Any) -> None:
    assert parse_directive(custom_params) is None


def splice_of(*bounds: tuple[int, int]) -> dict[str, str]:
    return {DIRECTIVE_KEY: json.dumps({"op": "splice", "spans": [["aa", start, end, 0] for start, end in bounds]})}


def test_spans_may_touch_or_leave_gaps() -> None:
    splice = parse_directive(splice_of((3, 5), (5, 9), (20, 21)))
    assert isinstance(splice, Splice)
    assert (splice.start, splice.end, [len(span) for span in splice.spans]) == (3, 21, [2, 4, 1])


@pytest.mark.parametrize("bounds", [((3, 6), (5, 9)), ((5, 9), (3, 5)), ((3, 6), (3, 6))])
def test_spans_that_overlap_or_descend_are_our_own_mistake(bounds: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(AssertionError, match="overlap"):
        parse_directive(splice_of(*bounds))


def test_a_splice_of_nothing_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="without spans"):
        parse_directive(splice_of())


def test_an_unknown_operation_is_named() -> None:
    with pytest.raises(AssertionError, match="'melt'"):
        parse_directive({DIRECTIVE_KEY: '{"op":"melt"}'})
