"""Order of a prefill pass: aging, groups, and who waits for a shared prefix."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_stateful.sessions.ordering import WORTH_WAITING_TOKENS, PrefillPass, Waiting, plan_pass, shared_tokens

AGING_S = 5.0


def ids(*runs: tuple[int, int]) -> np.ndarray:
    """Token ids: ``count`` times the same id, run after run."""
    return np.concatenate([np.full(count, token) for token, count in runs])


def alone(arrival: float, tokens: int = 100) -> Waiting:
    return Waiting(arrival, 0, None, ids((1, tokens)), 0)


def member(
    arrival: float, prompt: np.ndarray | None = None, *, group: str = "g", cached: int = 0, priority: int = 0
) -> Waiting:
    """By default a prompt of which the cache has all, so that nobody waits for it."""
    if prompt is None:
        prompt, cached = ids((1, 100)), 100
    return Waiting(arrival, priority, group, prompt, cached)


def planned(*waiting: Waiting, now: float = 0.0, under_way: tuple[Waiting, ...] = ()) -> PrefillPass:
    return plan_pass(waiting, now=now, aging_s=AGING_S, under_way=under_way)


def test_nobody_waits() -> None:
    assert planned() == ([], frozenset())


@pytest.mark.parametrize(
    ("waiting", "now", "order"),
    [
        pytest.param([alone(2.0), alone(1.0)], 3.0, [1, 0], id="arrival"),
        pytest.param([alone(1.0), member(2.0, priority=1)], 3.0, [1, 0], id="priority"),
        pytest.param([alone(0.0), member(2.0, priority=1)], 4.9, [1, 0], id="not a whole step yet"),
        pytest.param([alone(0.0), member(2.0, priority=1)], 5.0, [0, 1], id="a step, and older"),
        pytest.param([alone(0.0), member(2.0, priority=1)], 7.0, [1, 0], id="both a step older"),
        pytest.param([alone(0.0), member(0.0, priority=-2)], 9.0, [0, 1], id="low priority"),
        pytest.param([member(1.0), alone(2.0), member(3.0)], 3.0, [0, 2, 1], id="a group goes with its oldest"),
        pytest.param([member(0.0), alone(2.0), member(3.0)], 5.0, [0, 2, 1], id="unless it has aged away"),
        pytest.param([alone(1.0), alone(1.0)], 1.0, [0, 1], id="stable"),
        pytest.param([alone(9.0), alone(8.0)], 0.0, [1, 0], id="a clock that is behind"),
    ],
)
def test_the_order(waiting: list[Waiting], now: float, order: list[int]) -> None:
    assert planned(*waiting, now=now) == (order, frozenset())


LONG = ids((1, 100))


@pytest.mark.parametrize(
    ("leader", "follower", "is_held"),
    [
        pytest.param(LONG, LONG, True, id="the same prompt"),
        pytest.param(ids((1, 32), (2, 9)), ids((1, 32), (3, 9)), True, id="just long enough"),
        pytest.param(ids((1, 31), (2, 9)), ids((1, 31), (3, 9)), False, id="one too short"),
        pytest.param(ids((1, 31), (2, 9)), ids((1, 20), (3, 1), (1, 10), (2, 9)), False, id="alike further on alone"),
        pytest.param(ids((1, 20)), LONG, False, id="a short leader"),
        pytest.param(LONG, ids((1, 32)), True, id="all of the follower"),
        pytest.param(ids((2, 100)), LONG, False, id="nothing in common"),
    ],
)
def test_whoever_shares_enough_waits(leader: np.ndarray, follower: np.ndarray, is_held: bool) -> None:
    plan = planned(member(1.0, leader), member(2.0, follower))
    assert plan == ([0, 1], frozenset({1} if is_held else ()))


@pytest.mark.parametrize(
    ("of_leader", "of_follower", "is_held"), [(68, 68, True), (69, 69, False), (0, 69, False), (69, 0, False)]
)
def test_what_is_cached_is_not_waited_for(of_leader: int, of_follower: int, is_held: bool) -> None:
    plan = planned(member(1.0, LONG, cached=of_leader), member(2.0, LONG, cached=of_follower))
    assert plan.held_back == frozenset({1} if is_held else ())


def test_other_groups_and_strangers_share_nothing() -> None:
    plan = planned(alone(1.0), alone(1.0), member(2.0, LONG), member(3.0, LONG, group="h"))
    assert plan.held_back == frozenset()


def test_one_goes_ahead_and_all_others_wait_for_it() -> None:
    prompts = [ids((1, 40), (token, 40)) for token in (2, 3, 4)]
    plan = planned(*(member(float(i), prompt) for i, prompt in enumerate(prompts)))
    assert plan == ([0, 1, 2], frozenset({1, 2}))


def test_one_waits_for_what_is_under_way() -> None:
    plan = planned(member(2.0, LONG), member(3.0, LONG, group="h"), under_way=(member(1.0, LONG),))
    assert plan == ([0, 1], frozenset({0}))
    assert planned(member(2.0, LONG, cached=90), under_way=(member(1.0, LONG),)).held_back == frozenset()
    assert planned(alone(2.0), under_way=(alone(1.0),)).held_back == frozenset()


def test_a_higher_priority_leads_its_group() -> None:
    assert planned(member(1.0, LONG), member(2.0, LONG, priority=3)) == ([1, 0], frozenset({0}))


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_shared_tokens(a: list[int], b: list[int]) -> None:
    together = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        together += 1
    assert shared_tokens(np.array(a, dtype=np.int64), np.array(b, dtype=np.int64)) == together


prompts = st.lists(st.tuples(st.integers(1, 2), st.sampled_from([8, 31, 32, 40])), min_size=1, max_size=3)


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(-2, 2), st.sampled_from(["g", "h"]), prompts), max_size=8))
def test_each_that_waits_has_somebody_to_wait_for(given_: list[tuple[float, int, str, list[tuple[int, int]]]]) -> None:
    waiting = [Waiting(at, priority, group, ids(*runs), 0) for at, priority, group, runs in given_]
    plan = planned(*waiting, now=20.0)
    assert sorted(plan.order) == list(range(len(waiting)))
    steps = [int((20.0 - waiting[i].arrival) // AGING_S) + waiting[i].priority for i in plan.order]
    assert steps == sorted(steps, reverse=True)
    going: list[Waiting] = []
    for i in plan.order:
        one = waiting[i]
        shares = any(
            other.group == one.group and shared_tokens(other.token_ids, one.token_ids) >= WORTH_WAITING_TOKENS
            for other in going
        )
        assert shares == (i in plan.held_back)
        if not shares:
            going.append(one)


@pytest.mark.parametrize("capacity", [1, 4])
@pytest.mark.parametrize("cached", [0, 300], ids=["cold", "cached"])
def test_a_flood_of_one_owner_does_not_starve_another(capacity: int, cached: int) -> None:
    """Each pass admits ``capacity`` requests, and as many more of the flooding group arrive; a pass takes 0.1 s."""
    rng = np.random.default_rng(7)

    def flooding(arrival: float) -> Waiting:
        return member(arrival, np.concatenate([ids((1, 300)), rng.integers(2, 1000, 64)]), group="flood", cached=cached)

    older = 20
    single = alone(0.0)
    queue = [*(flooding(-0.01 * (older - i)) for i in range(older)), single]
    now, before, seconds = 0.0, 0, 0.0
    while single in queue:
        plan = planned(*queue, now=now)
        admitted = [i for i in plan.order if i not in plan.held_back][:capacity]
        if single not in (queue[i] for i in admitted):
            before += len(admitted)
        queue = [request for i, request in enumerate(queue) if i not in admitted]
        now += 0.1
        seconds += 0.1
        queue += [flooding(now) for _ in range(capacity)]
        assert seconds < 60.0, "starved"
    # At most those that had come first; the last pass of theirs may be filled up from their group.
    assert before <= older + (capacity - 1)


def test_a_high_priority_flood_is_outlived() -> None:
    """Priority 3 is three steps: after 15 s the single one has them too, and came first."""
    single, now = alone(0.0), 0.0
    queue = [single, member(0.0, priority=3)]
    while queue[planned(*queue, now=now).order[0]] is not single:
        now += 0.5
        queue = [single, member(now, priority=3)]
        assert now < 60.0, "starved"
    assert now == 15.0
