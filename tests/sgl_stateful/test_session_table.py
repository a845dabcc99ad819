import pytest
from session_values import ANA, BO, Clock, header, segment, table

from memstore.session_log import LogEntry
from sgl_stateful.errors import (
    BadSessionRequest,
    PinRefused,
    SessionClosed,
    SessionExpired,
    SessionNotFound,
    SessionTooLong,
    SessionVersionConflict,
)
from sgl_stateful.sessions.chain import segments
from sgl_stateful.sessions.session import Session
from sgl_stateful.sessions.table import SessionTable


def opened(sessions: SessionTable, name: str, *parts: tuple[int, ...], owner: str = ANA, **more: object) -> Session:
    change = sessions.open(header(name, owner, **more), [segment(*part, kind="prefix") for part in parts])
    sessions.commit(change)
    return change.session


def appended(sessions: SessionTable, session: Session, *parts: tuple[int, ...]) -> None:
    sessions.commit(sessions.append(session, [segment(*part) for part in parts]))


def contents(session: Session) -> list[tuple[int, ...]]:
    return [tuple(part.token_ids.tolist()) for part in segments(session.head)]


# ---- content and versions ----


def test_versions_count_up_and_content_grows() -> None:
    sessions = table()
    session = opened(sessions, "a", (1, 2))
    appended(sessions, session, (3,), (4, 5))
    assert (session.version, session.token_ids()) == (2, [1, 2, 3, 4, 5])
    appended(sessions, session, (6,))
    assert (session.version, session.token_ids(), session.num_tokens) == (3, [1, 2, 3, 4, 5, 6], 6)


def test_a_change_says_how_it_follows_from_an_earlier_version() -> None:
    sessions = table()
    session = opened(sessions, "a", (1, 2))
    appended(sessions, session, (3,))
    change = sessions.append(session, [segment(4)])
    assert change.entry == LogEntry(3, 2, 2, (segment(4),))
    assert (change.appended_tokens, change.token_ids()) == (1, [1, 2, 3, 4])
    sessions.abandon(change)
    assert sessions.rewind(session, 1).entry == LogEntry(3, 1, 1, ())


def test_an_abandoned_change_leaves_no_trace() -> None:
    sessions = table()
    session = opened(sessions, "a", (1, 2))
    before = (session.version, session.token_ids(), sessions.ledger.pinned)
    sessions.abandon(sessions.append(session, [segment(*range(50))]))
    assert (session.version, session.token_ids(), sessions.ledger.pinned) == before


def test_rewinding_makes_a_new_version_with_the_old_content() -> None:
    sessions = table()
    session = opened(sessions, "a", (1, 2))
    appended(sessions, session, (3,))
    appended(sessions, session, (4,))
    sessions.commit(sessions.rewind(session, 2))
    assert (session.version, session.token_ids()) == (4, [1, 2, 3])
    appended(sessions, session, (9,))
    assert (session.version, session.token_ids()) == (5, [1, 2, 3, 9])
    sessions.commit(sessions.rewind(session, 3))
    assert session.token_ids() == [1, 2, 3, 4]


@pytest.mark.parametrize("version", [0, -1, 3, 99])
def test_a_version_that_is_not_kept_cannot_be_gone_back_to(version: int) -> None:
    sessions = table()
    session = opened(sessions, "a", (1, 2))
    appended(sessions, session, (3,))
    with pytest.raises(BadSessionRequest, match="there are 1 to 2"):
        sessions.rewind(session, version)
    assert (session.version, session.token_ids()) == (2, [1, 2, 3])


def test_only_so_many_versions_are_kept() -> None:
    sessions = table(versions=3)
    session = opened(sessions, "a", (1,))
    for token in range(2, 7):
        appended(sessions, session, (token,))
    with pytest.raises(BadSessionRequest, match="there are 4 to 6"):
        sessions.rewind(session, 3)
    sessions.commit(sessions.rewind(session, 4))
    assert session.token_ids() == [1, 2, 3, 4]


def test_if_version_guards() -> None:
    sessions = table()
    session = opened(sessions, "a", (1,))
    with pytest.raises(SessionVersionConflict, match="has version 1, not 2"):
        sessions.append(session, [segment(2)], if_version=2)
    with pytest.raises(SessionVersionConflict):
        sessions.rewind(session, 1, if_version=7)
    sessions.commit(sessions.append(session, [segment(2)], if_version=1))
    assert session.version == 2


