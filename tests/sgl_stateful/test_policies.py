from collections.abc import Sequence
from itertools import takewhile

import pytest
from facts import fact, ids
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore import Fact, FactId
from sgl_stateful.encoding import AnchorList, EncodeJob, StreamWindow, parse_policy

WINDOWS = [0, 1, 2, 5, 16]


def streams_of(lengths: Sequence[int]) -> list[Fact]:
    """Streams that take turns, as long as they last."""
    facts: list[Fact] = []
    for turn in range(max(lengths)):
        facts += [fact(len(facts) + i + 1, stream=f"s{i}") for i, n in enumerate(lengths) if turn < n]
    # seq must grow with the list
    return [fact(seq, stream=f.stream) for seq, f in enumerate(facts, 1)]


def seen_by(jobs: Sequence[EncodeJob]) -> dict[FactId, list[FactId]]:
    return {f.id: [*ids(job.prefix), *ids(job.facts[:i])] for job in jobs for i, f in enumerate(job.facts)}


def prefilled_turns(jobs: Sequence[EncodeJob]) -> int:
    return sum(len(job.prefix) + len(job.facts) for job in jobs)


def check_windows(w: int, lengths: Sequence[int]) -> None:
    facts = streams_of(lengths)
    jobs = StreamWindow(w).plan(facts, facts, ())
    captured = [f.id for job in jobs for f in job.facts]
    assert sorted(captured) == sorted(ids(facts)), "each fact once"
    seen = seen_by(jobs)
    for i in range(len(lengths)):
        stream = [f.id for f in facts if f.stream == f"s{i}"]
        for index, fact_id in enumerate(stream):
            count = len(seen[fact_id])
            assert min(w, index) <= count <= max(2 * w - 1, 0)
            assert seen[fact_id] == stream[index - count : index], "the turns right before, in order"
    assert prefilled_turns(jobs) <= 2 * len(facts)


@pytest.mark.parametrize("w", WINDOWS)
def test_windows_of_one_stream_of_any_length(w: int) -> None:
    for length in range(1, 101):
        check_windows(w, [length])


@given(st.sampled_from(WINDOWS), st.lists(st.integers(1, 60), min_size=2, max_size=5))
@settings(deadline=None)
def test_windows_of_streams_that_interleave(w: int, lengths: list[int]) -> None:
    check_windows(w, lengths)


@given(st.sampled_from(WINDOWS), st.data())
@settings(deadline=None)
def test_windows_capture_whatever_is_missing_behind_turns_of_the_same_window(w: int, data: st.DataObject) -> None:
    facts = streams_of(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    missing = data.draw(st.lists(st.sampled_from(facts), unique_by=lambda f: f.id))
    jobs = StreamWindow(w).plan(facts, missing, ())
    seen, full = seen_by(jobs), seen_by(StreamWindow(w).plan(facts, facts, ()))
    assert {f.id for f in missing} <= seen.keys()
    assert all(seen[fact_id] == full[fact_id] for fact_id in seen), "what a fact sees does not depend on the rest"
    assert len(seen) == sum(len(job.facts) for job in jobs)


@pytest.mark.parametrize("w", [1, 2, 5, 16])
def test_turns_that_arrive_one_by_one_extend_the_prompt_before(w: int) -> None:
    length = 100
    stream = [fact(seq) for seq in range(1, length + 1)]
    prompt: list[FactId] = []
    anchored_anew, computed = [], 0
    for now in range(1, length + 1):
        (job,) = StreamWindow(w).plan(stream[:now], [stream[now - 1]], ())
        before, prompt = prompt, ids([*job.prefix, *job.facts])
        assert job.facts == (stream[now - 1],)
        if prompt[: len(before)] == before:
            computed += len(prompt) - len(before)
        else:
            anchored_anew.append(now - 1)
            computed += len(prompt)
    assert anchored_anew == list(range(2 * w, length, w)), "only where a group begins"
    assert computed <= 2 * length


def sessions_of(*lengths: int) -> list[Fact]:
    facts: list[Fact] = []
    for number, length in enumerate(lengths):
        facts += [fact(len(facts) + i + 1, time=f"day {number}") for i in range(length)]
    return facts


def session(facts: Sequence[Fact], fact_id: FactId) -> str | None:
    return next(f.time for f in facts if f.id == fact_id)


@given(st.integers(1, 8), st.lists(st.integers(1, 9), min_size=1, max_size=20))
@settings(deadline=None)
def test_anchors_are_distinct_facts_of_as_many_sessions_as_there_are(size: int, lengths: list[int]) -> None:
    facts = sessions_of(*lengths)
    policy = AnchorList(size)
    anchors = policy.choose_anchors(facts, ())
    if len(facts) <= size:
        assert anchors == ()
        return
    assert len(set(anchors)) == len(anchors) == size + 1, "one in reserve"
    assert len({session(facts, a) for a in anchors}) == min(size + 1, len(lengths))
    assert policy.choose_anchors(facts, anchors) == anchors, "choosing again changes nothing"
    jobs = policy.plan(facts, facts, anchors)
    assert [job.facts for job in jobs] == [(f,) for f in facts]
    prefixes = {job.facts[0].id: ids(job.prefix) for job in jobs}
    assert all(fact_id not in prefix and len(prefix) == size for fact_id, prefix in prefixes.items())
    others = {tuple(prefix) for fact_id, prefix in prefixes.items() if fact_id not in anchors}
    assert len(others) <= 1, "one list in front of every fact that is not on it"
    for prefix in others:
        assert len({session(facts, a) for a in prefix}) == min(size, len(lengths)), "the list itself is diverse"


def test_lists_of_anchors_begin_like_others() -> None:
    """What a list has behind the longest beginning that an earlier one shares is what it costs beside the fact.

    Nine anchors by hand, in order 0 to 8. The list of everybody else is 8 facts, and so is the first one that goes the
    other way, of anchor 0; those of 1, 2 and 3 differ from it in their last 1, 2 and 3. Of the others those of 4 to 8
    differ from everybody else's in their last 4, 3, 2, 1 and 0.
    """
    facts = sessions_of(*[2] * 9)
    policy = AnchorList(8)
    anchors = policy.choose_anchors(facts, ())
    jobs = policy.plan(facts, facts, anchors)
    ordered = sorted(jobs, key=lambda job: [job.facts[0].id in anchors, job.facts[0].seq])
    seen: list[list[FactId]] = []
    fresh = 0
    for job in ordered:
        prefix = ids(job.prefix)
        shared = max(
            (
                sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prefix, other, strict=True)))
                for other in seen
            ),
            default=0,
        )
        fresh += len(prefix) - shared
        seen.append(prefix)
    assert fresh == 8 + (8 + 1 + 2 + 3) + (4 + 3 + 2 + 1 + 0)


