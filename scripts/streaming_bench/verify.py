"""Before anything is timed: in float32 every arm says what stock SGLang says to the same token ids."""

from collections.abc import Sequence
from uuid import uuid4

from sessions_bench.clients import PromptClient

from .clients import FlashClient
from .interleavings import TOKENS, Interleavings, Outcome
from .questions import Question
from .shape import Shape
from .tape import Tape


class WrongAnswer(RuntimeError):
    """An arm says something else than stock SGLang: nothing is timed."""


def same_answers(
    ours: FlashClient, rival: PromptClient, tape: Tape, questions: Sequence[Question], shape: Shape
) -> int:
    """Ask every question at each length in every arm; how many answers were compared.

    Raises
    ------
    WrongAnswer
    """
    session, compared = "", 0
    for number, length in enumerate(shape.checked):
        more = tape.grow(length)
        if session:
            ours.append(session, more)
        else:
            session = ours.open(list(tape.ids), reserve_tokens=shape.checked[-1])["id"]
            for question in questions:
                ours.register(session, question.name, tape.question(question.text), answer=shape.answer)
                ours.enter(session, question.name, tape.entry(question.text, 0)[0], ahead=0)
            ours.enter(session, "whole", tape.question(questions[0].text, number=-1), ahead=shape.ahead)
        ours.wait_entered(session)
        ours.wait_answered(session)
        for question in questions:
            plain, unseen = tape.question(question.text), tape.question(question.text, number=number)
            right = rival.ask([*tape.ids, *plain], answer=shape.answer).output_ids
            arms = {
                "flash": ours.stored(session, plain, answer=shape.answer),
                "radix": ours.ask_session(session, plain, answer=shape.answer, fresh=True),
            }
            for arm, reply in arms.items():
                _require(arm, question, length, reply.output_ids, right)
            right = rival.ask([*tape.ids, *unseen], answer=shape.answer).output_ids
            said = ours.ask_session(session, unseen, answer=shape.answer).output_ids
            _require("query", question, length, said, right)
            entered = [i for part in tape.entry(question.text, number) for i in part]
            right = rival.ask([*tape.ids, *entered], answer=shape.answer).output_ids
            said = ours.ask_session(session, entered, answer=shape.answer).output_ids
            _require("entry", question, length, said, right)
            compared += 4
        whole = tape.question(questions[0].text, number=-1)
        right = rival.ask([*tape.ids, *whole], answer=shape.answer).output_ids
        said = ours.ask_session(session, whole, answer=shape.answer).output_ids
        _require("ahead", questions[0], length, said, right)
        compared += 1
    ours.close(session)
    return compared


def interleaved(ours: FlashClient, rival: PromptClient, shape: Shape, *, seed: int) -> Outcome:
    """Run the interleavings; what is asked without facts is held against the stock server."""

    def decode(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        return [rival.ask(list(prompt), answer=TOKENS).output_ids for prompt in prompts]

    return Interleavings(ours, decode, seed=seed, owner=f"bench-{uuid4().hex}").run(shape.interleavings)


def _require(arm: str, question: Question, length: int, said: list[int], right: list[int]) -> None:
    if said != right:
        raise WrongAnswer(f"{arm} says {said} to {question.name} at {length} tokens, and stock SGLang {right}")
