"""What a query costs: by the length of its session, beside a plain request, and beside an idle neighbour."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from .clients import PromptClient, Reply, SessionClient
from .corpus import Corpus
from .floor import Forward, bare_forward_ms
from .measure import Row, median_ratio, row_of
from .servers import Server
from .shape import Shape

Asked = Callable[[], Reply]


def query_rows(ours: SessionClient, corpus: Corpus, shape: Shape) -> tuple[list[Row], float]:
    """Ask a long and a short session in turns.

    Returns
    -------
    The rows, and the median of the long one over that of the short one.
    """
    lengths = {"short": shape.short, "long": shape.long}
    sessions = {name: ours.open(corpus.data(corpus.fresh(), length))["id"] for name, length in lengths.items()}
    asked = {name: _query(ours, session, corpus, shape) for name, session in sessions.items()}
    replies = in_turns(asked, shape.query_repeats)
    for session in sessions.values():
        ours.close(session)
    times = {name: [reply.ttft_ms for reply in found] for name, found in replies.items()}
    forwards = {name: [reply.forward_ms for reply in found] for name, found in replies.items()}
    ratio = median_ratio(times["long"], times["short"])
    ratios = {"long": (ratio, median_ratio(forwards["long"], forwards["short"])), "short": (None, None)}
    rows = []
    for name, length in lengths.items():
        _check_uncached(replies[name], shape.question)
        note = f"a session of {length} tokens, {shape.question} asked"
        rows.append(row_of("query_ttft", "ours", times[name], ratio=ratios[name][0], note=note))
        note = f"of these the scheduler's own, {length} tokens"
        rows.append(row_of("query_forward", "ours", forwards[name], ratio=ratios[name][1], note=note))
    return rows, ratio


def floor_rows(model: Path, shape: Shape, dtype: str) -> list[Row]:
    """Return what the bare model takes for the same shapes."""
    prefixes = (shape.short, shape.long)
    times = bare_forward_ms(model, prefixes, new=shape.question, repeats=shape.query_repeats, dtype=dtype)
    rows = []
    for forward, taken in times.items():
        ratio = None
        if forward.prefix == shape.long:
            ratio = median_ratio(taken, times[Forward(shape.short, forward.is_adjacent)])
        cells = "cells adjacent" if forward.is_adjacent else "cells apart"
        note = f"bare forward in a process of its own, prefix {forward.prefix}, {cells}"
        rows.append(row_of("query_floor", "model", taken, ratio=ratio, note=note))
    return rows


def overhead_rows(ours: SessionClient, corpus: Corpus, shape: Shape) -> tuple[list[Row], float]:
    """Ask a session, and send the same server a prompt of the same length that its radix cache holds, in turns.

    Returns
    -------
    The rows, and the median of the query over that of the plain request.
    """
    session = ours.open(corpus.data(corpus.fresh(), shape.plain))["id"]
    prompt = corpus.data(corpus.fresh(), shape.plain)
    ours.ask(prompt, answer=1)

    def plain() -> Reply:
        return ours.ask([*prompt, *corpus.question(corpus.fresh(), shape.question)], answer=shape.answer)

    replies = in_turns({"query": _query(ours, session, corpus, shape), "plain": plain}, shape.overhead_repeats)
    ours.close(session)
    for found in replies.values():
        _check_uncached(found, shape.question)
    times = {name: [reply.ttft_ms for reply in found] for name, found in replies.items()}
    ratio = median_ratio(times["query"], times["plain"])
    note = f"{shape.plain} tokens cached, {shape.question} asked"
    between = [query - plain for query, plain in zip(times["query"], times["plain"], strict=True)]
    return [
        row_of("query_overhead", "query", times["query"], ratio=ratio, note=f"session; {note}"),
        row_of("query_overhead", "plain", times["plain"], note=f"/generate with the whole prompt; {note}"),
        row_of("query_overhead_ms", "query", between, note="query less the plain request before or after it"),
    ], ratio


def control_rows(
    ours: SessionClient, rival: PromptClient, servers: tuple[Server, Server], corpus: Corpus, shape: Shape
) -> list[Row]:
    """Time either server while the other is idle, and while it is stopped and cannot take any time at all."""
    our_server, rival_server = servers
    session = ours.open(corpus.data(corpus.fresh(), shape.short))["id"]
    prompt = corpus.data(corpus.fresh(), shape.short)
    rival.ask(prompt, answer=1)

    def plain() -> Reply:
        return rival.ask([*prompt, *corpus.question(corpus.fresh(), shape.question)], answer=shape.answer)

    rows = []
    for arm, ask, neighbour in (
        ("ours", _query(ours, session, corpus, shape), rival_server),
        ("rival", plain, our_server),
    ):
        times: dict[bool, list[float]] = {False: [], True: []}
        ask()
        for block in range(shape.control_blocks):
            is_stopped = block % 2 == 1
            with neighbour.stopped() if is_stopped else nullcontext():
                times[is_stopped] += [ask().ttft_ms for _ in range(shape.control_block)]
        ratio = median_ratio(times[False], times[True])
        rows.append(row_of("control", arm, times[False], ratio=ratio, note=f"{neighbour.name} idle; over stopped"))
        rows.append(row_of("control", arm, times[True], note=f"{neighbour.name} stopped"))
    ours.close(session)
    return rows


def in_turns(asked: dict[str, Asked], repeats: int) -> dict[str, list[Reply]]:
    """Ask each so many times, and each first as often as the others; two more before that do not count."""
    replies: dict[str, list[Reply]] = {name: [] for name in asked}
    names = list(asked)
    for turn in range(-2, repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            reply = asked[name]()
            if turn >= 0:
                replies[name].append(reply)
    return replies


def _query(ours: SessionClient, session: str, corpus: Corpus, shape: Shape) -> Asked:
    def ask() -> Reply:
        reply = ours.query(session, corpus.question(corpus.fresh(), shape.question), answer=shape.answer)
        assert reply.meta["session"]["pin"] == "pinned", reply.meta["session"]
        return reply

    return ask


def _check_uncached(replies: list[Reply], question: int) -> None:
    """Every one of them prefilled its question and nothing else."""
    found = {reply.uncached_tokens for reply in replies}
    assert found == {question}, f"{found} tokens prefilled for a question of {question}"
