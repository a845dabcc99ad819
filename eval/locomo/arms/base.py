"""The seam between a run and what answers its questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from locomo.dataset import Conversation
from locomo.reporting.arm_names import ArmName
from locomo.retrieval.units import Unit

OnProgress = Callable[[int, int], None]
"""Called with what is done and what there is in all."""


class Selection(StrEnum):
    """Which units an arm serves, and in which order."""

    NOTHING = "nothing"
    EVERYTHING = "everything"
    RETRIEVED = "retrieved"
    EVIDENCE = "evidence"
    SHUFFLED = "shuffled"
    SWAPPED = "swapped"


@dataclass(frozen=True, slots=True)
class Served:
    """What one arm puts before the model for one question.

    Attributes
    ----------
    units
        Ids of the units, in the order of the prompt.
    placement
        ``tail``: in the last user message, before the question; ``head``: at the end of the system message.
    policy
        Encoding policy that is spliced; None prefills the units as text.
    repair
        Which tokens of spliced units are computed anew, as the server takes it; None leaves it to the server.
    """

    units: tuple[str, ...]
    placement: str
    policy: str | None
    repair: str | None = "none"


TIERS = ("spliced", "repaired", "partial", "exact", "text", "none")
"""How units got into a prompt, from what a spliced arm asks for to nothing.

``spliced``: all from their encodings; ``repaired``: so, but for the tokens that were to be computed anew; ``partial``:
some from their encodings, and others, that had none, prefilled as text; ``exact``: all from the cache of an earlier
prefill of the same prompt; ``text``: all prefilled.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """One decoded answer.

    Attributes
    ----------
    used
        Ids of the units that were in the prompt, in its order.
    tier
        How they got there, one of `TIERS`.
    reason
        Why they did not get there as asked; None where they did.
    dropped
        How many units were left out because the prompt would have been too long.
    tokens
        ``prompt``, ``prefilled`` and ``spliced`` tokens.
    ttft_ms
        From sending the request to the first token.
    ms
        Parts of that time by the server's word.
    prompt_ids
        Token ids of the prompt, units included; empty where the system does not tell.
    """

    text: str
    used: tuple[str, ...]
    tier: str
    reason: str | None
    tokens: dict[str, int]
    ttft_ms: float
    ms: dict[str, float]
    prompt_ids: tuple[int, ...] = ()
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Scored:
    """One continuation, forced behind a prompt.

    Attributes
    ----------
    logprobs
        Nats, one for each of its tokens.
    distributions
        The next-token distribution at each of its tokens, as far as it was asked for: token id to log probability.
    tier, reason, tokens
        Of the units in this request's prompt, as in `Answer`.
    """

    logprobs: tuple[float, ...]
    distributions: tuple[dict[int, float], ...] = field(default=())
    tier: str = "none"
    reason: str | None = None
    tokens: dict[str, int] = field(default_factory=dict)

    @property
    def nll(self) -> float:
        """Mean nats per token."""
        assert self.logprobs, "a continuation without a token"
        return -sum(self.logprobs) / len(self.logprobs)


class System(Protocol):
    """Answers questions about one conversation at a time, with the units that it is told to use.

    Raises
    ------
    RequestRefused
        From every call: it is refused for what it says, such as a prompt that is too long; others may be answered.
    ServerFailed
        From every call: the server cannot be reached, or fails whatever it is asked.
    """

    def why_not(self, arm: ArmName) -> str | None:
        """Why this system cannot serve an arm; None where it can."""
        ...

    def describe(self) -> dict[str, Any]:
        """What a reader of the results must know of the model and its server; ``embedder`` names what embeds units."""
        ...

    def check(self) -> None:
        """Raise `ServerFailed` where not even a short prompt would be answered."""
        ...

    def encodings(self) -> dict[str, dict[str, float]]:
        """What encoding has cost this server since it started, by policy; empty where nothing is encoded.

        By name ``facts``, ``fact_tokens``, ``tokens_prefilled`` and ``bytes``.
        """
        ...

    def open(self, conversation: Conversation, units: Sequence[Unit], on_progress: OnProgress) -> None:
        """Take in the units of a conversation; every later call is about it."""
        ...

    def retrieve(self, question: str, k: int) -> list[str]:
        """Ids of the units nearest to a question, best first, at most ``k``."""
        ...

    def forget(self) -> None:
        """Drop what earlier prompts have left in caches."""
        ...

    def answer(self, question: str, served: Served) -> Answer:
        """Decode an answer."""
        ...

    def score(
        self, question: str, served: Served, continuations: Sequence[str], *, prompt: Answer, top: int
    ) -> list[Scored] | None:
        """Force each continuation behind the prompt; ``top`` tokens of each distribution of the first one.

        ``prompt`` is the answer that this system gave to the same prompt, whose units are kept to. The first one alone
        where another does not fit behind them; None where the system has no log probabilities to give.
        """
        ...
