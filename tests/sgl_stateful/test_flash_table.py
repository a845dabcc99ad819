"""What each event does to questions and answers, one by one."""

from typing import Any

import pytest
from flash_world import answered, question
from session_values import Clock

from sgl_stateful.errors import FlashExists, FlashLimitReached, FlashNotFound, FlashReaderTooSlow
from sgl_stateful.flash.answers import Answer, FactVersions, Present
from sgl_stateful.flash.choices import choices_of
from sgl_stateful.flash.entry import Entry
from sgl_stateful.flash.outcomes import Hit, Miss
from sgl_stateful.flash.table import FlashTable
from sgl_stateful.params import MemoryParams

V1, V2, V3 = (Present(version, 0, "w") for version in (1, 2, 3))
CHOICES = choices_of(["up", "down"], lambda text: [*text.encode()])
SEARCH, NAMED = MemoryParams(owner="ana"), MemoryParams(owner="ana", facts=("f1",))


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def table(clock: Clock) -> FlashTable:
    return make(clock)


def make(clock: Clock, **more: Any) -> FlashTable:
    values: dict[str, Any] = {"limit": 8, "owner_limit": 5, "audit_every": 1, "chance": lambda: 0.99, **more}
    return FlashTable(clock=clock, **values)


def register(table: FlashTable, name: str = "q", session: str = "s", owner: str = "ana", **more: Any) -> Entry:
    values: dict[str, Any] = {"word": name, **more}
    return table.register(session, owner, question(name, **values), data_version=1)


def evaluate(
    table: FlashTable, present: Present = V1, facts: FactVersions = (), answer: Answer | None = None
) -> list[Entry]:
    """Evaluate the next batch, all of it."""
    batch = table.take()
    for entry in batch:
        if (run := table.begin(entry, present, facts)) is not None:
            table.evaluated(run, answer or answered())
    return batch


def found(table: FlashTable, entry: Entry, present: Present = V1, **more: Any) -> Hit | Miss | None:
    return table.find(entry.session_id, entry.question.ask(is_first=present.is_first), present=present, **more)


def cause(outcome: Hit | Miss | None) -> str:
    assert isinstance(outcome, Miss), outcome
    return outcome.cause


# ---- the life of an answer ----


def test_an_answer_is_served_at_its_version_alone(table: FlashTable, clock: Clock) -> None:
    entry = register(table)
    assert cause(found(table, entry)) == "not_ready"
    evaluate(table)
    hit = found(table, entry)
    assert isinstance(hit, Hit)
    assert (hit.stored.answer.text, hit.staleness_s) == ("yes", 0.0)
    table.changed("s", 2)
    assert cause(found(table, entry, V2)) == "version"
    evaluate(table, V2)
    assert isinstance(found(table, entry, V2), Hit)
    assert cause(found(table, entry, V1)) == "version"


@pytest.mark.parametrize(
    "present", [V1._replace(owner_epoch=1), V1._replace(weight_version="v"), V1._replace(is_first=True)]
)
def test_nothing_else_of_the_session_may_differ(table: FlashTable, present: Present) -> None:
    entry = register(table)
    evaluate(table)
    assert cause(found(table, entry, present, max_staleness_s=1e9)) == "not_ready"


def test_no_answer_while_weights_are_updated(table: FlashTable) -> None:
    entry = register(table)
    evaluate(table)
    assert cause(found(table, entry, V1._replace(weight_version=None))) == "weights"


def test_other_parameters_are_another_question(table: FlashTable) -> None:
    entry = register(table)
    evaluate(table)
    ask = entry.question.ask(is_first=False)
    other = question("q", "q", '{"top_p":0.5}').ask(is_first=False)
    assert other.prompt == ask.prompt
    assert cause(table.find("s", other, present=V1)) == "sampling"
    assert table.find("s", question(word="else").ask(is_first=False), present=V1) is None
    assert table.find("another", ask, present=V1) is None


