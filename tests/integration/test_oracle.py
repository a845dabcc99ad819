"""Spliced prompts of the real server in fp32, against one forward of the reference model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import httpx
import pytest
import torch
from engines import RunningServer

from locomo.oracle.oracle import SpliceOracle
from locomo.oracle.reference import ReferenceModel
from locomo.oracle.serving import OracleClient, Placement
from locomo.oracle.subject import Subject, read_subject
from memstore import Encoding, FactId, KVBlobs, OwnerId

pytestmark = pytest.mark.engine

_TOLERANCE = 1e-3
_FACTS = [
    ("Noor", "The kiln cracked on Friday."),
    ("Pim", "Was it the blue one?"),
    ("Noor", "Yes, the blue one by the window."),
    ("Pim", "I know a mason in Ghent."),
    ("Noor", "Ask whether he works with fire clay."),
    ("Pim", "He does, and he owes me a favour."),
    ("Noor", "Then I will glaze the cups in May."),
    ("Pim", "Keep two green cups for my aunt."),
]
_QUESTION = "Who knows a mason?"


class Oracle(NamedTuple):
    """The oracle, and an owner whose facts it can ask about."""

    client: OracleClient
    reference: ReferenceModel
    blobs: KVBlobs
    subject: Subject
    fact_ids: list[str]

    def with_steps(self, steps: int) -> SpliceOracle:
        return SpliceOracle(self.client, self.reference, top=1000, steps=steps)

    def drawn(self, k: int) -> list[str]:
        """Facts in another order than that in which they were encoded."""
        return random.Random(k).sample(self.fact_ids, k)

    def encoding(self, fact_id: str, policy: str) -> Encoding:
        versions = [(FactId(fact_id), 1)]
        fingerprint = self.client.status()["fingerprint"]
        found = self.blobs.current(OwnerId(self.subject.owner), versions, fingerprint=fingerprint, policy=policy)
        return found[FactId(fact_id)][0]


@pytest.fixture(scope="module")
def oracle(server: RunningServer, model_dir: Path) -> Iterator[Oracle]:
    owner = f"oracle-{uuid4().hex}"
    facts = [{"text": text, "speaker": speaker, "stream": "chat"} for speaker, text in _FACTS]
    body = {"owner": owner, "facts": facts, "wait": True}
    added = httpx.post(f"{server.url}/v1/memory/facts", json=body, timeout=300).json()
    assert added["kv_pending"] == []
    fact_ids = [fact["id"] for fact in added["facts"]]
    client = OracleClient(server.url)
    with KVBlobs(server.memory / "kv", replace_damaged=False) as blobs:
        subject = read_subject(client, blobs, owner=owner, fact_id=fact_ids[0], question=_QUESTION)
        yield Oracle(client, ReferenceModel(model_dir), blobs, subject, fact_ids)
    client.close()


@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("placement", ["system", "tail"])
@pytest.mark.parametrize("policy", ["ladder:0+4", "window:16"])
def test_a_spliced_prompt_equals_the_reference(oracle: Oracle, policy: str, placement: Placement, k: int) -> None:
    splices = oracle.with_steps(3)
    asked = splices.ask(oracle.subject, placement, oracle.drawn(k), policy=policy)
    assert len(asked.spliced) == k
    difference = splices.compare(asked)
    assert difference.max <= _TOLERANCE
    assert difference.argmax_agreement == 1.0
    # The tail, of which the question is a part, and three tokens of the answer, the whole vocabulary of each.
    assert difference.entries > 3 * oracle.reference.vocab_size + 1000 * 8
    assert splices.compare(asked, shifts={k // 2: 1}).max > 10 * _TOLERANCE


@pytest.mark.parametrize("placement", ["system", "tail"])
def test_a_first_fact_that_is_computed_equals_the_reference(oracle: Oracle, placement: Placement) -> None:
    splices = oracle.with_steps(3)
    asked = splices.ask(oracle.subject, placement, oracle.drawn(5), policy="ladder:live+4")
    assert len(asked.spliced) == 4
    report = asked.served.report
    assert (report["tier"], report["not_encoded"], report["reason"]) == ("spliced", 0, None)
    assert splices.compare(asked).max <= _TOLERANCE
    assert splices.compare(asked, shifts={2: 1}).max > 10 * _TOLERANCE


@pytest.mark.parametrize(
    ("policy", "repair"),
    [
        *((policy, repair) for policy in ("ladder:0+4", "window:16") for repair in ("first:4", "first:3+last:30")),
        ("ladder:0+4", "last:24"),
        ("window:16", "last:15%"),
        ("ladder:0+4", "share:10%"),
        ("ladder:0+4", "first:2+share:20%+last:9"),
    ],
)
def test_a_repaired_prompt_equals_the_reference(oracle: Oracle, policy: str, repair: str) -> None:
    splices = oracle.with_steps(2)
    fact_ids = oracle.drawn(6)
    asked = splices.ask(oracle.subject, "tail", fact_ids, policy=policy, repair=repair)
    assert asked.served.report["tier"] == "repaired"
    assert splices.compare(asked).max <= _TOLERANCE
    whole = splices.ask(oracle.subject, "tail", fact_ids, policy=policy)
    assert asked.spliced_tokens < whole.spliced_tokens
    # What is computed anew must matter, or its place could be wrong unseen.
    assert splices.compare(replace(asked, spliced=whole.spliced)).max > 10 * _TOLERANCE


def test_other_facts_in_front_than_the_encoding_saw_are_rejected(oracle: Oracle) -> None:
    """The reference in which facts see the prompt that they are served in, as text would: far from what is served."""
    splices = oracle.with_steps(0)
    asked = splices.ask(oracle.subject, "tail", oracle.drawn(5), policy="window:16")
    assert splices.compare(asked).max <= _TOLERANCE
    as_text = replace(asked, spliced=())
    assert splices.compare(as_text).max > 10 * _TOLERANCE


def test_a_fact_without_an_encoding_is_computed_where_it_stands(oracle: Oracle) -> None:
    fact_ids = oracle.drawn(5)
    oracle.blobs.drop_encoding(oracle.encoding(fact_ids[2], "window:16").id)
    # One request alone: the server encodes the fact again as soon as it has been asked for.
    splices = oracle.with_steps(0)
    asked = splices.ask(oracle.subject, "tail", fact_ids, policy="window:16")
    assert [fact["encoded"] for fact in asked.served.report["facts"]] == [True, True, False, True, True]
    assert len(asked.spliced) == 4
    assert splices.compare(asked).max <= _TOLERANCE


@pytest.mark.parametrize("off_by", [1, -2])
def test_keys_that_the_server_rotates_wrongly_are_rejected(oracle: Oracle, off_by: int) -> None:
    """Stored keys that are turned too far make the server serve what a wrong rotation would."""
    fact_ids = oracle.drawn(5)
    encoding = oracle.encoding(fact_ids[3], "anchor:4")
    right = oracle.blobs.load(encoding.id)
    assert right is not None
    assert oracle.blobs.put(encoding, _rotated(right.k, off_by), right.v)
    try:
        splices = oracle.with_steps(2)
        asked = splices.ask(oracle.subject, "tail", fact_ids, policy="ladder:0+4")
    finally:
        assert oracle.blobs.put(encoding, right.k, right.v)
    assert splices.compare(asked).max > 10 * _TOLERANCE
    assert splices.compare(asked, shifts={3: off_by}).max <= _TOLERANCE


def _rotated(keys: torch.Tensor, by: int) -> torch.Tensor:
    """Keys ``[layers, tokens, heads, 64]`` of the small model turned by ``by`` positions."""
    half = keys.shape[-1] // 2
    angles = by * 100_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones(half, dtype=torch.float64), angles)
    pairs = torch.complex(keys[..., :half].double(), keys[..., half:].double()) * turn
    return torch.cat([pairs.real, pairs.imag], dim=-1).to(keys.dtype)
