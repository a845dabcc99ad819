"""Sampling parameters in one form, so that two requests that sample alike are seen to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_OF_NO_EFFECT = frozenset({"stream_interval"})
_UNUSED_BY_GREEDY = frozenset({"top_p", "top_k", "min_p", "sampling_seed"})
_LISTS = frozenset({"stop", "stop_token_ids", "stop_regex"})
_ALL_TOKENS = ("top_k", -1)  # as callers write the default
_NO_LIMIT = "max_new_tokens"  # None is a value of its own there: as long as it gets


def canonical_sampling(params: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """JSON of what differs from the engine's defaults; equal for parameters of the same meaning.

    Parameters
    ----------
    params
        As a request has them.
    defaults
        What the engine takes for a field that is missing or null.
    """
    kept: dict[str, Any] = {}
    for name, value in params.items():
        if name in _OF_NO_EFFECT or (value is None and name != _NO_LIMIT) or (name, value) == _ALL_TOKENS:
            continue
        if name in _LISTS:
            value = _listed(value)
        if (name in _LISTS and not value) or (name in defaults and _same(value, defaults[name])):
            continue
        kept[name] = float(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if is_greedy(params):
        kept = {name: value for name, value in kept.items() if name not in _UNUSED_BY_GREEDY} | {"temperature": 0.0}
    return json.dumps(kept, sort_keys=True, separators=(",", ":"), default=str)


def is_greedy(params: Mapping[str, Any]) -> bool:
    """Whether decoding again gives the same answer."""
    return params.get("temperature") == 0 or params.get("top_k") == 1


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else sorted(value, key=str)


def _same(value: Any, default: Any) -> bool:
    return bool(value == default) and isinstance(value, bool) == isinstance(default, bool)
