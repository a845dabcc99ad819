import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from words import ByteTokenizer

from kv_splice import quantise, rotate_keys, unrotate_keys
from sgl_stateful.directive import Capture, Directive, KeepProbe, Splice
from sgl_stateful.encoding.codec import FactCodec
from sgl_stateful.engine_port import PrefillResult
from sgl_stateful.errors import UnverifiedSplice
from sgl_stateful.selftest import kl_divergence, run_self_test
from sgl_stateful.settings import KVStorage

CONTEXT = tuple(b"<user>\n")
weights = st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4)


def log_of(probabilities: Sequence[float], ids: Sequence[int]) -> dict[int, float]:
    return {i: math.log(probabilities[i]) for i in ids}


def numpy_kl(p: Any, q: Any) -> float:
    return float(np.sum(p * np.log(p / q)))


@given(weights, weights)
def test_kl_of_full_distributions(first: list[float], second: list[float]) -> None:
    p, q = np.array(first) / np.sum(first), np.array(second) / np.sum(second)
    everything = range(4)
    assert kl_divergence(log_of(p, everything), log_of(q, everything)) == pytest.approx(numpy_kl(p, q), abs=1e-9)


@given(weights, weights)
def test_kl_of_truncated_distributions_pools_what_either_lacks(first: list[float], second: list[float]) -> None:
    p, q = np.array(first) / np.sum(first), np.array(second) / np.sum(second)
    pooled_p = np.array([p[1], p[0] + p[2] + p[3]])
    pooled_q = np.array([q[1], q[0] + q[2] + q[3]])
    got = kl_divergence(log_of(p, [0, 1]), log_of(q, [1, 3]))
    assert got == pytest.approx(numpy_kl(pooled_p, pooled_q), abs=1e-9)
    assert got <= numpy_kl(p, q) + 1e-9, "pooling never adds"


def test_kl_of_a_distribution_and_itself_is_zero() -> None:
    p = {1: math.log(0.5), 2: math.log(0.25)}
    assert kl_divergence(p, p) == pytest.approx(0.0, abs=1e-12)


class ProbedEngine:
    """Answers the self-test's prompts with chosen errors."""

    def __init__(self, report: Mapping[str, Any], *, spliced: Mapping[int, float] | None = None) -> None:
        self.report = report
        self.exact = {7: math.log(0.75), 8: math.log(0.25)}
        self.spliced = self.exact if spliced is None else spliced
        self.sent: list[tuple[str, list[int], Directive | None]] = []
        self.dropped: list[str] = []

    async def prefill(
        self, token_ids: Sequence[int], *, salt: str, directive: Directive | None, top_logprobs: int = 0
    ) -> PrefillResult:
        self.sent.append((salt, list(token_ids), directive))
        is_splice = isinstance(directive, Splice)
        top = (self.spliced if is_splice else self.exact) if top_logprobs else {}
        return PrefillResult(len(token_ids), 0, self.report if is_splice else {}, top)

    async def control(self, op: str, payload: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        assert op == "drop"
        self.dropped += (payload or {})["encoding_ids"]
        return {}

    def is_closing(self) -> bool:
        return False

    def foreground_requests(self) -> int:
        return 0


def report(k_error: float, v_error: float) -> dict[str, Any]:
    return {"spliced_tokens": 100, "k_error": k_error, "k_scale": 8.0, "v_error": v_error, "v_scale": 2.0}


async def run(engine: ProbedEngine, dtype: str = "bfloat16", storage: KVStorage = KVStorage.NATIVE) -> Any:
    codec = FactCodec(ByteTokenizer(), context=CONTEXT, model_fingerprint="m")
    return await run_self_test(engine, codec, salt="salt", dtype=dtype, storage=storage)


# Half a unit in the last place is 2**-9 of a value in bfloat16, 2**-12 in float16; four roundings: 2**-7 and 2**-10.
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("dtype", "k_error", "v_error", "passed"),
    [
        ("bfloat16", 8 * 2**-7, 2 * 2**-7, True),
        ("bfloat16", 8 * 2**-6, 0.0, False),
        ("bfloat16", 0.0, 2 * 2**-6, False),
        ("float16", 8 * 2**-10, 0.0, True),
        ("float16", 8 * 2**-7, 0.0, False),
        ("float32", 8e-6, 2e-6, True),
        ("float32", 8 * 2**-10, 0.0, False),
        ("bfloat16", math.nan, 0.0, False),
        ("bfloat16", 0.0, math.inf, False),
    ],
)
async def test_layer_zero_decides(dtype: str, k_error: float, v_error: float, passed: bool) -> None:
    verdict = await run(ProbedEngine(report(k_error, v_error)), dtype)
    assert verdict.passed is passed
    assert verdict.spliced_tokens == 100
    assert verdict.kl == pytest.approx(0.0, abs=1e-12)
    assert verdict.k_error == pytest.approx(k_error / 8, nan_ok=True)
    assert verdict.as_dict()["v_error"] == v_error / 2


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("dtype", "k_error", "v_error", "passed"),
    [
        ("float32", 8 / 127, 2 / 127, True),
        ("float32", 8 / 126, 0.0, False),
        ("float32", 0.0, 2 / 126, False),
        ("bfloat16", 8 * (2**-7 + 1 / 127), 0.0, True),
        ("bfloat16", 8 * (2**-6 + 1 / 127), 0.0, False),
        ("bfloat16", math.nan, 0.0, False),
    ],
)
async def test_int8_may_be_off_by_a_step_besides(dtype: str, k_error: float, v_error: float, passed: bool) -> None:
    verdict = await run(ProbedEngine(report(k_error, v_error)), dtype, KVStorage.INT8)
    assert verdict.passed is passed


