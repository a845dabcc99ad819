"""What registered questions and callers' own requests do to each other."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import httpx
from sessions_bench.clients import Unexpected
from sessions_bench.corpus import Corpus

from .clients import FlashClient, Sample, sample_of
from .questions import Question
from .shape import Shape
from .tape import Tape

_PAUSE_S = (0.0, 0.6)
_ASKED, _ANSWER = 16, 2  # tokens
_CALLERS, _LONG_ANSWER, _LONG_PROMPT = 2, 64, 300


def foreground(
    ours: FlashClient,
    tapes: Callable[[int], Tape],
    questions: Sequence[Question],
    corpus: Corpus,
    shape: Shape,
    *,
    seed: int,
) -> dict[str, list[list[Sample]]]:
    """Ask what is registered nowhere, with and without registered questions, in blocks that take turns.

    A record comes, and after a pause that is drawn a question; both kinds of block draw the same pauses. With
    registered questions each record has all of them answered anew, and callers meet that at any moment.

    Parameters
    ----------
    tapes
        A stream by its number; no two blocks have the same, as its KV would be cached.

    Returns
    -------
    By ``off`` and ``on``, one list a block.
    """
    taken: dict[str, list[list[Sample]]] = {"off": [], "on": []}
    for number in range(shape.blocks):
        kind = ("off", "on")[(number + number // 2) % 2]
        tape = tapes(number)
        tape.grow(shape.contexts[0])
        session = ours.open(list(tape.ids), reserve_tokens=64 * shape.block)["id"]
        for question in questions[: shape.registered] if kind == "on" else ():
            ours.register(session, question.name, tape.question(question.text), answer=shape.answer)
        for _ in range(shape.warm):
            ours.query(session, corpus.question(corpus.fresh(), _ASKED), answer=_ANSWER)
        draw, samples = random.Random(seed + number // 2), []
        for _ in range(shape.block):
            time.sleep(draw.uniform(*_PAUSE_S))
            ours.append(session, tape.step())
            time.sleep(draw.uniform(*_PAUSE_S))
            reply = ours.query(session, corpus.question(corpus.fresh(), _ASKED), answer=_ANSWER)
            samples.append(sample_of("foreground", kind, 0, reply))
        ours.close(session)
        taken[kind].append(samples)
    return taken


def saturated(
    ours: FlashClient, url: str, tape: Tape, question: Question, corpus: Corpus, shape: Shape
) -> dict[str, list[list[Sample]]]:
    """Take a stored answer while nobody else asks, and while callers keep the engine busy, in blocks that take turns.

    Returns
    -------
    By ``idle`` and ``saturated``, one list a block.

    Raises
    ------
    Unexpected
        The engine was not busy all the time.
    """
    taken: dict[str, list[list[Sample]]] = {"idle": [], "saturated": []}
    tape.grow(shape.contexts[0])
    session = ours.open(list(tape.ids))["id"]
    ids = tape.question(question.text)
    ours.register(session, question.name, ids, answer=shape.answer)
    ours.wait_answered(session)
    for number in range(shape.busy_blocks):
        kind = ("idle", "saturated")[(number + number // 2) % 2]
        samples = []
        with _callers(url, corpus) if kind == "saturated" else _nobody():
            for _ in range(shape.busy_block):
                samples.append(sample_of("saturated", kind, 0, ours.stored(session, ids, answer=shape.answer)))
                time.sleep(0.02)  # as somebody does who does something with an answer
        taken[kind].append(samples)
    ours.close(session)
    return taken


@contextmanager
def _nobody() -> Iterator[None]:
    yield


@contextmanager
def _callers(url: str, corpus: Corpus) -> Iterator[None]:
    """Callers that ask for long answers one after the other, and do so before the block begins."""
    is_over, spans = threading.Event(), []
    prompts = [[corpus.data(corpus.fresh(), _LONG_PROMPT) for _ in range(200)] for _ in range(_CALLERS)]

    def call(mine: list[list[int]]) -> None:
        with httpx.Client(base_url=url, timeout=300.0) as http:
            for ids in mine:
                if is_over.is_set():
                    return
                sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": _LONG_ANSWER}
                began = time.monotonic()
                http.post("/generate", json={"input_ids": ids, "sampling_params": sampling}).raise_for_status()
                spans.append((began, time.monotonic()))

    threads = [threading.Thread(target=call, args=(mine,)) for mine in prompts]
    for thread in threads:
        thread.start()
    time.sleep(0.3)  # until both are decoding
    began = time.monotonic()
    try:
        yield
    finally:
        ended = time.monotonic()
        is_over.set()
        for thread in threads:
            thread.join()
    if idle_s(spans, began, ended) > 0.05 * (ended - began):
        raise Unexpected(f"the engine was idle for {idle_s(spans, began, ended):.2f} s of {ended - began:.2f}")


def idle_s(spans: Sequence[tuple[float, float]], began: float, ended: float) -> float:
    """For how long of ``[began, ended)`` none of the half-open spans holds, in their unit."""
    reached, idle = began, 0.0
    for start, end in sorted(spans):
        idle += max(min(start, ended) - reached, 0.0)
        reached = max(reached, min(end, ended))
    return idle + max(ended - reached, 0.0)
