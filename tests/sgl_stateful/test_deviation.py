import logging

import pytest
import torch

from kv_splice import quantise
from memstore import Encoding, EncodingId, FactId, KVBlob, KVBlobs, OwnerId
from sgl_stateful.deviation import Deviations, deviation

LAYERS, TOKENS, HEADS, DIM = 3, 6, 2, 4


def keys(*changed: tuple[int, float]) -> torch.Tensor:
    """Ones, but for tokens that have something added in every layer."""
    k = torch.ones(LAYERS, TOKENS, HEADS, DIM)
    for token, more in changed:
        k[:, token] += more
    return k


def put(blobs: KVBlobs, name: str, k: torch.Tensor, ids: tuple[int, ...] = tuple(range(TOKENS))) -> EncodingId:
    encoding_id = EncodingId(name)
    encoding = Encoding(encoding_id, OwnerId("ana"), FactId(f"fact-{name}"), 1, "f", "window:0", ids)
    blobs.put(encoding, k, torch.zeros_like(k))
    return encoding_id


def test_it_is_the_squared_distance_in_units_of_the_mean_square() -> None:
    one, other = (KVBlob(k, k, (0,) * TOKENS) for k in (keys(), keys((1, 0.5), (4, 2.0))))
    # 8 elements a token, each 0.25 or 4 away, over a mean square of 8 ones a token.
    assert deviation(one, other).tolist() == pytest.approx([0, 0.25, 0, 0, 4.0, 0])


def test_every_layer_counts_alike_whatever_its_scale() -> None:
    first, second = keys(), keys()
    first[2], second[2] = 100.0, 100.0
    second[0, 3] += 1.0
    second[2, 5] += 100.0
    found = deviation(KVBlob(first, first, ()), KVBlob(second, second, ())).tolist()
    assert found == pytest.approx([0, 0, 0, 1 / 3, 0, 1 / 3])


def test_tokens_in_order_of_their_deviation(blobs: KVBlobs) -> None:
    one, other = put(blobs, "aa", keys()), put(blobs, "bb", keys((4, 0.1), (1, 2.0), (5, 0.5)))
    deviations = Deviations(blobs)
    assert list(deviations.order(one, other) or []) == [1, 5, 4, 0, 2, 3]  # equals as they stand
    blobs.drop_encoding(one)
    assert deviations.order(other, one) is deviations.order(one, other) is not None  # remembered, either way round


def test_int8_is_compared_by_what_it_stands_for(blobs: KVBlobs) -> None:
    ids = []
    for name, k in (("aa", keys()), ("bb", keys((2, 1.0)))):
        encoding = Encoding(EncodingId(name), OwnerId("ana"), FactId(name), 1, "f", "w", tuple(range(TOKENS)))
        q_k, q_v, scales = quantise(k, k)
        blobs.put(encoding, q_k, q_v, scales=scales)
        ids.append(encoding.id)
    # Ones are 127 steps of one scale and 63 or 64 of the other: only what they stand for is nearly equal.
    assert next(iter(Deviations(blobs).order(*ids) or [])) == 2


def test_what_cannot_be_compared_has_no_order(blobs: KVBlobs, caplog: pytest.LogCaptureFixture) -> None:
    one, other = put(blobs, "aa", keys()), put(blobs, "bb", keys(), tuple(range(1, TOKENS + 1)))
    deviations = Deviations(blobs)
    assert deviations.order(one, EncodingId("cc")) is None
    assert deviations.order(one, other) is None  # of another text
    blobs.close()
    with caplog.at_level(logging.WARNING):
        assert deviations.order(one, EncodingId("dd")) is None
    assert "could not be read" in caplog.text
