"""The streaming load: the same events on either server, one after the other, each waited for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .clients import PromptClient, SessionClient
from .corpus import Corpus
from .measure import Row, median_ratio, percentile_ratio, row_of
from .schedule import Event, schedule
from .shape import Shape


@dataclass(slots=True)
class Taken:
    """What one event took.

    Attributes
    ----------
    ms
        Time to the first token where there is one; of our `open` and `append`, time to the reply.
    uncached
        Tokens that were prefilled; nothing says it of `open`.
    is_pinned
        Of our session, when it was asked.
    """

    event: Event
    ms: float
    uncached: int
    is_pinned: bool = False


@dataclass(slots=True)
class OursLoad:
    """Runs events as a client of sessions does."""

    client: SessionClient
    corpus: Corpus
    shape: Shape
    sessions: dict[int, str] = field(default_factory=dict)

    def run(self, event: Event) -> Taken:
        """Run one event."""
        shape = self.shape
        match event.kind:
            case "open":
                # What an operator decides: the first ones are kept, with room to grow; the rest is not.
                is_kept = event.session < shape.load_pinned
                fields = {"reserve_tokens": shape.load_reserve} if is_kept else {"pin": False}
                ids = self.corpus.data(event.content, event.tokens)
                opened = self.client.try_open(ids, **fields)
                assert opened.status == 201, opened
                self.sessions[event.session] = opened.body["id"]
                return Taken(event, opened.ms, 0)
            case "append":
                ids = self.corpus.data(event.content, event.tokens)
                reply = self.client.append(self.sessions[event.session], ids)
                return Taken(event, reply["client_ms"], reply["prefilled_tokens"])
            case "ask":
                ids = self.corpus.question(event.content, event.tokens)
                answered = self.client.query(self.sessions[event.session], ids, answer=shape.answer)
                is_pinned = answered.meta["session"]["pin"] == "pinned"
                return Taken(event, answered.ttft_ms, answered.uncached_tokens, is_pinned)
            case "flood":
                answered = self.client.ask(self.corpus.data(event.content, event.tokens), answer=1)
                return Taken(event, answered.ttft_ms, answered.uncached_tokens)

    def close(self) -> None:
        """Close every session."""
        for session in self.sessions.values():
            self.client.close(session)


@dataclass(slots=True)
class RivalLoad:
    """Runs events as a client without sessions does: it keeps the ids itself and sends all of them to ask."""

    client: PromptClient
    corpus: Corpus
    shape: Shape
    ids: dict[int, list[int]] = field(default_factory=dict)

    def run(self, event: Event) -> Taken:
        """Run one event."""
        answer = self.shape.answer
        match event.kind:
            case "open":
                # Sent once, so that the rival too has seen it before the first question.
                self.ids[event.session] = self.corpus.data(event.content, event.tokens)
                reply = self.client.ask(self.ids[event.session], answer=1)
            case "append":
                self.ids[event.session] += self.corpus.data(event.content, event.tokens)
                return Taken(event, 0.0, 0)
            case "ask":
                question = self.corpus.question(event.content, event.tokens)
                reply = self.client.ask([*self.ids[event.session], *question], answer=answer)
            case "flood":
                reply = self.client.ask(self.corpus.data(event.content, event.tokens), answer=1)
        return Taken(event, reply.ttft_ms, reply.uncached_tokens)


def load_rows(
    ours: SessionClient, rival: PromptClient, corpus: Corpus, shape: Shape, *, seed: int, advance: Callable[[], None]
) -> tuple[list[Row], dict[str, float]]:
    """Run the schedule on both, event by event, the one that goes first alternating.

    Returns
    -------
    The rows, and the two ratios, of the sessions that ours keeps pinned.
    """
    our_load = OursLoad(ours, corpus, shape)
    arms: dict[str, OursLoad | RivalLoad] = {"ours": our_load, "rival": RivalLoad(rival, corpus, shape)}
    taken: dict[str, list[Taken]] = {"ours": [], "rival": []}
    before = {name: arm.client.counters()["computed"] for name, arm in arms.items()}
    for place, event in enumerate(schedule(shape, seed)):
        for name in ("ours", "rival") if place % 2 else ("rival", "ours"):
            taken[name].append(arms[name].run(event))
        advance()
    computed = {name: arm.client.counters()["computed"] - before[name] for name, arm in arms.items()}
    our_load.close()
    rows, ratios = rows_of_load(taken["ours"], taken["rival"], shape)
    note = "prefilled in all events by the scheduler's counter, opening included"
    rows += [
        Row("load_prefilled", name, "tokens", total, len(taken[name]), note=note) for name, total in computed.items()
    ]
    return rows, ratios


def rows_of_load(ours: Sequence[Taken], rival: Sequence[Taken], shape: Shape) -> tuple[list[Row], dict[str, float]]:
    """Return the rows of what both took for the same events, and the two ratios."""
    pairs = list(zip(ours, rival, strict=True))
    assert all(mine.event == theirs.event for mine, theirs in pairs)
    asked = [pair for pair in pairs if pair[0].event.kind == "ask"]
    rows, ratios = [], {}
    for pinned in (True, False):
        found = [pair for pair in asked if pair[0].is_pinned is pinned]
        if not found:
            continue
        sessions = len({mine.event.session for mine, _ in found})
        name = "load_ask_pinned" if pinned else "load_ask_unpinned"
        mine, theirs = ([pair[side].ms for pair in found] for side in (0, 1))
        uncached = [[pair[side].uncached for pair in found] for side in (0, 1)]
        if pinned:
            ratios = {
                "rival_over_ours_p50": median_ratio(theirs, mine),
                "rival_over_ours_p99": percentile_ratio(theirs, mine, 99),
            }
        kept = f"{sessions} of {shape.load_sessions} sessions, {'pinned' if pinned else 'not pinned'}"
        if pinned and sessions != shape.load_pinned:
            kept += f", where {shape.load_pinned} were to be"
        for arm, times, side in (("ours", mine, 0), ("rival", theirs, 1)):
            details = {
                "sessions": sessions,
                "session_tokens": shape.load_session,
                "uncached_median": row_of("", "", uncached[side]).median,
                "uncached_total": sum(uncached[side]),
                "ratio_p99": percentile_ratio(theirs, mine, 99),
            }
            note = f"{kept}; {sum(uncached[side]) / len(found):.0f} tokens uncached each"
            ratio = median_ratio(theirs, mine) if side == 0 else None
            rows.append(row_of(name, arm, times, ratio=ratio, note=note, details=details))
    rows += _other_rows(pairs)
    return rows, ratios


def _other_rows(pairs: Sequence[tuple[Taken, Taken]]) -> list[Row]:
    """Of what is not in the bars: what appends cost, freshness, floods, and the time in all."""
    rows = []
    for name, is_kept in (("pinned", True), ("unpinned", False)):
        appends, fresh, prompts = _data_to_token(pairs, is_kept=is_kept)
        if not fresh:
            continue
        rows.append(row_of(f"load_append_{name}", "ours", appends, note="the rival's client only keeps the tokens"))
        note = "an append and the next first token, added up; ratio: the rival's first token over it"
        ratio = median_ratio(prompts, fresh)
        rows.append(row_of(f"load_data_to_token_{name}", "ours", fresh, ratio=ratio, note=note))
    for side, arm in enumerate(("ours", "rival")):
        floods = [pair[side].ms for pair in pairs if pair[side].event.kind == "flood"]
        rows.append(row_of("load_flood", arm, floods, note="prompts of no session"))
        total_s = sum(pair[side].ms for pair in pairs) / 1e3
        note = "waited for in all events, opening and appends included, the rest of the answers not"
        rows.append(Row("load_waited", arm, "s", total_s, len(pairs), note=note))
    return rows


def _data_to_token(
    pairs: Sequence[tuple[Taken, Taken]], *, is_kept: bool
) -> tuple[list[float], list[float], list[float]]:
    """Of questions behind an append: what the append took, both together, and the rival's first token."""
    appended: dict[int, float] = {}
    appends, fresh, prompts = [], [], []
    for mine, theirs in pairs:
        if mine.event.kind == "append":
            appended[mine.event.session] = mine.ms
        elif mine.event.kind == "ask" and mine.is_pinned is is_kept and mine.event.session in appended:
            append = appended.pop(mine.event.session)
            appends.append(append)
            fresh.append(append + mine.ms)
            prompts.append(theirs.ms)
    return appends, fresh, prompts
