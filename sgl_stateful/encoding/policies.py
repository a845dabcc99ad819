"""Encoding policies: which facts stand in front of which while KV is computed.

A fact encoded alone, or right behind the header, has the keys of the first item of a list; fifty such facts all claim
to be first. A realistic list in front cures that. A policy decides the list; the header stands before it always.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Protocol

from memstore import Fact, FactId


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """One prefill: ``[header][prefix ...][facts ...]``, of which the KV of ``facts`` is kept.

    Each fact sees the prefix and the facts before it in the job.
    """

    prefix: tuple[Fact, ...]
    facts: tuple[Fact, ...]

    def saw(self, index: int) -> tuple[tuple[FactId, int], ...]:
        """Ids and versions that the fact at ``index`` sees."""
        return tuple((f.id, f.version) for f in (*self.prefix, *self.facts[:index]))


class EncodingPolicy(Protocol):
    """What prefix stands before which facts.

    ``name`` is part of every encoding's address. ``plan`` turns an owner's facts (all of them, by ``seq``) and those
    without an encoding into jobs.
    """

    @property
    def name(self) -> str: ...

    @property
    def extends_prompts(self) -> bool:
        """Whether what one job prefilled is a prefix of the next, and worth a place in the radix cache."""
        ...

    def choose_anchors(self, facts: Sequence[Fact], current: Sequence[FactId]) -> tuple[FactId, ...]:
        """The owner's anchors from now on, given the ones so far; equal to ``current`` where they still do."""
        ...

    def constant_prefix(
        self, fact: Fact, facts: Mapping[FactId, Fact], anchors: Sequence[FactId]
    ) -> tuple[Fact, ...] | None:
        """What stands before a fact whatever surrounds it in its stream; None where that depends on its stream."""
        ...

    def plan(self, facts: Sequence[Fact], missing: Sequence[Fact], anchors: Sequence[FactId]) -> list[EncodeJob]: ...


@dataclass(frozen=True, slots=True)
class StreamWindow:
    """The turns before a fact in its own stream: at least ``window`` of them, fewer than twice as many.

    The stream is cut into groups of ``window`` turns. Group g is encoded behind group g-1, so turns that arrive one
    by one extend a prefix that stays the same until the next group begins: each costs its own tokens, plus one
    group's when the prefix moves on; two tokens prefilled a fact token in all.
    """

    window: int

    @property
    def name(self) -> str:
        return f"window:{self.window}"

    @property
    def extends_prompts(self) -> bool:
        """The turns of a group follow one another."""
        return self.window > 0

    def choose_anchors(self, facts: Sequence[Fact], current: Sequence[FactId]) -> tuple[FactId, ...]:
        """Windows need none."""
        return ()

    def constant_prefix(
        self, fact: Fact, facts: Mapping[FactId, Fact], anchors: Sequence[FactId]
    ) -> tuple[Fact, ...] | None:
        """None: it is the stream that stands before a fact."""
        return None

    def plan(self, facts: Sequence[Fact], missing: Sequence[Fact], anchors: Sequence[FactId]) -> list[EncodeJob]:
        """One job a run of missing turns of a group; the first two groups of a stream share one."""
        wanted = {fact.id for fact in missing}
        jobs = []
        by_stream = sorted(facts, key=lambda f: (f.stream, f.seq))
        for _, group in groupby(by_stream, key=lambda f: f.stream):
            stream = list(group)
            if self.window == 0:
                jobs += [EncodeJob((), (fact,)) for fact in stream if fact.id in wanted]
                continue
            # [0, 2w) behind the header alone, then [g*w, (g+1)*w) behind [(g-1)*w, g*w)
            bounds = [0, *range(2 * self.window, len(stream), self.window), len(stream)]
            for start, end in pairwise(bounds):
                prefix_start = max(start - self.window, 0)
                first = next((i for i in range(start, end) if stream[i].id in wanted), None)
                if first is None:
                    continue
                last = max(i for i in range(start, end) if stream[i].id in wanted)
                jobs.append(EncodeJob(tuple(stream[prefix_start:first]), tuple(stream[first : last + 1])))
        return jobs


