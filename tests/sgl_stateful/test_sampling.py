"""Sampling parameters of session routes: what ``/generate`` refuses, these refuse, and what it overlooks besides."""

from typing import Any

import pytest

from sgl_stateful.errors import BadSessionRequest
from sgl_stateful.sglang_adapter.sampling import MAX_ANSWERS, check_sampling


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"max_new_tokens": 5, "temperature": 0, "stop": ["a", "b"], "stop_token_ids": [1, 2]},
        {"n": MAX_ANSWERS, "ignore_eos": True, "skip_special_tokens": False, "sampling_seed": 2**63 - 1},
        {"regex": "(", "stop_regex": ["a+", "b"], "logit_bias": {"7": -1.5}},
        {"custom_params": {"own": 1}, "max_new_tokens": None, "n": None},
    ],
)
def test_what_sglang_can_serve_passes(params: dict[str, Any]) -> None:
    check_sampling(params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"skip_special_tokens": 5}, "expected a boolean"),
        ({"ignore_eos": "x"}, "expected a boolean"),
        ({"no_stop_trim": 5}, "expected a boolean"),
        ({"spaces_between_special_tokens": "x"}, "expected a boolean"),
        ({"bogus": 1}, "unknown field `bogus`"),
        ({"temperature": "x"}, "expected f64"),
        ({"stop": 5}, "stop|StringOrList"),
        ({"n": 1.5}, "expected i64"),
        ({"n": [1]}, "expected i64"),
        ({"n": "2"}, "expected i64"),
        ({"n": True}, "expected i64"),
        ({"n": float("inf")}, "expected i64"),
        ({"n": 0}, r"n has to be in \[1, 128\], not 0"),
        ({"n": -1}, "not -1"),
        ({"n": MAX_ANSWERS + 1}, "not 129"),
        ({"n": 10**30}, "out of range"),
        ({"sampling_seed": 2**63}, "out of range"),
        ({"stop_token_ids": [10**30]}, "out of range"),
        ({"stop_regex": "("}, r"'\(' is no regular expression"),
        ({"stop_regex": ["a", "["]}, r"'\[' is no regular expression"),
        ({"custom_params": 5}, "has to be an object"),
        ({"custom_params": "x"}, "has to be an object"),
        ({"custom_params": []}, "has to be an object"),
        ({"custom_params": {"memory": {"owner": "ana"}}}, r"custom_params\.memory: this route has the session"),
        ({"custom_params": {"session": {"id": "s"}}}, r"custom_params\.session: this route has the session"),
    ],
)
def test_what_would_fail_later_is_refused_by_name(params: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSessionRequest, match=message):
        check_sampling(params)