def test_a_step_of_int8_is_what_rotation_makes_of_rounding() -> None:
    """Keys of one pair, all of them as long as the largest number that is served allows: on a square."""
    angles = torch.linspace(0, 2 * math.pi, 5000)
    served = torch.stack((angles.cos(), angles.sin()), dim=-1)[None, :, None]
    served /= served.abs().amax(-1, keepdim=True)
    errors = []
    for turn in (0.0, 0.3, math.pi / 4, 2.0):
        cos_sin = torch.tensor([[math.cos(turn), math.sin(turn)]]).expand(len(angles), 2)
        plain = unrotate_keys(served, cos_sin, is_neox=True)
        k, _, scales = quantise(plain, plain)
        back = rotate_keys(k.float() * scales.keys[:, None].float(), cos_sin, is_neox=True)
        errors.append((back - served).abs().max().item())
    assert 0.9 / 127 <= max(errors) <= 1 / 127 + 1e-5


@pytest.mark.anyio
async def test_the_next_tokens_divergence_is_reported_and_must_be_a_number() -> None:
    small = await run(ProbedEngine(report(0, 0), spliced={7: math.log(0.5), 8: math.log(0.5)}))
    assert small.passed
    assert small.kl == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert not (await run(ProbedEngine(report(0, 0), spliced={7: math.nan, 8: math.log(0.5)}))).passed


@pytest.mark.anyio
async def test_facts_are_spliced_elsewhere_than_they_were_captured_and_leave_the_arena() -> None:
    engine = ProbedEngine(report(0, 0))
    await run(engine)
    (salt_c, captured, capture), (salt_e, exact, keep), (salt_s, spliced, splice) = engine.sent
    assert len({salt_c, salt_e, salt_s}) == 3, "no run may find another's prefix"
    assert isinstance(capture, Capture)
    assert isinstance(keep, KeepProbe)
    assert isinstance(splice, Splice)
    assert exact == spliced
    assert captured[: len(CONTEXT)] == spliced[: len(CONTEXT)] == list(CONTEXT)
    where = {item.span.encoding_id: item.span for item in capture.items}
    for span in splice.spans:
        was = where[span.encoding_id]
        assert spliced[span.start : span.end] == captured[was.start : was.end]
    assert all(span.start != where[span.encoding_id].start for span in splice.spans[::2])
    assert (keep.start, keep.end, keep.probe) == (splice.start, splice.end, splice.probe)
    assert splice.end < len(spliced), "a question follows"
    assert sorted(engine.dropped) == sorted(where)


@pytest.mark.anyio
@pytest.mark.parametrize("answer", [{}, {"spliced_tokens": 0, "reason": "facts_lost"}, {"spliced_tokens": 9}])
async def test_a_scheduler_that_did_not_splice_is_quoted(answer: dict[str, Any]) -> None:
    with pytest.raises(UnverifiedSplice, match="did not splice the self-test's facts") as raised:
        await run(ProbedEngine(answer))
    assert repr(answer) in str(raised.value)
