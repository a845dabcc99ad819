"""How many tokens are prefilled for how many appended."""

import random

from .clients import SessionClient
from .corpus import Corpus
from .measure import Row, row_of
from .shape import Shape

_BEGINS_WITH = 100


def append_rows(ours: SessionClient, corpus: Corpus, shape: Shape, *, seed: int) -> tuple[list[Row], float]:
    """Let a session grow, and compare what the replies say with the scheduler's own counter.

    Returns
    -------
    The rows, and tokens prefilled over tokens appended; the larger of what the replies and the counter say.
    """
    rng = random.Random(seed)
    session = ours.open(corpus.data(corpus.fresh(), _BEGINS_WITH))["id"]
    before = ours.counters()
    appended, prefilled, times = 0, 0, []
    for _ in range(shape.appends):
        num_tokens = rng.randint(*shape.append)
        reply = ours.append(session, corpus.data(corpus.fresh(), num_tokens))
        assert reply["appended_tokens"] == num_tokens, reply
        assert reply["session"]["pin"]["state"] == "pinned", reply["session"]
        appended += num_tokens
        prefilled += reply["prefilled_tokens"]
        times.append(reply["client_ms"])
    grown = {name: value - before[name] for name, value in ours.counters().items()}
    assert ours.session(session)["tokens"] == _BEGINS_WITH + appended
    ours.close(session)
    by_scheduler = int(grown["computed"])
    assert by_scheduler >= prefilled, f"the scheduler's counter has {by_scheduler} of {prefilled} tokens"
    counts = {"appended": appended, "prefilled": prefilled, "by_scheduler": by_scheduler, "cached": int(grown["found"])}
    note = f"{prefilled} prefilled by the replies, {by_scheduler} by SGLang's own counter"
    ratio = max(prefilled, by_scheduler) / appended
    return [
        Row("append_tokens", "ours", "tokens", appended, len(times), ratio=ratio, note=note, details=counts),
        row_of("append", "ours", times, note=f"{shape.append[0]} to {shape.append[1]} tokens, until the reply"),
    ], ratio
