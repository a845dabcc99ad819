"""All arms over the length of the stream, in turns, and at its end with unrelated traffic that evicts.

========  ==============================================================================================
arm       what is asked
========  ==============================================================================================
stock     the whole prompt to stock SGLang, radix cache on, with the question of `entry`
query     our session, a question that nobody has asked
radix     our session, the registered question decoded for real: a radix hit of the session, and the question
flash     our session, the registered question as it has been answered
entry     our session, a question whose beginning is an entry: its end is prefilled
ahead     our session, a question that is an entry as a whole: its answer is gone on with
========  ==============================================================================================
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from sessions_bench.clients import PromptClient, Reply, Unexpected
from sessions_bench.corpus import Corpus

from .clients import FlashClient, Sample, entry_use, sample_of
from .questions import Question
from .shape import Shape
from .tape import Tape

EVICTED = "evicted"
SWEEP = "sweep"


@dataclass(slots=True)
class Sweep:
    """What it came to.

    Attributes
    ----------
    samples
        By arm and length, one list a round.
    agreed, compared
        Arms whose tokens were the stock server's, or for a stored answer those of decoding for real.
    right, judged
        Open answers that were right by the data, of those that the data decide.
    """

    samples: dict[tuple[str, str, int], list[list[Sample]]] = field(default_factory=dict)
    agreed: int = 0
    compared: int = 0
    right: int = 0
    judged: int = 0
    freshness_ms: list[float] = field(default_factory=list)

    def take(self, part: str, arm: str, context: int, replies: list[Reply]) -> None:
        """Keep one round of one arm."""
        taken = [sample_of(part, arm, context, reply) for reply in replies]
        self.samples.setdefault((part, arm, context), []).append(taken)

    def compare(self, one: Reply, other: Reply) -> None:
        """Whether two arms said the same; in bfloat16 shapes of batches decide near ties, so it is counted alone."""
        self.compared += 1
        self.agreed += one.output_ids == other.output_ids


class Sweeper:
    """One session of ours, and the same stream sent to the stock server.

    Parameters
    ----------
    decode
        Text of token ids, to judge answers by.
    advance
        Called after each round.
    """

    def __init__(
        self,
        ours: FlashClient,
        rival: PromptClient,
        tape: Tape,
        corpus: Corpus,
        shape: Shape,
        question: Question,
        *,
        decode: Callable[[list[int]], str],
        advance: Callable[[], None],
    ) -> None:
        self._ours, self._rival = ours, rival
        self._tape, self._corpus, self._shape = tape, corpus, shape
        self._question = question
        self._plain = tape.question(question.text)
        self._whole = tape.question(question.text, number=0)
        self._decode = decode
        self._advance = advance
        self._asked = 0
        self._session = ""
        self.found = Sweep()

    def run(self) -> Sweep:
        """Time all arms at each length, and with evictions at the last.

        Raises
        ------
        Unexpected
            Something was served otherwise than its arm has it.
        """
        shape = self._shape
        for context in shape.contexts:
            self._reach(context)
            for turn in range(-shape.warm, shape.rounds):
                self._ours.append(self._session, self._tape.step())
                self._wait()
                self._round(turn, SWEEP, context, is_kept=turn >= 0)
                self._advance()
        for turn in range(shape.evictions):
            self._flood()
            self._wait()
            self._round(turn, EVICTED, shape.contexts[-1], is_kept=True)
            self._advance()
        self._ours.close(self._session)
        return self.found

    def _reach(self, context: int) -> None:
        more = self._tape.grow(context)
        if self._session:
            self._ours.append(self._session, more)
            return
        opened = self._ours.open(list(self._tape.ids), reserve_tokens=self._shape.longest - len(self._tape.ids))
        self._session = opened["id"]
        self._ours.register(self._session, self._question.name, self._plain, answer=self._shape.answer)
        self._ours.enter(self._session, "beginning", self._tape.entry(self._question.text, 0)[0], ahead=0)
        self._ours.enter(self._session, "whole", self._whole, ahead=self._shape.ahead)

    def _round(self, turn: int, part: str, context: int, *, is_kept: bool) -> None:
        self._asked += 1
        unseen = self._tape.question(self._question.text, number=self._asked)
        beginning, end = self._tape.entry(self._question.text, self._asked)
        entered = [*beginning, *end]
        arms: dict[str, Callable[[], list[Reply]]] = {
            "stock": lambda: [self._rival.ask([*self._tape.ids, *entered], answer=self._shape.answer)],
            "query": lambda: [self._query(unseen)],
            "radix": lambda: [self._query(self._plain, fresh=True) for _ in range(self._shape.decodes)],
            "flash": lambda: [self._flash() for _ in range(self._shape.hits)],
            "entry": lambda: [self._query(entered)],
            "ahead": lambda: [self._query(self._whole)],
        }
        names = list(arms)
        replies: dict[str, list[Reply]] = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            replies[name] = arms[name]()
        self._check(part, replies)
        if not is_kept:
            return
        for name in names:
            self.found.take(part, name, context, replies[name])
        self.found.compare(replies["entry"][0], replies["stock"][0])
        self.found.compare(replies["flash"][0], replies["radix"][0])
        right = self._question.is_right(self._decode(replies["flash"][0].output_ids), self._tape.records)
        self.found.judged += right is not None
        self.found.right += right is True

    def _wait(self) -> None:
        self._ours.wait_answered(self._session)
        self._ours.wait_entered(self._session)

    def _query(self, ids: list[int], *, fresh: bool = False) -> Reply:
        return self._ours.ask_session(self._session, ids, answer=self._shape.answer, fresh=fresh)

    def _flash(self) -> Reply:
        return self._ours.stored(self._session, self._plain, answer=self._shape.answer)

    def _check(self, part: str, replies: dict[str, list[Reply]]) -> None:
        """What is in which cache is what the arms are about."""
        for reply in replies["radix"]:
            if reply.uncached_tokens > len(self._plain):
                raise Unexpected(f"{reply.uncached_tokens} tokens were prefilled for a question of {len(self._plain)}")
        if replies["query"][0].meta["session"]["pin"] != "pinned":
            raise Unexpected(f"the session lost its pin: {replies['query'][0].meta['session']}")
        for arm, use in (("entry", "prefix"), ("ahead", "ahead"), ("query", None)):
            if (found := entry_use(replies[arm][0])) != use:
                raise Unexpected(f"{arm} was served by {found}, where it was to be {use}")
        stock = replies["stock"][0]
        if part == EVICTED and stock.uncached_tokens < 0.9 * len(self._tape.ids):
            raise Unexpected(f"the stock server still had all but {stock.uncached_tokens} tokens of its prompt")

    def _flood(self) -> None:
        """Unrelated prompts, as many tokens as the pool has, to both servers."""
        for _ in range(-(-self._shape.pool // self._shape.flood)):
            ids = self._corpus.data(self._corpus.fresh(), self._shape.flood)
            self._rival.ask(ids, answer=1)
            self._ours.ask(ids, answer=1)