def test_a_session_does_not_outgrow_the_model() -> None:
    sessions = table(max_tokens=10)
    with pytest.raises(SessionTooLong, match="11 tokens; the limit of this server is 10"):
        sessions.open(header("a"), [segment(*range(11))])
    session = opened(sessions, "a", (1,) * 8)
    with pytest.raises(SessionTooLong):
        sessions.append(session, [segment(1, 2, 3)])
    appended(sessions, session, (1, 2))
    assert (session.num_tokens, sessions.ledger.pinned) == (10, 10)


# ---- the data region ----


def test_the_oldest_data_leaves_at_message_boundaries_and_the_prefix_stays() -> None:
    sessions = table()
    session = opened(sessions, "a", (1, 1, 1), window_tokens=10)
    for token in (2, 3, 4):
        appended(sessions, session, (token,) * 3)
    assert contents(session) == [(1, 1, 1), (2,) * 3, (3,) * 3, (4,) * 3]  # 9 of 10
    appended(sessions, session, (5,) * 2)
    # 11 are too many; down to half of 10: the last 3 of the old would make 5 with the new 2.
    assert contents(session) == [(1, 1, 1), (4,) * 3, (5,) * 2]
    assert (session.dropped_messages, session.dropped_tokens) == (2, 6)
    assert sessions.ledger.pinned == 8


def test_a_window_is_refused_what_never_fits_it() -> None:
    sessions = table()
    session = opened(sessions, "a", (1,), window_tokens=4)
    with pytest.raises(SessionTooLong, match="5 tokens at once do not fit a window of 4"):
        sessions.append(session, [segment(1, 2, 3, 4, 5)])
    appended(sessions, session, (1, 2, 3, 4))
    appended(sessions, session, (5, 6, 7))
    assert contents(session) == [(1,), (5, 6, 7)]


def test_a_long_stream_through_a_window_prefills_each_token_about_twice() -> None:
    sessions = table(budget=10_000, max_tokens=10_000)
    session = opened(sessions, "a", (0,) * 20, window_tokens=200)
    prefilled = appended_tokens = 0
    for token in range(1, 400):
        change = sessions.append(session, [segment(*(token,) * 10)])
        # What of the new content is not at its place already.
        prefilled += sum(map(len, change.entry.segments))
        appended_tokens += change.appended_tokens
        sessions.commit(change)
        assert session.num_tokens <= 220
    # Between two moves the window goes from half full to full: 10 messages; the eleventh moves 9 along.
    assert prefilled / appended_tokens == pytest.approx((11 + 9) / 11, abs=0.05)


# ---- cells ----


def test_forks_share_the_cells_of_what_they_have_in_common() -> None:
    sessions = table()
    parent = opened(sessions, "a", (1,) * 100)
    appended(sessions, parent, (2,) * 10)
    fork = sessions.open(header("b"), (), base=sessions.at(parent, 1))
    sessions.commit(fork)
    assert sessions.ledger.pinned == 110
    appended(sessions, fork.session, (3,) * 5)
    assert sessions.ledger.pinned == 115
    sessions.close(parent)
    assert sessions.ledger.pinned == 105
    sessions.close(fork.session)
    assert sessions.ledger.pinned == 0


def test_owners_share_no_cells() -> None:
    sessions = table()
    opened(sessions, "a", (1,) * 100, owner=ANA)
    opened(sessions, "b", (1,) * 100, owner=BO)
    assert (sessions.ledger.pinned, dict(sessions.ledger.by_owner)) == (200, {ANA: 100, BO: 100})


def test_three_sessions_of_forty_percent() -> None:
    """Case S1: the third is refused with the numbers, or demoted with them."""
    sessions = table(budget=1000)
    opened(sessions, "a", (1,) * 400)
    opened(sessions, "b", (2,) * 400)
    with pytest.raises(PinRefused) as refused:
        sessions.open(header("c"), [segment(*(3,) * 400)])
    numbers = refused.value.numbers
    assert (numbers.needed, numbers.pinned, numbers.budget, numbers.owner_pinned) == (400, 800, 1000, 800)
    assert not refused.value.is_of_owner
    demoted = opened(sessions, "c", (3,) * 400, on_full="demote")
    assert (demoted.pin_state, demoted.demoted, sessions.ledger.pinned) == ("unpinned", numbers, 800)
    sessions.close(sessions.get("a", owner=ANA))
    appended(sessions, demoted, (4,))
    assert (demoted.pin_state, sessions.ledger.pinned) == ("pinned", 801)


