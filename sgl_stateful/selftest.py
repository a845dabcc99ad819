"""The start-up self-test: a spliced fact must equal full prefill where it can, on the model that is loaded.

Layer 0 does not depend on context, so keys and values of a spliced fact must equal those of full prefill there, to
the rounding of the KV pool, and of int8 where facts are kept so. Deeper layers depend on what the encoding saw; there
the distribution of the next token is compared, and reported.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memstore import EncodingId, Fact, FactId, OwnerId
from sgl_stateful.directive import Capture, CaptureItem, KeepProbe, Span, Splice
from sgl_stateful.encoding.codec import FactCodec
from sgl_stateful.engine_port import EnginePort
from sgl_stateful.errors import UnverifiedSplice
from sgl_stateful.settings import KVStorage

SELF_TEST_OWNER = OwnerId("\x00self-test")  # no caller can have it: the store refuses NUL
_TOP = 1000
_TEXTS = (
    "The library card of Teodora expires on the third of March.",
    "Bram's bakery opens at six and closes when the bread is gone.",
    "The blue kayak belongs to Ines; the red one is rented out.",
    "Their dentist moved to number 14, above the flower shop.",
)
_QUESTION = "Who owns the blue kayak?\n"
# Rounding to the pool's dtype happens once in full prefill, and three times on the way through an encoding.
_TOLERANCE = {"float32": 1e-5, "bfloat16": 2 * 2.0**-8, "float16": 2 * 2.0**-11}
# Of int8, a scale is the largest magnitude of a channel before rotation divided by 127. With M the largest one behind
# it, the former is at most sqrt(2) M, both numbers of a pair are off by half a scale, and turning adds these up to
# sqrt(2) times as much. Values, which do not turn, are off by half of that at most.
_INT8_TOLERANCE = 1 / 127


@dataclass(frozen=True, slots=True)
class SelfTestVerdict:
    """Outcome of the self-test. Errors are relative to the largest magnitude of the same tensor."""

    passed: bool
    k_error: float
    v_error: float
    tolerance: float
    kl: float
    spliced_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """For ``/v1/memory/status``."""
        return dataclasses.asdict(self)


def kl_divergence(reference: Mapping[int, float], other: Mapping[int, float]) -> float:
    """KL(reference || other) in nats, from log probabilities of the most likely tokens of each side.

    What either side does not list is pooled into one outcome, which can only make the result smaller.
    """
    shared = reference.keys() & other.keys()
    total = sum(math.exp(reference[i]) * (reference[i] - other[i]) for i in shared)
    rest_p = max(1.0 - sum(math.exp(reference[i]) for i in shared), 0.0)
    rest_q = max(1.0 - sum(math.exp(other[i]) for i in shared), 1e-12)
    return total + (rest_p * math.log(rest_p / rest_q) if rest_p > 0 else 0.0)


async def run_self_test(
    engine: EnginePort, codec: FactCodec, *, salt: str, dtype: str, storage: KVStorage
) -> SelfTestVerdict:
    """Encode probe facts, serve them once by full prefill and once spliced elsewhere, and compare.

    Parameters
    ----------
    dtype
        Of the KV pool: ``float32``, ``bfloat16`` or ``float16``.
    storage
        How facts' KV is kept.

    Raises
    ------
    UnverifiedSplice
        The scheduler did not splice the probe at all; the message holds what it answered.
    """
    facts = [codec.encode_fact(_fact(i, text)) for i, text in enumerate(_TEXTS)]
    context = list(codec.context)

    captured, spans = context + list(facts[0].token_ids), []
    items: list[CaptureItem] = []
    for fact in facts[1:]:
        span = Span(EncodingId(f"{1:032x}{len(items):02x}"), len(captured), len(captured) + len(fact.token_ids))
        captured += fact.token_ids
        items.append(CaptureItem(span, _describe(codec, fact.fact, span)))
    await engine.prefill(captured, salt=f"{salt}:capture", directive=Capture(tuple(items), publish=False))

    prompt = list(context)
    for item, fact in zip(reversed(items), reversed(facts[1:]), strict=True):
        spans.append(Span(item.span.encoding_id, len(prompt), len(prompt) + len(fact.token_ids)))
        prompt += fact.token_ids
    start, end = spans[0].start, spans[-1].end
    prompt += codec.encode_text(_QUESTION)

    keep = KeepProbe("self-test", start, end)
    exact = await engine.prefill(prompt, salt=f"{salt}:exact", directive=keep, top_logprobs=_TOP)
    # The one in the middle is left out: it must be computed in place, behind the one before it.
    served = (spans[0], *spans[2:])
    spliced = await engine.prefill(prompt, salt=salt, directive=Splice(served, probe="self-test"), top_logprobs=_TOP)
    found = spliced.scheduler
    if found.get("spliced_tokens", 0) == 0 or "k_error" not in found:
        raise UnverifiedSplice(f"the scheduler did not splice the self-test's facts: {dict(found)}")
    await engine.control("drop", {"encoding_ids": [span.encoding_id for span in spans]})
    tolerance = _TOLERANCE[dtype] + (_INT8_TOLERANCE if storage == KVStorage.INT8 else 0)
    return _verdict(found, kl_divergence(exact.top_logprobs, spliced.top_logprobs), tolerance)


def _verdict(found: Mapping[str, Any], kl: float, tolerance: float) -> SelfTestVerdict:
    # A model whose layer 0 is zero everywhere is not one that this can vouch for.
    k_error = found["k_error"] / found["k_scale"] if found["k_scale"] else math.inf
    v_error = found["v_error"] / found["v_scale"] if found["v_scale"] else math.inf
    return SelfTestVerdict(
        passed=k_error <= tolerance and v_error <= tolerance and math.isfinite(kl),
        k_error=k_error,
        v_error=v_error,
        tolerance=tolerance,
        kl=kl,
        spliced_tokens=found["spliced_tokens"],
    )


def _fact(index: int, text: str) -> Fact:
    return Fact(
        id=FactId(f"self-test-{index}"),
        owner=SELF_TEST_OWNER,
        text=text,
        stream="",
        speaker=None,
        time="1 March, 2024",
        metadata={},
        version=1,
        seq=index,
        created_at=0.0,
        updated_at=0.0,
    )


def _describe(codec: FactCodec, fact: Fact, span: Span) -> dict[str, Any]:
    return {
        "id": span.encoding_id,
        "owner": fact.owner,
        "fact_id": fact.id,
        "fact_version": fact.version,
        "fingerprint": codec.fingerprint,
        "policy": "self-test",
        "saw": [],
    }


__all__: Sequence[str] = ["SelfTestVerdict", "kl_divergence", "run_self_test"]
