"""A question as it is registered, and in the form in which it is recognised."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sgl_stateful.errors import BadFlashRequest, EmptyFlashQuestion
from sgl_stateful.params import MemoryParams
from sgl_stateful.sessions.content import Content

from .choices import Choice
from .sampling import is_greedy
from .slots import Value
from .wording import Wording

DEFAULT_TOKENS, MOST_TOKENS = 32, 256
DEFAULT_THRESHOLD = 0.9
LONGEST_INTERVAL_MS = 86_400_000
MOST_PRIORITY = 100

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_RESERVED = frozenset({"events"})  # a route of its own


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a question, before and after the place of memory facts."""

    head: tuple[int, ...]
    tail: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.head) + len(self.tail)


@dataclass(frozen=True, slots=True)
class Ask:
    """What makes two requests to one session the same question.

    Attributes
    ----------
    sampling
        As ``canonical_sampling`` has it.
    memory
        ``MemoryParams`` as JSON; empty without any.
    """

    prompt: Prompt
    sampling: str
    memory: str = ""


def memory_key(memory: MemoryParams | None) -> str:
    """The memory parameters of a request, as ``Ask`` has them."""
    return "" if memory is None else memory.model_dump_json()


@dataclass(frozen=True, slots=True)
class Question:
    """A question of a session.

    Attributes
    ----------
    content, data
        As registered: a template, and what fills its slots.
    behind, first
        Token ids behind what a session holds, and in one that holds nothing.
    query
        What facts are searched for unless ``memory`` says so.
    sampling_params, sampling
        What the engine is sent, and the same in the form that is compared.
    target
        Of the gate of its choices; None: every answer is decoded.
    audit_target
        Share of the served answers that have to agree with decoding again.
    semantic
        Least similarity of other words that are taken for it; None: none are.
    wording
        Its words, as they are compared with others'.

    Raises
    ------
    BadFlashRequest
        The name, or a number, is out of range, or there is a gate without choices.
    EmptyFlashQuestion
    """

    LEAST_TOKENS: ClassVar[int] = 1

    name: str
    content: Content
    behind: Prompt
    first: Prompt
    sampling_params: Mapping[str, Any]
    sampling: str
    data: Mapping[str, Value] = field(default_factory=dict)
    max_tokens: int = DEFAULT_TOKENS
    choices: tuple[Choice, ...] = ()
    min_interval_ms: int = 0
    priority: int = 0
    target: float | None = None
    audit_target: float = 0.95
    memory: MemoryParams | None = None
    query: str = ""
    semantic: float | None = None
    wording: Wording | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_name(self.name)
        _in_range("max_tokens", self.max_tokens, self.LEAST_TOKENS, MOST_TOKENS)
        _in_range("min_interval_ms", self.min_interval_ms, 0, LONGEST_INTERVAL_MS)
        _in_range("priority", self.priority, -MOST_PRIORITY, MOST_PRIORITY)
        for name, share in (("gate.target", self.target), ("audit_target", self.audit_target)):
            if share is not None and not 0 < share < 1:
                raise BadFlashRequest(f"{name} has to lie between 0 and 1, not {share:g}")
        if self.target is not None and not self.choices:
            raise BadFlashRequest("a gate needs choices: it is about the gap between the best two of them")
        if self.semantic is not None:
            self._check_semantic(self.semantic)
        if not self.behind or not self.first:
            raise EmptyFlashQuestion("there is no question: it has no tokens")

    def _check_semantic(self, threshold: float) -> None:
        if not 0 < threshold <= 1:
            raise BadFlashRequest(f"semantic.threshold has to lie above 0 and not above 1, not {threshold:g}")
        if not self.is_greedy:
            raise BadFlashRequest("semantic matching needs greedy answers: others cannot be audited")
        if self.memory is not None:
            raise BadFlashRequest("semantic matching cannot be had with memory: other words find other facts")

    def ask(self, *, is_first: bool) -> Ask:
        """How it is recognised."""
        return Ask(self.first if is_first else self.behind, self.sampling, memory_key(self.memory))

    @property
    def is_greedy(self) -> bool:
        """Whether decoding again gives the same answer, so that it can be audited."""
        return is_greedy(self.sampling_params)

    @property
    def label_ids(self) -> list[int]:
        """First tokens of the choices."""
        return [choice.token_ids[0] for choice in self.choices]

    def depends_on(self, fact_id: str | None) -> bool:
        """Whether a fact of the owner that is new (None), changed or gone may lead to another prompt."""
        if self.memory is None or self.memory.mode == "off":
            return False
        return self.memory.facts is None or fact_id in self.memory.facts


def check_name(name: str) -> None:
    """Refuse a name that cannot be a part of a path, or is a route's."""
    if not _NAME.fullmatch(name) or name in _RESERVED:
        raise BadFlashRequest(
            "name: up to 64 letters, digits, '.', '_' and '-', of which the first is no '.' or '-', and not"
            f" {' or '.join(sorted(_RESERVED))}"
        )


def _in_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise BadFlashRequest(f"{name} has to lie in [{least}, {most}], not {value}")