def test_four_sessions_give_four_anchors_of_different_sessions() -> None:
    facts = sessions_of(5, 5, 5, 5)
    policy = AnchorList(4)
    anchors = policy.choose_anchors(facts, ())
    (job,) = policy.plan(facts, [facts[-1]], anchors)
    assert {f.time for f in job.prefix} == {"day 0", "day 1", "day 2", "day 3"}


def test_anchors_stay_while_one_more_choice_would_cover_no_more() -> None:
    policy, facts = AnchorList(2), sessions_of(2, 2, 2)
    anchors = policy.choose_anchors(facts, ())
    for number in range(200):
        facts.append(fact(len(facts) + 1, time=f"later {number}"))
        assert policy.choose_anchors(facts, anchors) == anchors


def test_anchors_of_few_sessions_are_chosen_anew_at_four_times_the_facts() -> None:
    policy, facts = AnchorList(2), sessions_of(3)  # all three are anchors, of one session
    anchors = policy.choose_anchors(facts, ())
    while len(facts) < 11:
        facts.append(fact(len(facts) + 1, time=f"later {len(facts)}"))
        assert policy.choose_anchors(facts, anchors) == anchors
    facts.append(fact(len(facts) + 1, time="last"))  # 12 = 4 * 3
    chosen = policy.choose_anchors(facts, anchors)
    assert len({session(facts, a) for a in chosen}) == 3
    assert policy.choose_anchors(facts, chosen) == chosen


def test_an_anchor_that_is_gone_is_replaced() -> None:
    policy, facts = AnchorList(3), sessions_of(4, 4, 4, 4, 4)
    anchors = policy.choose_anchors(facts, ())
    for gone in anchors:
        left = [f for f in facts if f.id != gone]
        chosen = policy.choose_anchors(left, anchors)
        assert gone not in chosen
        assert len(set(chosen)) == 4
        assert set(chosen) <= set(ids(left))


def test_anchors_go_when_an_owner_has_too_few_facts_again() -> None:
    policy, facts = AnchorList(3), sessions_of(2, 2)
    anchors = policy.choose_anchors(facts, ())
    assert len(anchors) == 4
    assert policy.choose_anchors(facts[1:], anchors) == ()


def test_facts_before_there_are_anchors_see_those_before_them() -> None:
    facts = sessions_of(1, 3)
    jobs = AnchorList(2).plan(facts, [facts[3], facts[0], facts[1]], ())
    assert seen_by(jobs) == {
        facts[3].id: [facts[1].id, facts[2].id],
        facts[0].id: [],
        facts[1].id: [facts[0].id],
    }


def test_one_anchor_and_its_reserve() -> None:
    policy, facts = AnchorList(1), sessions_of(1, 1, 1)
    first, reserve = policy.choose_anchors(facts, ())
    assert (first, reserve) == (facts[0].id, facts[1].id)
    assert seen_by(policy.plan(facts, facts, (first, reserve))) == {
        facts[0].id: [reserve],
        facts[1].id: [first],
        facts[2].id: [first],
    }


def test_policies_look_at_the_facts_that_they_are_given_alone() -> None:
    own = sessions_of(3, 3)
    for policy in (AnchorList(2), StreamWindow(2)):
        anchors = policy.choose_anchors(own, [FactId("of another owner")] * 3)
        assert set(anchors) <= set(ids(own))
        assert {i for seen in seen_by(policy.plan(own, own, anchors)).values() for i in seen} <= set(ids(own))


def test_what_a_fact_saw_names_versions() -> None:
    a, b, c = fact(1, version=3), fact(2), fact(3, version=2)
    job = EncodeJob((a,), (b, c))
    assert job.saw(0) == (("fact-1", 3),)
    assert job.saw(1) == (("fact-1", 3), ("fact-2", 1))


@pytest.mark.parametrize("spec", ["anchor:1", "anchor:32", "window:0", "window:16"])
def test_a_policy_is_known_by_its_name(spec: str) -> None:
    assert parse_policy(spec).name == spec


@pytest.mark.parametrize(
    "spec",
    ["", "anchor", "anchor:", "anchor:0", "anchor:-1", "anchor:4.5", "window:-1", "window: 2", "list:4", "window:٣"],
)
def test_other_policies_are_refused_by_name(spec: str) -> None:
    with pytest.raises(ValueError, match="anchor:N") as raised:
        parse_policy(spec)
    assert repr(spec) in str(raised.value)
