"""Any order of what can happen to sessions, against a model of lists."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from session_values import Clock, cells_of, header, segment, table

from sgl_stateful.errors import (
    BadSessionRequest,
    PinRefused,
    SessionClosed,
    SessionExpired,
    SessionTooLong,
    SessionVersionConflict,
)
from sgl_stateful.sessions.chain import segments
from sgl_stateful.sessions.session import Change, Session

BUDGET, QUOTA, LONGEST = 60, 40, 25
Parts = tuple[tuple[int, ...], ...]

owners = st.sampled_from(["ana", "bo"])
parts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=3).map(tuple)


@dataclass
class Known:
    """What the model holds of one session."""

    owner: str
    content: Parts
    prefix: int
    version: int
    versions: dict[int, Parts]
    used_at: float
    created_at: float
    ttl_s: float | None
    max_age_s: float | None
    reserve: int
    window: int | None
    demotes: bool
    wants_pin: bool
    is_pinned: bool
    claimed: int = 0  # by a turn that is running
    uses: int = 0
    end: str | None = None

    def is_over(self, now: float) -> bool:
        if self.max_age_s is not None and now >= self.created_at + self.max_age_s:
            return True
        return self.ttl_s is not None and not self.uses and now >= self.used_at + self.ttl_s


def windowed(known: Known, new: Parts) -> Parts | None:
    """The content with new data, by the rule: all of it where it fits; else the newest that fit half a window."""
    prefix, data = known.content[: known.prefix], [*known.content[known.prefix :], *new]
    if known.window is None or sum(map(len, data)) <= known.window:
        return (*prefix, *data)
    coming = sum(map(len, new))
    if coming > known.window:
        return None
    while sum(map(len, data)) > max(known.window // 2, coming):
        data.pop(0)
    return (*prefix, *data)


class Sessions(RuleBasedStateMachine):
    """Opens, changes, forks, pins and ends sessions while time goes by."""

    names = Bundle("names")
    changes = Bundle("changes")

    @initialize()
    def begin(self) -> None:
        self.clock = Clock(1000.0)
        self.table = table(budget=BUDGET, quota=QUOTA, clock=self.clock, max_tokens=LONGEST, versions=5)
        self.known: dict[str, Known] = {}
        self.count = 0

    # ---- the model's own arithmetic ----

    def cells(self, name: str = "", contents: Sequence[Parts] = (), claimed: int = 0) -> tuple[int, dict[str, int]]:
        """Cells in all and by owner; with ``name`` holding ``contents`` instead of what it has."""
        claims: list[tuple[str, Sequence[Parts], int]] = []
        for other, known in self.known.items():
            if other == name:
                claims.append((known.owner, contents, max(known.reserve, claimed)))
            elif known.end is None and known.is_pinned:
                claims.append((known.owner, [known.content], max(known.reserve, known.claimed)))
        return self.total(claims), {o: self.total([c for c in claims if c[0] == o]) for o in ("ana", "bo")}

    @staticmethod
    def total(claims: list[tuple[str, Sequence[Parts], int]]) -> int:
        spare, paths = 0, []
        for owner, contents, reserve in claims:
            own = cells_of([(owner, content, 0) for content in contents])
            spare += max(0, reserve - own)
            paths.extend((owner, content, 0) for content in contents)
        return spare + cells_of(paths)

    def fits(self, name: str, contents: list[Parts], claimed: int = 0) -> bool:
        before, _ = self.cells()
        after, by_owner = self.cells(name, contents, claimed)
        return after <= before or (after <= BUDGET and by_owner[self.known[name].owner] <= QUOTA)

    def session(self, name: str) -> Session | None:
        known = self.known[name]
        try:
            session = self.table.get(name, owner=known.owner)
        except (SessionClosed, SessionExpired) as error:
            has_expired = isinstance(error, SessionExpired)
        else:
            assert known.end is None
            assert not known.is_over(self.clock.now)
            return session
        assert has_expired == (known.end != "closed")
        assert known.end is not None or known.is_over(self.clock.now)
        return None

    # ---- opening ----

    @rule(
        target=names,
        owner=owners,
        prefix=parts,
        ttl=st.sampled_from([None, 5.0, 20.0]),
        age=st.sampled_from([None, 30.0]),
        reserve=st.sampled_from([0, 0, 20]),
        window=st.sampled_from([None, None, 8]),
        demotes=st.booleans(),
        wants_pin=st.sampled_from([True, True, False]),
    )
    def open(
        self,
        owner: str,
        prefix: Parts,
        ttl: float | None,
        age: float | None,
        reserve: int,
        window: int | None,
        demotes: bool,
        wants_pin: bool,
    ) -> str:
        name = f"s{self.count}"
        self.count += 1
        now = self.clock.now
        known = Known(owner, (), 0, 0, {}, now, now, ttl, age, reserve, window, demotes, wants_pin, False)
        self.known[name] = known
        self.add(
            name,
            prefix,
            len(prefix),
            lambda: self.table.open(
                header(
                    name,
                    owner,
                    clock=self.clock,
                    ttl_s=ttl,
                    max_age_s=age,
                    reserve_tokens=reserve,
                    window_tokens=window,
                    on_full="demote" if demotes else "refuse",
                    is_pinned=wants_pin,
                ),
                [segment(*part, kind="prefix") for part in prefix],
            ),
        )
        if known.version == 0:
            known.end = "never opened"
        return name

    def add(self, name: str, content: Parts, prefix: int, plan: Callable[[], Change]) -> None:
        """Plan and commit ``content``, which the model says is refused or not."""
        known = self.known[name]
        change = self.planned(name, content, plan)
        if change is None:
            return
        self.settle(name, change, content)
        known.prefix = prefix

    def planned(self, name: str, content: Parts, plan: Callable[[], Change]) -> Change | None:
        known = self.known[name]
        held = [known.content] if known.is_pinned and known.version else []
        # Both at once, or the new one in the place of the old.
        fits = not known.wants_pin or self.fits(name, [*held, content]) or self.fits(name, [content])
        try:
            change: Change = plan()
        except SessionTooLong:
            assert sum(map(len, content)) > LONGEST
            return None
        except PinRefused as refused:
            pinned = refused.numbers.pinned
        else:
            assert fits or known.demotes
            assert sum(map(len, content)) <= LONGEST
            assert (change.demoted is None) == (fits or not known.wants_pin)
            return change
        assert not fits
        assert not known.demotes
        assert pinned == self.cells()[0]
        return None

    def settle(self, name: str, change: Change, content: Parts) -> None:
        known = self.known[name]
        self.table.commit(change)
        known.content = content
        known.version += 1
        known.versions[known.version] = content
        known.versions = dict(sorted(known.versions.items())[-5:])
        known.is_pinned = known.wants_pin and change.demoted is None
        known.used_at = self.clock.now

    # ---- changing ----

    @rule(name=names, new=parts)
    def append(self, name: str, new: Parts) -> None:
        if (session := self.usable(name)) is None:
            return
        known = self.known[name]
        content = windowed(known, new)
        if content is None:
            try:
                self.table.append(session, [segment(*part) for part in new])
            except SessionTooLong:
                return
            raise AssertionError("longer than its window")
        self.add(name, content, known.prefix, lambda: self.table.append(session, [segment(*part) for part in new]))

    def usable(self, name: str) -> Session | None:
        session = None if self.known[name].end == "never opened" else self.session(name)
        return None if session is None or session.changing or session.uses else session

    @rule(name=names, new=parts, closes=st.booleans())
    def give_up(self, name: str, new: Parts, closes: bool) -> None:
        """A change that fails, or whose session is closed while it is under way."""
        if (session := self.usable(name)) is None or (content := windowed(self.known[name], new)) is None:
            return
        change = self.planned(name, content, lambda: self.table.append(session, [segment(*part) for part in new]))
        if change is None:
            return
        if not closes:
            self.table.abandon(change)
            return
        self.table.close(session)
        self.known[name].end = "closed"
        try:
            self.table.commit(change)
        except SessionClosed:
            return
        raise AssertionError("a closed session took a change")

    @rule(name=names, version=st.integers(0, 8))
    def rewind(self, name: str, version: int) -> None:
        if (session := self.usable(name)) is None:
            return
        known = self.known[name]
        if version not in known.versions:
            try:
                self.table.rewind(session, version)
            except BadSessionRequest:
                return
            raise AssertionError("a version that is not kept")
        content = known.versions[version]
        self.add(name, content, known.prefix, lambda: self.table.rewind(session, version))

    @rule(name=names, version=st.integers(1, 8))
    def guarded(self, name: str, version: int) -> None:
        session = self.usable(name)
        if session is None or version == self.known[name].version:
            return
        try:
            self.table.append(session, [segment(1)], if_version=version)
        except SessionVersionConflict:
            return
        raise AssertionError("another version")

    @rule(target=names, name=names, version=st.integers(1, 8))
    def fork(self, name: str, version: int) -> str:
        session, child = self.usable(name), f"s{self.count}"
        self.count += 1
        known = self.known[name]
        self.known[child] = replace(
            known,
            content=(),
            version=0,
            versions={},
            is_pinned=False,
            used_at=self.clock.now,
            created_at=self.clock.now,
            end="never opened",
        )
        if session is None or version not in known.versions:
            return child
        made, base = self.known[child], self.table.at(session, version)
        made.end = None
        original = session.header
        self.add(
            child,
            known.versions[version],
            known.prefix,
            lambda: self.table.open(
                replace(
                    original, id=child, created_at=self.clock.now, used_at=self.clock.now, is_pinned=known.wants_pin
                ),
                (),
                base=base,
            ),
        )
        if made.version == 0:
            made.end = "never opened"
        return child

    # ---- turns ----

    @rule(name=names, growth=st.integers(1, 20))
    def begin_turn(self, name: str, growth: int) -> None:
        if (session := self.usable(name)) is None:
            return
        known = self.known[name]
        claimed = sum(map(len, known.content)) + growth
        fits = not known.is_pinned or self.fits(name, [known.content], claimed)
        try:
            demoted = self.table.reserve(session, growth)
        except PinRefused:
            assert not fits
            assert not known.demotes
            return
        assert (demoted is None) == fits
        session.uses += 1
        known.uses += 1
        known.claimed = claimed if fits and known.is_pinned else 0

    @rule(name=names)
    def end_turn(self, name: str) -> None:
        known = self.known[name]
        if known.uses == 0 or known.end is not None:
            return
        session = next(s for s in self.table.sessions() if s.header.id == name)
        session.uses -= 1
        known.uses -= 1
        known.claimed = 0
        self.table.settle(session)
        self.table.touch(session)
        known.used_at = self.clock.now

    # ---- pins ----

    @rule(name=names, demote=st.booleans())
    def pin(self, name: str, demote: bool) -> None:
        if (session := self.usable(name)) is None:
            return
        known = self.known[name]
        fits = self.fits(name, [known.content])
        try:
            self.table.pin(session, demote=demote)
        except PinRefused:
            assert not fits
            assert not demote
            return
        assert fits or demote
        known.wants_pin = True
        known.is_pinned = fits

    @rule(name=names)
    def unpin(self, name: str) -> None:
        if (session := self.usable(name)) is None:
            return
        self.table.unpin(session)
        self.known[name].wants_pin = self.known[name].is_pinned = False

    # ---- the end ----

    @rule(name=names)
    def close(self, name: str) -> None:
        known = self.known[name]
        if known.end == "never opened" or (session := self.session(name)) is None:
            return
        self.table.close(session)
        known.end = "closed"

    @rule(seconds=st.sampled_from([1.0, 4.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def sweep(self) -> None:
        due = {n for n, k in self.known.items() if k.end is None and not k.uses and k.is_over(self.clock.now)}
        expired = self.table.expired()
        assert {session.header.id for session, _ in expired} == due
        for session, _ in expired:
            self.table.close(session, how="expired")
            self.known[session.header.id].end = "expired"

    # ---- what always holds ----

    @invariant()
    def content_is_the_models(self) -> None:
        alive = {name: known for name, known in self.known.items() if known.end is None}
        assert {session.header.id for session in self.table.sessions()} == set(alive)
        for session in self.table.sessions():
            known = alive[session.header.id]
            assert tuple(tuple(part.token_ids.tolist()) for part in segments(session.head)) == known.content
            assert session.token_ids() == [token for part in known.content for token in part]
            assert session.version == known.version
            assert session.is_pinned == known.is_pinned

    @invariant()
    def cells_are_counted_from_their_definition(self) -> None:
        total, by_owner = self.cells()
        assert self.table.ledger.pinned == total
        assert {o: self.table.ledger.by_owner.get(o, 0) for o in ("ana", "bo")} == by_owner
        assert total <= BUDGET
        assert max(by_owner.values()) <= QUOTA


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