def test_staleness_counts_from_when_the_version_was_left(table: FlashTable, clock: Clock) -> None:
    entry = register(table)
    evaluate(table)
    clock.now += 50
    table.changed("s", 2)
    clock.now += 3
    table.changed("s", 3)
    clock.now += 1
    hit = found(table, entry, V3, max_staleness_s=4.0)
    assert isinstance(hit, Hit)
    assert hit.staleness_s == 4.0
    assert cause(found(table, entry, V3, max_staleness_s=3.9)) == "version"


def test_what_runs_when_the_session_changes_is_stale_from_then_on(table: FlashTable, clock: Clock) -> None:
    entry = register(table)
    [taken] = table.take()
    run = table.begin(taken, V1)
    assert run is not None
    clock.now += 1
    table.changed("s", 2)
    clock.now += 2
    assert table.evaluated(run, answered()) is not None
    hit = found(table, entry, V2, max_staleness_s=2.0)
    assert isinstance(hit, Hit)
    assert hit.staleness_s == 2.0
    assert cause(found(table, entry, V2)) == "version"


def test_an_answer_of_an_earlier_version_does_not_displace_a_later_one(table: FlashTable) -> None:
    entry = register(table)
    [taken] = table.take()
    early = table.begin(taken, V1)
    assert early is not None
    table.put_back(taken)
    table.changed("s", 2)
    evaluate(table, V2, answer=answered("later"))
    assert table.evaluated(early, answered("early")) is None
    hit = found(table, entry, V2)
    assert isinstance(hit, Hit)
    assert hit.stored.answer.text == "later"


# ---- what makes void, and what does not ----


def test_a_flush_and_new_weights_make_all_void(table: FlashTable) -> None:
    for invalidate in (table.flushed, table.weights_changed):
        entries = [register(table, session="s"), register(table, session="t")]
        evaluate(table)
        evaluate(table)
        assert all(entry.stored is not None for entry in entries)
        invalidate()
        assert [entry.stored for entry in entries] == [None, None]
        assert len(table.queue) == 2
        for entry in entries:
            table.remove(entry)


def test_new_weights_are_learnt_anew_and_a_flush_is_not(table: FlashTable) -> None:
    entry = register(table, choices=CHOICES, target=0.9)
    table.observed(entry, 1.0, agreed=True)
    entry.audit.saw(agreed=True)
    table.flushed()
    assert entry.gate is not None
    assert (len(entry.gate), entry.audit.audited) == (1, 1)
    table.weights_changed()
    assert (len(entry.gate), entry.audit.audited) == (0, 0)


def test_what_runs_during_a_flush_or_an_update_of_weights_is_not_kept(table: FlashTable) -> None:
    entry = register(table)
    for invalidate in (table.flushed, table.weights_changed, lambda: table.purged("ana")):
        [taken] = table.take()
        run = table.begin(taken, V1)
        assert run is not None
        invalidate()
        assert table.evaluated(run, answered()) is None
        assert entry.stored is None
        assert table.queue.wanted(entry) is not None


def test_a_purge_makes_void_what_is_the_owners(table: FlashTable) -> None:
    mine, theirs = register(table, session="s"), register(table, session="t", owner="bo")
    evaluate(table)
    evaluate(table)
    table.purged("ana")
    assert mine.stored is None
    assert theirs.stored is not None


def test_the_end_of_a_session_ends_its_questions(table: FlashTable) -> None:
    entry, other = register(table), register(table, session="t")
    [taken] = table.take()
    run = table.begin(taken, V1)
    assert run is not None
    log = table.events.of("s")
    table.ended("s")
    assert table.evaluated(run, answered()) is None
    with pytest.raises(FlashNotFound):
        table.registrations.get("s", "q")
    assert table.registrations.everyone() == [other]
    assert log.is_ended
    assert table.find("s", entry.question.ask(is_first=False), present=V1) is None


