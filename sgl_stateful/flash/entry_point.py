"""What the next request to a session will begin with: an entry, which is prefilled and decoded ahead of the request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from sgl_stateful.errors import BadFlashRequest

from .question import Question
from .sampling import canonical_sampling, is_greedy

MOST_STOPS = 16
_AT_THE_END = frozenset({"max_new_tokens", "no_stop_trim", "stop", "stop_token_ids"})
_KEPT = frozenset({"ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "temperature"})


@dataclass(frozen=True, slots=True)
class EntryPoint(Question):
    """An entry of a session.

    Attributes
    ----------
    max_tokens
        How many are decoded ahead at most; 0: it is prefilled alone.
    until, until_ids
        Texts and token ids with which the decision point is reached: nothing is decoded ahead beyond the first of them.
    sampling
        As ``decoding_path`` has it: two entries of the same tokens that differ in their length alone are one.

    Raises
    ------
    BadFlashRequest
        Its sampling cannot be gone on with, it has choices and decodes nothing, or too many ends.
    """

    LEAST_TOKENS: ClassVar[int] = 0

    until: tuple[str, ...] = ()
    until_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        Question.__post_init__(self)  # super() does not know a class with slots
        if not self.is_greedy:
            raise BadFlashRequest("sampling_params.temperature has to be 0: what is decoded ahead has to be the answer")
        if self.choices and self.max_tokens == 0:
            raise BadFlashRequest(
                "choices need max_tokens: the next token's distribution is of a token that is decoded"
            )
        if len(self.until) + len(self.until_ids) > MOST_STOPS or not all(self.until):
            raise BadFlashRequest(f"until: up to {MOST_STOPS} texts and token ids, none of them empty")

    @property
    def has_until(self) -> bool:
        """Whether there is a decision point before ``max_tokens``."""
        return bool(self.until or self.until_ids)


def decoding_path(sampling: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """What of sampling parameters decides which tokens come, as JSON; equal where one answer may go on with the other.

    Where an answer ends, by its length or at a stop, is not part of it.
    """
    return canonical_sampling({k: v for k, v in sampling.items() if k not in _AT_THE_END}, defaults)


def check_sampling_ahead(sampling: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse sampling parameters whose state a request could not take over in the middle of an answer.

    Raises
    ------
    BadFlashRequest
    """
    if not is_greedy(sampling):
        return  # refused by the entry itself
    for name, value in sampling.items():
        if name in _AT_THE_END or name in _KEPT:
            continue
        if canonical_sampling({"temperature": 0.0, name: value}, defaults) != canonical_sampling(
            {"temperature": 0.0}, defaults
        ):
            raise BadFlashRequest(f"sampling_params.{name} cannot be combined with decoding ahead")
