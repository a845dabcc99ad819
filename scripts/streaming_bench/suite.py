"""What is measured, in which order."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sessions_bench.clients import PromptClient
from sessions_bench.corpus import Corpus
from sessions_bench.servers import both, compared, our_server, rival_server, shared_flags
from tokenizers import Tokenizer

from . import beside, gates, rows
from .clients import FlashClient, Sample
from .questions import Question, last_close, questions
from .rows import Report
from .shape import Shape
from .sweep import SWEEP, Sweeper
from .tape import Tape
from .verify import WrongAnswer, interleaved, same_answers

PARTS = ("sweep", "gate", "foreground", "saturated")
_TIMED_DTYPE = "bfloat16"


class Suite:
    """Starts the servers below ``directory``, checks their answers, and times them.

    Parameters
    ----------
    only
        Of `PARTS`; answers are checked in any case.
    say
        Tells what is going on.
    done
        Called with the report after each part.
    """

    def __init__(
        self,
        model: Path,
        directory: Path,
        shape: Shape,
        *,
        only: Sequence[str],
        seed: int,
        say: Callable[[str], None],
        advance: Callable[[], None],
        done: Callable[[Report], None],
    ) -> None:
        self._model = model
        self._directory = directory
        self._shape = shape
        self._only = only
        self._seed = seed
        self._say = say
        self._advance = advance
        self._done = done
        self._corpus = Corpus.of_model(model)
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.report = Report()
        self.samples: dict[tuple[str, int], list[Sample]] = {}
        """Of the sweep, by arm and length."""
        self.lines: list[dict[str, Any]] = []
        """Every sample, as JSON."""
        self.servers: dict[str, object] = {}
        """What both servers have in common, by their own word."""

    def run(self) -> None:
        """Check and measure everything.

        Raises
        ------
        WrongAnswer
            A float32 answer differs from the stock server's, or is one of an earlier state.
        Unexpected
            Something was served otherwise than it is to be timed.
        """
        with self._both("float32") as (ours, rival, _):
            self._say("float32: does every arm say what stock SGLang says?")
            asked = [one for one in questions() if one.name.endswith("-ORVA")]
            count = same_answers(ours, rival, self._tape(), asked, self._shape)
            self._say(f"{count} answers are the same; {self._shape.interleavings} interleavings")
            outcome = interleaved(ours, rival, self._shape, seed=self._seed)
            rows.of_interleavings(self.report, outcome)
            self._done(self.report)
            if outcome.stale:
                raise WrongAnswer(f"{len(outcome.stale)} stale answers, the first: {outcome.stale[0]}")
        with self._both(_TIMED_DTYPE) as (ours, rival, url):
            self._timed(ours, rival, url)

    def _timed(self, ours: FlashClient, rival: PromptClient, url: str) -> None:
        shape, corpus, asked = self._shape, self._corpus, questions()
        question = last_close("ORVA")
        if self._wants("sweep"):
            self._say(f"sweep: all arms in turns at {', '.join(map(str, shape.contexts))} tokens")
            self._sweep(ours, rival, question)
        if self._wants("gate"):
            closed = [one for one in asked if one.choices]
            self._say(f"gate: {len(closed)} questions with {shape.gate_versions} versions")
            found = gates.measure(ours, self._tape(), closed, shape)
            rows.of_gates(self.report, found)
            self._keep([sample for block in (*found.gate, *found.decode) for sample in block])
            self.lines += [{"part": "gate", "judged": asdict(one)} for one in found.held_out]
        if self._wants("foreground"):
            self._say(f"foreground: {shape.blocks} blocks of {shape.block} requests")
            taken = beside.foreground(ours, self._tape, asked, corpus, shape, seed=self._seed)
            rows.of_foreground(self.report, taken, registered=shape.registered)
            self._keep([sample for blocks in taken.values() for block in blocks for sample in block])
        if self._wants("saturated"):
            self._say(f"saturated: {shape.busy_blocks} blocks of {shape.busy_block} hits")
            taken = beside.saturated(ours, url, self._tape(), question, corpus, shape)
            rows.of_saturated(self.report, taken)
            self._keep([sample for blocks in taken.values() for block in blocks for sample in block])

    def _sweep(self, ours: FlashClient, rival: PromptClient, question: Question) -> None:
        sweeper = Sweeper(
            ours,
            rival,
            self._tape(),
            self._corpus,
            self._shape,
            question,
            decode=self._tokenizer.decode,
            advance=self._advance,
        )
        found = sweeper.run()
        rows.of_sweep(self.report, found)
        for (part, arm, context), blocks in found.samples.items():
            samples = [sample for block in blocks for sample in block]
            self._keep(samples)
            if part == SWEEP:
                self.samples[arm, context] = samples

    def _keep(self, samples: Sequence[Sample]) -> None:
        self.lines += [asdict(sample) for sample in samples]
        self._done(self.report)

    def _tape(self, number: int = 0) -> Tape:
        return Tape.of_model(self._model, 1000 * self._seed + number)

    @contextmanager
    def _both(self, dtype: str) -> Iterator[tuple[FlashClient, PromptClient, str]]:
        self._say(f"{dtype}: both servers start")
        directory = self._directory / dtype
        directory.mkdir()
        flags = shared_flags(dtype=dtype, pool_tokens=self._shape.pool)
        ours = our_server(self._model, flags, directory, budget_tokens=self._shape.budget)
        rival = rival_server(self._model, flags, directory)
        with both(ours, rival), FlashClient(ours.url) as sessions, PromptClient(rival.url) as prompts:
            self.servers = compared(ours.info(), rival.info())
            yield sessions, prompts, ours.url

    def _wants(self, part: str) -> bool:
        return not self._only or part in self._only