def test_a_fact_makes_void_the_answers_that_it_stood_in(table: FlashTable) -> None:
    named, search, plain = (register(table, name, memory=m) for name, m in (("n", NAMED), ("s", SEARCH), ("p", None)))
    facts = {"n": (("f1", 1),), "s": (("f2", 1),), "p": ()}
    for entry in table.take():
        run = table.begin(entry, V1, facts[entry.name])
        assert run is not None
        table.evaluated(run, answered())
    table.facts_changed("ana", "f1")
    assert [entry.stored is None for entry in (named, search, plain)] == [True, False, False]
    assert set(table.queue) == {named, search}  # the search may find it from now on
    table.facts_changed("bo", "f2")
    assert search.stored is not None
    table.facts_changed("ana", "f2")
    assert [entry.stored is None for entry in (search, plain)] == [True, False]


def test_a_fact_that_changes_during_a_run_makes_it_void(table: FlashTable) -> None:
    entry = register(table, memory=SEARCH)
    [taken] = table.take()
    run = table.begin(taken, V1, (("f2", 1),))
    assert run is not None
    table.facts_changed("ana", "f2")
    assert table.evaluated(run, answered()) is None
    assert table.queue.wanted(entry) is not None


def test_new_facts_have_a_search_looked_at_again(table: FlashTable) -> None:
    named, search = register(table, "n", memory=NAMED), register(table, "s", memory=SEARCH)
    evaluate(table, facts=(("f1", 1),))
    table.facts_changed("ana", None)
    assert set(table.queue) == {search}
    [taken] = table.take()
    assert table.begin(taken, V1, (("f1", 1),)) is None  # the same: its answer holds
    assert isinstance(found(table, search, facts=(("f1", 1),)), Hit)
    assert cause(found(table, search, facts=(("f1", 2),))) == "facts"
    assert cause(found(table, search, facts=(("f2", 1), ("f1", 1)))) == "facts"
    assert isinstance(found(table, named, facts=(("f1", 1),)), Hit)


def test_an_update_forgets_what_was_known_and_puts_back_into_service(table: FlashTable) -> None:
    entry = register(table)
    [taken] = table.take()
    run = table.begin(taken, V1)
    assert run is not None
    table.update(entry, question("q", "another"))
    assert entry.template_version != run.key.template_version
    assert table.evaluated(run, answered()) is None
    assert table.find("s", question(word="q").ask(is_first=False), present=V1) is None
    evaluate(table)
    assert isinstance(found(table, entry), Hit)
    entry.retired = "for a reason"
    table.update(entry, question("q", "another"))
    assert entry.retired is None
    assert cause(found(table, entry)) == "not_ready"  # the words are the same, and the registration is not


# ---- refusals ----


def test_names_and_questions_are_taken_once_a_session(table: FlashTable) -> None:
    register(table, "q")
    with pytest.raises(FlashExists, match="'q'"):
        register(table, "q", word="else")
    with pytest.raises(FlashExists, match="very same"):
        register(table, "other", word="q")
    register(table, "other", word="q", sampling='{"top_p":0.5}')
    register(table, "q", session="t")
    entry = register(table, "third")
    with pytest.raises(FlashExists, match="very same"):
        table.update(entry, question("third", "q"))
    assert entry.question.behind.tail == tuple(b"third")


def test_limits_are_refused_with_the_numbers(table: FlashTable) -> None:
    for n in range(5):
        register(table, f"q{n}", session=f"s{n % 2}")
    with pytest.raises(FlashLimitReached, match="5 of 5 questions are registered by this owner") as refused:
        register(table, "more")
    numbers = refused.value.numbers
    assert (numbers.registered, numbers.limit, numbers.owner_registered, numbers.owner_limit) == (5, 8, 5, 5)
    for n in range(3):
        register(table, f"q{n}", session="t", owner="bo")
    with pytest.raises(FlashLimitReached, match="8 of 8 questions are registered:"):
        register(table, "more", session="t", owner="bo")
    table.remove(table.registrations.get("t", "q0"))
    register(table, "more", session="t", owner="bo")