def test_a_quota_holds_for_one_owner_alone() -> None:
    sessions = table(budget=1000, quota=300)
    opened(sessions, "a", (1,) * 250, owner=ANA)
    with pytest.raises(PinRefused, match="by this owner") as refused:
        opened(sessions, "b", (2,) * 51, owner=ANA)
    assert refused.value.is_of_owner
    opened(sessions, "c", (2,) * 51, owner=BO)


def test_a_reservation_is_growth_paid_for_in_advance() -> None:
    sessions = table(budget=100)
    session = opened(sessions, "a", (1,) * 10, reserve_tokens=90)
    assert (sessions.ledger.pinned, sessions.ledger.reserved) == (90, 80)
    with pytest.raises(PinRefused):
        opened(sessions, "b", (2,) * 11)
    appended(sessions, session, (3,) * 80)
    assert (sessions.ledger.pinned, sessions.ledger.reserved) == (90, 0)
    appended(sessions, session, (4,) * 10)
    with pytest.raises(PinRefused) as refused:
        sessions.append(session, [segment(5)])
    assert (refused.value.numbers.needed, refused.value.numbers.pinned) == (1, 100)
    assert session.num_tokens == 100


def test_a_change_claims_what_it_keeps_and_what_it_becomes() -> None:
    """The former pin stands until the next one does, so both are in the pool at once."""
    sessions = table(budget=100)
    session = opened(sessions, "a", (1,) * 10, window_tokens=60)
    appended(sessions, session, (2,) * 30, (3,) * 30)
    assert sessions.ledger.pinned == 70
    change = sessions.append(session, [segment(*(4,) * 10)])
    # 10 + 30 + 30 as they are; the window moves to (prefix, the new 10): 10 more.
    assert sessions.ledger.pinned == 80
    sessions.commit(change)
    assert (contents(session), sessions.ledger.pinned) == ([(1,) * 10, (4,) * 10], 20)


def test_where_both_do_not_fit_the_old_content_gives_way() -> None:
    sessions = table(budget=80)
    session = opened(sessions, "a", (1,) * 10, window_tokens=60)
    appended(sessions, session, (2,) * 30, (3,) * 30)
    change = sessions.append(session, [segment(*(4,) * 20)])
    # 10 + 30 + 30 as they are and 20 more are too many; (prefix, the new 20) alone are not.
    assert (change.gives_way, change.pin, sessions.ledger.pinned) == (True, True, 30)
    sessions.abandon(change)
    assert (session.pin_state, sessions.ledger.pinned) == ("pinned", 70)
    change = sessions.append(session, [segment(*(4,) * 20)])
    opened(sessions, "b", (5,) * 20)
    sessions.abandon(change)  # others were quicker
    assert (session.pin_state, sessions.ledger.pinned) == ("unpinned", 20)


def test_a_turn_claims_its_answer_before_it_is_known() -> None:
    sessions = table(budget=100)
    session = opened(sessions, "a", (1,) * 50)
    assert sessions.reserve(session, 40) is None
    assert sessions.ledger.pinned == 90
    with pytest.raises(PinRefused):
        opened(sessions, "b", (2,) * 11)
    appended(sessions, session, (3,) * 25)
    assert sessions.ledger.pinned == 75
    with pytest.raises(PinRefused):
        sessions.reserve(session, 26)
    assert sessions.ledger.pinned == 75


def test_unpinned_sessions_cost_nothing_until_they_are_pinned() -> None:
    sessions = table(budget=100)
    session = opened(sessions, "a", (1,) * 80, is_pinned=False)
    other = opened(sessions, "b", (2,) * 80)
    assert sessions.ledger.pinned == 80
    with pytest.raises(PinRefused):
        sessions.pin(session)
    assert not session.is_pinned
    sessions.pin(session, demote=True)
    assert (session.pin_state, session.demoted is not None) == ("unpinned", True)
    sessions.unpin(other)
    sessions.pin(session)
    assert (session.pin_state, sessions.ledger.pinned) == ("lost", 80)


# ---- life ----


def test_idle_time_and_age_end_a_session() -> None:
    clock = Clock(1000.0)
    sessions = table(clock=clock)
    idle = opened(sessions, "a", (1,), clock=clock, ttl_s=10.0)
    aged = opened(sessions, "b", (2,), clock=clock, ttl_s=10.0, max_age_s=25.0)
    opened(sessions, "c", (3,), clock=clock)
    clock.now = 1009.0
    sessions.touch(aged)
    assert (idle.expires_at(), aged.expires_at()) == (1010.0, 1019.0)
    clock.now = 1010.0
    with pytest.raises(SessionExpired):
        sessions.get("a", owner=ANA)
    assert [(session.header.id, why) for session, why in sessions.expired()] == [("a", "idle")]
    clock.now = 1018.0
    sessions.touch(aged)
    assert aged.expires_at() == 1025.0
    clock.now = 1025.0
    with pytest.raises(SessionExpired):
        sessions.get("b", owner=ANA)
    clock.now = 1e9
    assert sessions.get("c", owner=ANA).expires_at() is None


