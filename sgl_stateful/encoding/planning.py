"""What of an owner's facts is still to be encoded, and in which prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memstore import Encoding, Fact, FactId, KVBlobs, OwnerId

from .codec import FactCodec
from .policies import EncodeJob, EncodingPolicy
from .refusals import Refusals
from .source import FactSource

_PAGE = 1000  # facts read from the store at once


class EncodePlanner:
    """Plans the prompts that an owner's facts are encoded in. Waits for the store and the KV store.

    Parameters
    ----------
    max_job_tokens
        Longest prompt that an encoding may take; longer prefixes are cut from the front.
    refusals
        The facts that are not planned, because they have been refused.
    strict
        Whether KV that saw what has changed or gone is dropped as soon as it is found.
    """

    def __init__(
        self,
        *,
        store: FactSource,
        blobs: KVBlobs,
        codec: FactCodec,
        max_job_tokens: int,
        refusals: Refusals,
        strict: bool = False,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._codec = codec
        self._max_job_tokens = max_job_tokens
        self._refusals = refusals
        self._strict = strict

    def facts(self, owner: str) -> list[Fact]:
        """Every current fact of an owner, in order."""
        facts: list[Fact] = []
        while page := self._store.list(owner, limit=_PAGE, after_seq=facts[-1].seq if facts else 0):
            facts += page
        return facts

    def plan(self, owner: str, facts: Sequence[Fact], policy: EncodingPolicy) -> list[EncodeJob]:
        """The jobs that give each of ``facts``, all that the owner has, its encoding under one policy.

        Facts that are as they were when they were refused are left out.
        """
        current = {fact.id: fact for fact in facts}
        stored = self._blobs.anchors(OwnerId(owner), policy.name)
        anchors = policy.choose_anchors(facts, stored)
        if anchors != stored:
            self._blobs.set_anchors(OwnerId(owner), policy.name, anchors)
        versions = [(fact.id, fact.version) for fact in facts]
        encoded = self._blobs.current(OwnerId(owner), versions, fingerprint=self._codec.fingerprint, policy=policy.name)
        refused = self._refusals.still(owner, policy.name, facts)
        missing = []
        for fact in facts:
            encoding = encoded.get(fact.id, {}).get(0)
            if encoding is not None and _saw_what_is_gone(encoding, current):
                if self._strict:
                    self._blobs.drop_encoding(encoding.id)
                encoding = None
            if fact.id in refused:
                continue
            if encoding is None or not self._is_of(encoding, fact, policy.constant_prefix(fact, current, anchors)):
                missing.append(fact)
        return [part for job in policy.plan(facts, missing, anchors) for part in self._within_budget(job)]

    def prefix_ids(self, job: EncodeJob) -> list[int]:
        """The tokens between the context and the job's facts."""
        room = self._max_job_tokens - len(self._codec.context)
        room -= sum(len(self._codec.encode_fact(fact).token_ids) for fact in job.facts)
        kept: list[tuple[int, ...]] = []
        for fact in reversed(job.prefix):
            ids = self._codec.encode_fact(fact).token_ids
            if len(ids) > room:
                break
            room -= len(ids)
            kept.append(ids)
        return [i for ids in reversed(kept) for i in ids]

    def _is_of(self, encoding: Encoding, fact: Fact, prefix: Sequence[Fact] | None) -> bool:
        """Whether an encoding is of what the fact says, behind the owner's constant list where there is one."""
        if encoding.token_ids != self._codec.encode_fact(fact).token_ids:
            return False
        return prefix is None or encoding.saw == tuple((other.id, other.version) for other in prefix)

    def _within_budget(self, job: EncodeJob) -> list[EncodeJob]:
        """The job, or several where its facts would not fit one prompt: each then sees the end of the one before."""
        room = self._max_job_tokens - len(self._codec.context)
        parts: list[EncodeJob] = []
        seen, facts, used = list(job.prefix), list[Fact](), 0
        for fact in job.facts:
            length = len(self._codec.encode_fact(fact).token_ids)
            if facts and used + length > room // 2:
                parts.append(EncodeJob(tuple(seen), tuple(facts)))
                seen, facts, used = seen + facts, [], 0
            facts.append(fact)
            used += length
        return [*parts, EncodeJob(tuple(seen), tuple(facts))]


def _saw_what_is_gone(encoding: Encoding, current: Mapping[FactId, Fact]) -> bool:
    """Whether an encoding saw a fact that has changed or gone since."""
    return any((fact := current.get(fact_id)) is None or fact.version != then for fact_id, then in encoding.saw)