def test_a_million_registrations_are_refused_one_by_one(clock: Clock) -> None:
    table, refused = make(clock, limit=1000, owner_limit=1000), 0
    for n in range(10_000):
        try:
            register(table, f"q{n}")
        except FlashLimitReached:
            refused += 1
    assert refused == 9000
    assert len(table.registrations) == 1000


# ---- the line ----


def test_changes_are_coalesced_to_the_newest_version(table: FlashTable) -> None:
    entry = register(table)
    for version in (2, 3):
        table.changed("s", version)
    assert len(table.queue) == 1
    evaluate(table, V3)
    assert entry.stored is not None
    assert entry.stored.key.present == V3
    assert len(table.queue) == 0


def test_a_batch_is_of_one_session_and_no_longer_than_allowed(clock: Clock) -> None:
    table = make(clock, batch=2)
    for name in ("a", "b", "c"):
        register(table, name)
    register(table, "d", session="t")
    assert [len(evaluate(table)) for _ in range(4)] == [2, 1, 1, 0]


def test_what_is_worth_more_goes_first_until_another_has_waited(clock: Clock) -> None:
    table = make(clock, batch=1, aging_s=10.0)
    poor, rich = register(table, "poor"), register(table, "rich")
    evaluate(table)
    evaluate(table)
    for _ in range(3):
        found(table, rich)
    clock.now += 1
    table.changed("s", 2)
    assert evaluate(table, V2) == [rich]
    found(table, rich, V2)
    # The poor one is still to be done when the next change comes, and the one after it.
    clock.now += 9.5
    table.changed("s", 3)
    assert evaluate(table, V3) == [rich]
    clock.now += 1
    table.changed("s", 4)
    assert evaluate(table, V3._replace(data_version=4)) == [poor]


def test_priority_goes_before_worth(clock: Clock) -> None:
    table = make(clock, batch=1)
    register(table, "plain")
    urgent = register(table, "urgent", priority=1)
    assert evaluate(table) == [urgent]


def test_a_question_waits_for_its_interval(table: FlashTable, clock: Clock) -> None:
    entry = register(table, min_interval_ms=2000)
    assert evaluate(table) == [entry]
    clock.now += 0.5
    table.changed("s", 2)
    assert table.take() == []
    assert table.next_at() == 102.0
    clock.now = 102.0
    assert evaluate(table, V2) == [entry]


def test_what_gives_way_keeps_its_place(table: FlashTable, clock: Clock) -> None:
    entry = register(table, min_interval_ms=2000)
    [taken] = table.take()
    run = table.begin(taken, V1)
    clock.now += 1
    assert table.take() == []
    table.put_back(taken, run)
    assert evaluate(table) == [entry]
    assert entry.stored is not None


def test_what_has_failed_is_left_alone_until_something_changes(table: FlashTable) -> None:
    entry = register(table)
    [taken] = table.take()
    run = table.begin(taken, V1)
    assert run is not None
    table.failed(taken, run, "too long")
    assert (entry.error, table.take()) == ("too long", [])
    table.changed("s", 2)
    evaluate(table, V2)
    assert entry.error is None


# ---- audits ----


def audits(clock: Clock, agreed: list[bool], **more: Any) -> tuple[FlashTable, Entry]:
    """A question whose every hit is audited, with these outcomes."""
    table = make(clock, chance=lambda: 0.5)
    entry = register(table, **more)
    evaluate(table)
    for one in agreed:
        assert isinstance(found(table, entry), Hit)
        run = table.take_audit()
        assert run is not None
        table.audited(run, agreed=one)
    return table, entry