def test_whoever_answers_is_not_idle() -> None:
    clock = Clock(0.0)
    sessions = table(clock=clock)
    session = opened(sessions, "a", (1,), clock=clock, ttl_s=10.0, max_age_s=50.0)
    session.uses += 1
    clock.now = 20.0
    assert sessions.get("a", owner=ANA) is session
    assert sessions.expired() == []
    clock.now = 60.0
    with pytest.raises(SessionExpired):  # its age lets nothing new begin, and what runs may end
        sessions.get("a", owner=ANA)
    assert sessions.expired() == []
    session.uses -= 1
    assert sessions.expired() == [(session, "age")]


def test_the_ended_are_told_how_and_strangers_nothing() -> None:
    clock = Clock()
    sessions = table(clock=clock)
    closed, expired = opened(sessions, "a", (1,)), opened(sessions, "b", (2,))
    sessions.close(closed)
    sessions.close(expired, how="expired")
    for name, kind in [("a", SessionClosed), ("b", SessionExpired)]:
        with pytest.raises(kind):
            sessions.get(name, owner=ANA)
        with pytest.raises(kind):
            sessions.get(name, owner=None)
        with pytest.raises(SessionNotFound) as unknown:
            sessions.get(name, owner=BO)
        assert type(unknown.value) is SessionNotFound
    assert sessions.ledger.pinned == 0


def test_a_foreign_session_looks_like_none() -> None:
    sessions = table()
    opened(sessions, "a", (1,))
    with pytest.raises(SessionNotFound) as foreign:
        sessions.get("a", owner=BO)
    with pytest.raises(SessionNotFound) as unknown:
        sessions.get("b", owner=BO)
    assert str(foreign.value) == str(unknown.value)


def test_a_session_that_ended_takes_no_change_that_was_under_way() -> None:
    sessions = table()
    session = opened(sessions, "a", (1,))
    change = sessions.append(session, [segment(2)])
    sessions.close(session)
    with pytest.raises(SessionClosed):
        sessions.commit(change)
    assert (session.version, sessions.ledger.pinned, len(sessions)) == (1, 0, 0)


# ---- restoring ----


def test_a_session_comes_back_from_its_log() -> None:
    sessions, entries = table(), []
    session = opened(sessions, "a", (1, 2), window_tokens=6)
    entries.append(LogEntry(1, 0, 0, (segment(1, 2, kind="prefix"),)))
    for part in [(3, 3), (4, 4), (5, 5, 5)]:
        change = sessions.append(session, [segment(*part)])
        entries.append(change.entry)
        sessions.commit(change)
    change = sessions.rewind(session, 2)
    entries.append(change.entry)
    sessions.commit(change)
    restored = table().restore(session.header, entries)
    assert restored.version == 5
    assert {v: contents_of(restored, v) for v in restored.versions} == {v: contents_of(session, v) for v in range(1, 6)}
    assert (restored.pin_state, restored.lost) == ("lost", "restarted")


def contents_of(session: Session, version: int) -> list[tuple[int, ...]]:
    return [tuple(part.token_ids.tolist()) for part in segments(session.versions[version])]


def test_a_restored_session_that_does_not_fit_is_demoted() -> None:
    sessions = table(budget=3)
    restored = sessions.restore(header("a"), [LogEntry(1, 0, 0, (segment(1, 2, 3, 4),))])
    assert (restored.pin_state, sessions.ledger.pinned) == ("lost", 0)  # not counted before it is used
    sessions.wake(restored)
    assert (restored.pin_state, sessions.ledger.pinned) == ("unpinned", 0)
    assert restored.demoted is not None
    assert restored.demoted.needed == 4


def test_a_restored_fork_shares_cells_again() -> None:
    sessions = table()
    parent, fork = segment(*range(30)), segment(*range(40, 45))
    for name, parts in [("a", (parent,)), ("b", (parent, fork))]:
        sessions.wake(sessions.restore(header(name), [LogEntry(1, 0, 0, parts)]))
    assert sessions.ledger.pinned == 35