@dataclass(frozen=True, slots=True)
class AnchorList:
    """A constant list of ``size`` diverse facts of the same owner, from different sessions.

    Its KV stays in the radix cache, so encoding a fact costs its own tokens. An anchor itself is encoded behind the
    others and one in reserve, those of the first half in the opposite order: on average that prefills a quarter of the
    list. Until an owner has more facts than anchors, the facts before stand in front.
    """

    size: int

    @property
    def name(self) -> str:
        return f"anchor:{self.size}"

    @property
    def extends_prompts(self) -> bool:
        """False: a fact behind the list is nobody's prefix, and would only push other prompts out."""
        return False

    def choose_anchors(self, facts: Sequence[Fact], current: Sequence[FactId]) -> tuple[FactId, ...]:
        """Early facts of sessions spread evenly over the owner's history, and one in reserve.

        Anchors stay until one of them is gone, or until the owner has so many more sessions that a choice made now
        would cover more of them (and four times the facts there were).
        """
        need = self.size + 1
        if len(facts) < need:
            return ()
        present = {fact.id for fact in facts}
        kept = [a for a in current if a in present]
        sessions = _sessions(facts)
        if len(kept) == len(current) == need:
            by_id = {fact.id: fact for fact in facts}
            covered = len({_session_key(by_id[a]) for a in kept})
            newest = max(by_id[a].seq for a in kept)
            older = sum(fact.seq <= newest for fact in facts)
            if covered >= min(need, len(sessions)) or len(facts) < 4 * older:
                return tuple(kept)
        return tuple(fact.id for fact in _spread(sessions, need))

    def plan(self, facts: Sequence[Fact], missing: Sequence[Fact], anchors: Sequence[FactId]) -> list[EncodeJob]:
        """One job a fact, behind the same list; facts before the owner has anchors go behind those before them."""
        by_id = {fact.id: fact for fact in facts}
        if not anchors:
            order = sorted(facts, key=lambda f: f.seq)
            return [EncodeJob(tuple(f for f in order if f.seq < fact.seq)[-self.size :], (fact,)) for fact in missing]
        return [EncodeJob(self._others(fact, by_id, anchors), (fact,)) for fact in missing]

    def constant_prefix(
        self, fact: Fact, facts: Mapping[FactId, Fact], anchors: Sequence[FactId]
    ) -> tuple[Fact, ...] | None:
        """The anchors, once there are any."""
        return self._others(fact, facts, anchors) if anchors else None

    def _others(self, fact: Fact, facts: Mapping[FactId, Fact], anchors: Sequence[FactId]) -> tuple[Fact, ...]:
        # An anchor's list is that of all facts up to its own place in it, which is near the end of one of two orders.
        order = reversed(anchors) if fact.id in anchors[: len(anchors) // 2] else anchors
        return tuple(facts[a] for a in order if a != fact.id)[: self.size]


def _session_key(fact: Fact) -> tuple[str, str]:
    return (fact.stream, fact.time or "")


def _sessions(facts: Sequence[Fact]) -> list[list[Fact]]:
    """Facts by session (stream and time), sessions and facts in order of arrival."""
    sessions: dict[tuple[str, str], list[Fact]] = {}
    for fact in sorted(facts, key=lambda f: f.seq):
        sessions.setdefault(_session_key(fact), []).append(fact)
    return list(sessions.values())


def _spread(sessions: Sequence[Sequence[Fact]], count: int) -> list[Fact]:
    """``count`` facts: one from each of that many sessions, evenly spaced; more from each where there are fewer."""
    chosen: list[Fact] = []
    taken = [0] * len(sessions)
    step = max(len(sessions) / count, 1.0)
    order = list(dict.fromkeys(min(int(i * step), len(sessions) - 1) for i in range(count)))
    while len(chosen) < count:
        for i in order:
            if taken[i] < len(sessions[i]) and len(chosen) < count:
                # The second turn of a session says more than its greeting.
                at = (taken[i] + 1) % len(sessions[i])
                chosen.append(sessions[i][at])
                taken[i] += 1
        if all(taken[i] >= len(sessions[i]) for i in order):
            order = [i for i in range(len(sessions)) if taken[i] < len(sessions[i])]
    # The last one is the reserve: with few sessions it is the second of its own, and the others stay diverse.
    return [*sorted(chosen[:-1], key=lambda f: f.seq), chosen[-1]]


def parse_policy(spec: str) -> EncodingPolicy:
    """``anchor:N`` (N >= 1) or ``window:W`` (W >= 0).

    Raises
    ------
    ValueError
        Anything else, by name.
    """
    kind, _, number = spec.partition(":")
    if number.isascii() and number.isdigit():
        if kind == "window":
            return StreamWindow(int(number))
        if kind == "anchor" and int(number) >= 1:
            return AnchorList(int(number))
    raise ValueError(f"unknown encoding policy {spec!r}: use 'anchor:N' with N >= 1, or 'window:W' with W >= 0")
