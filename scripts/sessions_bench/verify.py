"""Before anything is timed: our answers are the rival's for the same token ids."""

from dataclasses import dataclass

from .clients import PromptClient, Reply, SessionClient
from .corpus import Corpus
from .measure import Row
from .shape import Shape

_FIRST_APPEND = 37
_ANOTHER_APPEND = 150


@dataclass(slots=True)
class Agreement:
    """How far the greedy answers of both are the same."""

    questions: int = 0
    same_first: int = 0
    same_answers: int = 0
    tokens: int = 0
    same_tokens: int = 0

    def count(self, ours: list[int], rival: list[int]) -> None:
        """Compare one answer; tokens count as far as both are the same up to them."""
        same = next((i for i, pair in enumerate(zip(ours, rival, strict=True)) if pair[0] != pair[1]), len(ours))
        self.questions += 1
        self.same_first += same > 0
        self.same_answers += same == len(ours)
        self.tokens += len(ours)
        self.same_tokens += same


def verify(ours: SessionClient, rival: PromptClient, corpus: Corpus, shape: Shape) -> Agreement:
    """Ask sessions of several lengths, after each of two appends and a turn, and send the rival the same ids.

    Raises
    ------
    AssertionError
        A prompt of ours is not the ids that it should be, or more than the question was prefilled.
    """
    agreement = Agreement()
    answer = shape.checked_answer
    for place in range(shape.checked_sessions):
        ids = corpus.data(corpus.fresh(), 1 + place * shape.load_session // max(shape.checked_sessions - 1, 1))
        session = ours.open(ids)["id"]
        for num_tokens in (_FIRST_APPEND, _ANOTHER_APPEND):
            ids += (more := corpus.data(corpus.fresh(), num_tokens))
            appended = ours.append(session, more)
            assert appended["session"]["tokens"] == len(ids), appended
            question = corpus.question(corpus.fresh(), shape.question)
            mine = ours.query(session, question, answer=answer)
            _check_prompt(mine, [*ids, *question], uncached=len(question))
            agreement.count(mine.output_ids, rival.ask([*ids, *question], answer=answer).output_ids)
        question = corpus.question(corpus.fresh(), shape.question)
        mine = ours.turn(session, question, answer=answer)
        agreement.count(mine.output_ids, rival.ask([*ids, *question], answer=answer).output_ids)
        ids += question + mine.output_ids
        assert ours.session(session)["tokens"] == len(ids), (ours.session(session), len(ids))
        question = corpus.question(corpus.fresh(), shape.question)
        mine = ours.query(session, question, answer=answer)
        # The KV of an answer's last token is never computed while it is decoded.
        _check_prompt(mine, [*ids, *question], uncached=len(question) + 1)
        agreement.count(mine.output_ids, rival.ask([*ids, *question], answer=answer).output_ids)
        ours.close(session)
    return agreement


def row(agreement: Agreement, dtype: str) -> Row:
    """Return the row of one dtype."""
    note = (
        f"{agreement.same_first} of {agreement.questions} first tokens, {agreement.same_answers} whole answers, "
        f"{agreement.same_tokens} of {agreement.tokens} tokens until they part"
    )
    details = {name: getattr(agreement, name) for name in Agreement.__slots__}
    share = agreement.same_first / agreement.questions
    return Row("same_first_token", dtype, "", share, agreement.questions, note=note, details=details)


def _check_prompt(reply: Reply, ids: list[int], *, uncached: int) -> None:
    assert reply.meta["prompt_tokens"] == len(ids), (reply.meta["prompt_tokens"], len(ids))
    assert reply.uncached_tokens <= uncached, f"{reply.uncached_tokens} tokens prefilled for {uncached}"
