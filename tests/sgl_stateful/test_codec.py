import dataclasses

from facts import fact
from memory_engine import kv_of
from words import ByteTokenizer

from memstore import Encoding, EncodingId, FactId, KVBlobs, MemStore, OwnerId
from memstore.records.base import RestoredFact
from memstore.searchable import vectors_name
from sgl_stateful.encoding import StreamWindow
from sgl_stateful.encoding.codec import FactCodec
from sgl_stateful.encoding.planning import EncodePlanner
from sgl_stateful.encoding.refusals import Refusals


def codec() -> FactCodec:
    return FactCodec(ByteTokenizer(), context=(), model_fingerprint="m")


def test_a_fact_that_comes_back_with_another_text_has_the_ids_of_that_text() -> None:
    """As an export brings it back after a purge: under its id, in its version."""
    reads, before = codec(), fact(1, text="the secret")
    assert bytes(reads.encode_fact(before).token_ids) == b"the secret\n"
    after = dataclasses.replace(before, text="something else")
    assert bytes(reads.encode_fact(after).token_ids) == b"something else\n"


def test_facts_that_are_rendered_alike_are_tokenised_once() -> None:
    class Counting(ByteTokenizer):
        calls = 0

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            self.calls += 1
            return super().encode(text, add_special_tokens=add_special_tokens)

    tokenizer = Counting()
    reads = FactCodec(tokenizer, context=(), model_fingerprint="m")
    for _ in range(3):
        reads.encode_fact(fact(1))
    reads.encode_fact(dataclasses.replace(fact(1), id=FactId("another"), version=7))
    assert tokenizer.calls == 1


def test_kv_of_another_text_is_made_anew(store: MemStore, blobs: KVBlobs) -> None:
    reads, old = codec(), store.add("ana", "the secret")
    ids = tuple(b"the secret\n")
    encoding = Encoding(
        id=EncodingId("e"),
        owner=OwnerId("ana"),
        fact_id=old.id,
        fact_version=old.version,
        fingerprint=reads.fingerprint,
        policy="window:0",
        saw=(),
        token_ids=ids,
    )
    planner = EncodePlanner(store=store, blobs=blobs, codec=reads, max_job_tokens=1000, refusals=Refusals(reads))
    blobs.put(encoding, *kv_of(ids, 0, len(ids)))
    assert planner.plan("ana", [old], StreamWindow(0)) == []
    store.records.purge(OwnerId("ana"))
    again = dataclasses.replace(old, text="something else")
    [vectors] = [store.embedder.embed([again.text])]
    restored = RestoredFact(again, vectors=vectors)
    store.records.restore(OwnerId("ana"), [restored], embedder=vectors_name(store.embedder))
    [back] = planner.facts("ana")
    assert (back.id, back.version, back.text) == (old.id, old.version, "something else")
    [job] = planner.plan("ana", [back], StreamWindow(0))
    assert job.facts == (back,)
