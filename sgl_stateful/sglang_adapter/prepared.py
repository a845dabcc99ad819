"""Names and sizes that every way to prepare a prompt shares."""

from __future__ import annotations

from typing import Any

REPORTS = "_sgl_stateful_reports"  # attribute of a prepared request: one report a prompt
MARKER = "{{memory}}"

_DEFAULT_RESERVE_TOKENS = 256


def reserve_tokens(sampling_params: dict[str, Any]) -> int:
    """Tokens to leave free for the answer."""
    wanted = sampling_params.get("max_new_tokens")
    return _DEFAULT_RESERVE_TOKENS if wanted is None else min(int(wanted), 4 * _DEFAULT_RESERVE_TOKENS)