def test_a_question_that_contradicts_itself_is_taken_out_of_service(clock: Clock) -> None:
    # 18 of 20: [0.699, 0.972] reaches 0.95. 17 of 20: [0.640, 0.948] does not.
    _, entry = audits(clock, [True] * 18 + [False] * 2, audit_target=0.95)
    assert entry.retired is None
    table, entry = audits(clock, [True] * 17 + [False] * 3, audit_target=0.95)
    assert entry.retired == "3 of 20 answers that were decoded again differed: precision 0.64-0.95, target 0.95"
    assert cause(found(table, entry)) == "retired"
    table.changed("s", 2)
    assert table.take() == []
    [last] = [event for event in table.events.of("s").after(0) if event.kind == "retired"]
    assert last.data == {"name": "q", "message": entry.retired}


def test_what_runs_when_a_question_is_taken_out_of_service_is_not_kept(clock: Clock) -> None:
    table = make(clock, chance=lambda: 0.0, aging_s=5.0)
    entry = register(table, audit_target=0.95)
    evaluate(table)
    found(table, entry)
    audit = table.take_audit()
    assert audit is not None
    table.changed("s", 2)
    [taken] = table.take()
    run = table.begin(taken, V2)
    assert run is not None
    table.audited(audit, agreed=False)  # none of one: [0, 0.79]
    assert entry.retired is not None
    assert table.evaluated(run, answered()) is None
    assert entry.stored is None


def test_the_share_of_hits_that_is_audited(clock: Clock) -> None:
    numbers = iter([0.0, 0.24, 0.25, 0.99] * 2)
    table = make(clock, audit_every=4, chance=lambda: next(numbers))
    entry = register(table)
    evaluate(table)
    for _ in range(8):
        found(table, entry)
    assert [table.take_audit() is not None for _ in range(5)] == [True] * 4 + [False]


def test_an_answer_that_was_sampled_cannot_be_audited(clock: Clock) -> None:
    table = make(clock, chance=lambda: 0.0)
    entry = register(table, sampling_params={"temperature": 0.7})
    evaluate(table)
    assert isinstance(found(table, entry), Hit)
    assert table.take_audit() is None


def test_evaluations_go_before_audits_until_these_have_waited(clock: Clock) -> None:
    table = make(clock, chance=lambda: 0.0, aging_s=5.0)
    entry = register(table)
    evaluate(table)
    found(table, entry)
    table.changed("s", 2)
    assert table.take_audit() is None
    clock.now += 5
    run = table.take_audit()
    assert run is not None
    assert run.key.present == V1
    table.put_back_audit(run)
    assert table.take_audit() is run
    table.update(entry, question("q", "another"))
    table.audited(run, agreed=False)
    assert entry.audit.audited == 0


# ---- followers ----


def test_followers_read_what_they_have_not_seen(table: FlashTable) -> None:
    register(table)
    log = table.events.of("s")
    position, has_gap = log.resume(None)
    assert not has_gap
    evaluate(table)
    [event] = log.after(position)
    assert (event.kind, event.data["name"], event.data["text"], event.data["data_version"]) == ("answer", "q", "yes", 1)
    assert log.resume(event.id) == (1, False)
    table.flushed()
    [invalid] = log.after(1)
    assert (invalid.kind, invalid.data) == ("invalid", {"name": "q", "reason": "flushed"})


def test_a_follower_who_is_too_slow_is_told_so(clock: Clock) -> None:
    table = make(clock, kept_events=3)
    log = table.events.of("s")
    first = log.add("error", {})
    for _ in range(4):
        log.add("error", {})
    with pytest.raises(FlashReaderTooSlow, match="1 changes were not read in time; 3 are kept"):
        log.after(1)
    assert len(log.after(2)) == 3
    assert log.resume(first.id) == (2, True)
    assert log.resume("of-another-server-7") == (2, True)
    assert log.resume(log.after(4)[0].id) == (5, False)
