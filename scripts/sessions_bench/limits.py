"""What happens at the budget's end, and after a restart."""

import threading
from dataclasses import dataclass, field

from .clients import Opened, SessionClient
from .corpus import Corpus
from .measure import Row, row_of
from .servers import Server
from .shape import Shape

_DEMANDED = 3
_PLAIN_TOKENS = 200
_REFUSED = 429
_FAST_MS = 100.0


@dataclass(slots=True)
class _Plain:
    """Sends plain requests, one after the other, until told to end."""

    url: str
    corpus: Corpus
    numbers: list[int]
    times: list[float] = field(default_factory=list)
    failure: Exception | None = None
    end: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Send them; a failure is kept for whoever joins the thread."""
        try:
            with SessionClient(self.url) as client:
                while not self.end.is_set():
                    prompt = self.corpus.data(self.numbers[len(self.times)], _PLAIN_TOKENS)
                    self.times.append(client.ask(prompt, answer=1).ttft_ms)
        except Exception as error:
            self.failure = error


def refusal_rows(ours: SessionClient, url: str, corpus: Corpus, shape: Shape) -> list[Row]:
    """Demand three times the budget in pins while plain requests run."""
    plain = _Plain(url, corpus, [corpus.fresh() for _ in range(2_000)])
    thread = threading.Thread(target=plain.run)
    thread.start()
    opened: list[Opened] = []
    try:
        for _ in range(_DEMANDED * shape.budget // shape.load_session):
            opened.append(ours.try_open(corpus.data(corpus.fresh(), shape.load_session), on_full="refuse"))
    finally:
        plain.end.set()
        thread.join()
    if plain.failure is not None:
        raise plain.failure
    kept = [found for found in opened if found.status == 201]
    refused = [found for found in opened if found.status == _REFUSED]
    others = {found.status for found in opened} - {201, _REFUSED}
    assert not others, f"neither opened nor refused: {others}"
    assert kept, "nothing fits"
    assert refused, "nothing was refused"
    for found in refused:
        error = found.body["error"]
        assert error["type"] == "PinRefused", error
        assert error["needed"] + error["pinned"] > error["budget"] == shape.budget, error
    pinned = sum(ours.session(found.body["id"])["pin"]["cells"] for found in kept)
    assert pinned <= shape.budget, (pinned, shape.budget)
    for found in kept:
        ours.close(found.body["id"])
    slow = sum(found.ms > _FAST_MS for found in refused)
    note = f"{len(refused)} of {len(opened)} pins at 300 % of the budget, {slow} above {_FAST_MS:.0f} ms; client's time"
    details = {
        "opened": len(kept),
        "refused": len(refused),
        "slow": slow,
        "pinned_cells": pinned,
        "budget": shape.budget,
    }
    return [
        row_of("pin_refused", "ours", [found.ms for found in refused], note=note, details=details),
        row_of("pin_refused_plain", "ours", plain.times, note=f"plain requests of {_PLAIN_TOKENS} tokens meanwhile"),
    ]


def restart_rows(ours: SessionClient, server: Server, corpus: Corpus, shape: Shape) -> list[Row]:
    """Stop our server and start it anew; its session answers as before."""
    session = ours.open(corpus.data(corpus.fresh(), shape.restart))["id"]
    question = corpus.question(corpus.fresh(), shape.question)
    before = ours.query(session, question, answer=shape.answer)
    server.stop()
    server.launch()
    server.wait_ready()
    with SessionClient(server.url) as client:
        first = client.query(session, question, answer=shape.answer)
        again = client.query(session, corpus.question(corpus.fresh(), shape.question), answer=shape.answer)
        client.close(session)
    same = sum(a == b for a, b in zip(first.output_ids, before.output_ids, strict=True))
    note = f"{shape.restart} tokens; {same} of {shape.answer} answer tokens as before"
    return [
        _one("restart_ready", server.started_s * 1e3, "until the server serves"),
        _one("restart_first", first.ttft_ms, f"{note}; {first.uncached_tokens} tokens prefilled"),
        _one("restart_second", again.ttft_ms, f"the next question, {again.uncached_tokens} tokens prefilled"),
    ]


def _one(name: str, ms: float, note: str) -> Row:
    return Row(name, "ours", "ms", ms, 1, note=note)
