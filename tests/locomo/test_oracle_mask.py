"""The oracle's one forward, against splicing done by hand: encode, rotate, put together, run the rest."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from locomo.errors import OracleError
from locomo.oracle.comparison import Distribution, compare
from locomo.oracle.layout import SplicedFact, lay_out
from locomo.oracle.reference import ReferenceModel

_VOCAB, _LAYERS, _HEAD_DIM, _THETA = 97, 3, 16, 1000.0
_HEAD, _HEADER, _TAIL = [5, 9, 61, 12, 7], [33, 34], [80, 81, 82, 83, 84, 85]
_FACTS = [[40, 41, 42], [50, 51, 52, 53], [60, 61, 62]]
_CONTEXT = [5, 9, 33, 34]  # shorter than head and header: facts move further than their neighbours do
_SEEN = [_CONTEXT, [*_CONTEXT, 70, 71, 72, 73, 74], [*_CONTEXT, 75, 76]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights, large enough to make attention depend on positions."""
    config = LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=_HEAD_DIM,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": _THETA},
    )
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("tiny-model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reference(directory: Path) -> ReferenceModel:
    return ReferenceModel(directory)


@pytest.fixture(scope="module")
def plain(directory: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def prompt_and_facts(shift: int = 0) -> tuple[list[int], list[SplicedFact]]:
    """The served prompt; ``shift`` moves its middle fact."""
    ids, facts = [*_HEAD, *_HEADER], []
    for number, (fact, seen) in enumerate(zip(_FACTS, _SEEN, strict=True)):
        facts.append(SplicedFact(len(ids), len(ids) + len(fact), tuple(seen), shift if number == 1 else 0))
        ids += fact
    return [*ids, *_TAIL], facts


def rotated(keys: torch.Tensor, by: int) -> torch.Tensor:
    """Keys ``[1, heads, n, dim]`` turned by ``by`` positions: a rotation of each pair (i, i + dim / 2)."""
    half = _HEAD_DIM // 2
    angles = by * _THETA ** (-torch.arange(half, dtype=torch.float64) * 2 / _HEAD_DIM)
    turn = torch.polar(torch.ones(half, dtype=torch.float64), angles)
    pairs = torch.complex(keys[..., :half].double(), keys[..., half:].double()) * turn
    return torch.cat([pairs.real, pairs.imag], dim=-1).float()


def run(model: Any, ids: list[int], cache: DynamicCache) -> torch.Tensor:
    """Log probabilities ``[n, vocab]`` behind each of the next tokens; the cache grows by them."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids]), past_key_values=cache).logits[0]
    return torch.log_softmax(logits.double(), dim=-1)


def spliced_by_hand(model: Any, extra_turn: int = 0) -> torch.Tensor:
    """Log probabilities behind the tail's tokens, where facts' KV was computed elsewhere and rotated.

    ``extra_turn`` rotates the middle fact's keys too far, as a server with a wrong position would.
    """
    served = DynamicCache()
    run(model, [*_HEAD, *_HEADER], served)
    start = len(_HEAD) + len(_HEADER)
    for number, (fact, seen) in enumerate(zip(_FACTS, _SEEN, strict=True)):
        encoding = DynamicCache()
        run(model, [*seen, *fact], encoding)
        by = start - len(seen) + (extra_turn if number == 1 else 0)
        for layer in range(_LAYERS):
            keys = encoding.layers[layer].keys[:, :, len(seen) :]
            served.update(rotated(keys, by), encoding.layers[layer].values[:, :, len(seen) :], layer)
        start += len(fact)
    return run(model, _TAIL, served)


def tail_rows(ids: list[int]) -> range:
    return range(len(ids) - len(_TAIL), len(ids))


def test_positions_and_mask_of_one_fact() -> None:
    # Served: 0 1 | 2 3 (the fact) | 4; the fact was encoded behind three tokens, one more than stand before it here.
    found = lay_out([10, 11, 12, 13, 14], [SplicedFact(2, 4, (20, 21, 22))])
    assert found.token_ids.tolist() == [10, 11, 12, 13, 14, 20, 21, 22]
    # Ghosts belong at -1, 0 and 1; everything is moved by one.
    assert found.position_ids.tolist() == [1, 2, 3, 4, 5, 0, 1, 2]
    assert found.allowed.int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 1, 1, 1],
        [0, 0, 1, 1, 0, 1, 1, 1],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1, 1, 1],
    ]
    mask = found.additive_mask()
    assert mask.shape == (1, 1, 8, 8)
    assert torch.equal(mask[0, 0] == 0, found.allowed)
    assert torch.equal(mask[0, 0] == float("-inf"), ~found.allowed)


def test_a_fact_between_spliced_ones_that_is_computed_sees_all_before_it() -> None:
    found = lay_out([1, 2, 3, 4], [SplicedFact(0, 1, (8,)), SplicedFact(2, 3, (9,))])
    assert found.allowed[1].int().tolist() == [1, 1, 0, 0, 0, 0]
    assert found.allowed[2].int().tolist() == [0, 0, 1, 0, 0, 1]
    assert found.allowed[3].int().tolist() == [1, 1, 1, 1, 0, 0]


def test_one_forward_equals_splicing_by_hand(reference: ReferenceModel, plain: Any) -> None:
    ids, facts = prompt_and_facts()
    found = reference.log_probs(lay_out(ids, facts), tail_rows(ids))
    torch.testing.assert_close(found, spliced_by_hand(plain), rtol=0, atol=2e-5)
    # The prompt is one for which splicing is not the same as full prefill, or nothing was shown.
    exact = run(plain, ids, DynamicCache())[-len(_TAIL) :]
    assert (found - exact).abs().max() > 0.1


@pytest.mark.parametrize("off_by", [1, -1])
def test_a_rotation_off_by_one_is_rejected(reference: ReferenceModel, plain: Any, off_by: int) -> None:
    ids, facts = prompt_and_facts()
    right = reference.log_probs(lay_out(ids, facts), tail_rows(ids))
    wrong = spliced_by_hand(plain, extra_turn=off_by)
    assert (right - wrong).abs().max() > 0.1
    # And the oracle's own control is the very same mistake.
    ids, shifted = prompt_and_facts(shift=off_by)
    control = reference.log_probs(lay_out(ids, shifted), tail_rows(ids))
    torch.testing.assert_close(control, wrong, rtol=0, atol=2e-5)


def test_what_a_fact_saw_matters(reference: ReferenceModel) -> None:
    ids, facts = prompt_and_facts()
    right = reference.log_probs(lay_out(ids, facts), tail_rows(ids))
    swapped = SplicedFact(facts[2].start, facts[2].end, (*_CONTEXT, 76, 75))
    other = reference.log_probs(lay_out(ids, [*facts[:2], swapped]), tail_rows(ids))
    assert (right - other).abs().max() > 0.01


def test_facts_behind_what_they_saw_equal_full_prefill(reference: ReferenceModel, plain: Any) -> None:
    ids, facts = prompt_and_facts()
    exact = run(plain, ids, DynamicCache())
    in_place = [SplicedFact(fact.start, fact.end, tuple(ids[: fact.start])) for fact in facts]
    for given in ([], in_place, in_place[:1]):
        found = reference.log_probs(lay_out(ids, given), range(len(ids)))
        torch.testing.assert_close(found, exact, rtol=0, atol=2e-5)


@pytest.mark.parametrize("spans", [[(2, 2)], [(3, 2)], [(-1, 2)], [(0, 5)], [(0, 3), (2, 4)], [(2, 4), (0, 1)]])
def test_facts_that_cannot_be_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(OracleError):
        lay_out([1, 2, 3, 4], [SplicedFact(start, end, (7,)) for start, end in spans])


def test_a_rotary_formula_that_depends_on_the_length_is_refused(directory: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(directory)
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": _THETA, "factor": 2.0}
    model.save_pretrained(tmp_path)
    with pytest.raises(OracleError, match="dynamic"):
        ReferenceModel(tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OracleError, match=str(tmp_path)):
        ReferenceModel(tmp_path)


def test_differences_by_hand() -> None:
    reference = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]))
    served = [
        Distribution(7, np.array([0, 2]), np.log([0.5, 0.25])),
        Distribution(8, np.array([1, 2]), np.log([0.6, 0.35])),  # thrice and half as likely, and another first
    ]
    found = compare(served, reference, [0, 1])
    assert found.max == pytest.approx(math.log(3))
    assert found.mean == pytest.approx((math.log(3) + math.log(2)) / 4)
    assert (found.argmax_agreement, found.positions, found.entries) == (0.5, 2, 4)


def test_what_is_no_number_never_passes() -> None:
    served = [Distribution(0, np.array([0, 1]), np.array([math.nan, math.log(0.5)]))]
    assert compare(served, np.log(np.full((1, 2), 0.5)), [0]).max == math.inf
