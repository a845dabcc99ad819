"""What is measured, in which order."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .appends import append_rows
from .clients import PromptClient, SessionClient
from .corpus import Corpus
from .limits import refusal_rows, restart_rows
from .load import load_rows
from .measure import Row
from .queries import control_rows, floor_rows, overhead_rows, query_rows
from .servers import Server, both, compared, our_server, rival_server, shared_flags
from .shape import Shape
from .verify import row, verify

PARTS = ("floor", "control", "query", "overhead", "appends", "load", "pins", "restart")
_TIMED_DTYPE = "bfloat16"


class Suite:
    """Starts the servers below `directory`, checks their answers, and times them.

    Parameters
    ----------
    only
        Of `PARTS`; answers are checked in any case.
    say
        Tells what is going on.
    advance
        Called after each event of the load.
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
    ) -> None:
        self._model = model
        self._directory = directory
        self._shape = shape
        self._only = only
        self._seed = seed
        self._say = say
        self._advance = advance
        self._corpus = Corpus.of_model(model)
        self.rows: list[Row] = []
        self.measured: dict[str, float] = {}
        self.servers: dict[str, object] = {}
        """What both servers have in common, by their own word."""

    def run(self) -> None:
        """Check and measure everything.

        Raises
        ------
        AssertionError
            An fp32 answer differs from the rival's, or a server did more or other work than it says.
        """
        with self._both("float32") as (ours, rival, _):
            self._say("float32: are our answers the rival's?")
            agreement = verify(ours, rival, self._corpus, self._shape)
            self.rows.append(row(agreement, "float32"))
            assert agreement.same_answers == agreement.questions, f"float32 answers differ: {agreement}"
        if self._wants("floor"):
            self._say("floor: the bare model")
            self.rows += floor_rows(self._model, self._shape, _TIMED_DTYPE)
        with self._both(_TIMED_DTYPE) as (ours, rival, servers):
            self._say(f"{_TIMED_DTYPE}: how many answers are the rival's?")
            self.rows.append(row(verify(ours, rival, self._corpus, self._shape), _TIMED_DTYPE))
            self._timed(ours, rival, servers)

    def _timed(self, ours: SessionClient, rival: PromptClient, servers: tuple[Server, Server]) -> None:
        shape, corpus = self._shape, self._corpus
        if self._wants("control"):
            self._say("control: does an idle neighbour slow a server?")
            self.rows += control_rows(ours, rival, servers, corpus, shape)
        if self._wants("query"):
            self._say(f"query: sessions of {shape.short} and {shape.long} tokens in turns")
            rows, self.measured["query_ttft_6000_over_600"] = query_rows(ours, corpus, shape)
            self.rows += rows
        if self._wants("overhead"):
            self._say("overhead: a query and a plain request in turns")
            rows, self.measured["query_overhead_ratio"] = overhead_rows(ours, corpus, shape)
            self.rows += rows
        if self._wants("appends"):
            self._say(f"appends: {shape.appends}")
            rows, self.measured["append_tokens_ratio"] = append_rows(ours, corpus, shape, seed=self._seed)
            self.rows += rows
        if self._wants("load"):
            self._say(
                f"load: {shape.load_sessions} sessions of {shape.load_session} tokens, {shape.load_pinned} pinned, "
                f"on pools of {shape.pool}"
            )
            rows, ratios = load_rows(ours, rival, corpus, shape, seed=self._seed, advance=self._advance)
            self.rows += rows
            self.measured |= ratios
        if self._wants("pins"):
            self._say("pins: 300 % of the budget")
            self.rows += refusal_rows(ours, servers[0].url, corpus, shape)
        if self._wants("restart"):
            self._say("restart: a session's first answer")
            self.rows += restart_rows(ours, servers[0], corpus, shape)

    @contextmanager
    def _both(self, dtype: str) -> Iterator[tuple[SessionClient, PromptClient, tuple[Server, Server]]]:
        self._say(f"{dtype}: both servers start")
        directory = self._directory / dtype
        directory.mkdir()
        flags = shared_flags(dtype=dtype, pool_tokens=self._shape.pool)
        ours = our_server(self._model, flags, directory, budget_tokens=self._shape.budget)
        rival = rival_server(self._model, flags, directory)
        with both(ours, rival), SessionClient(ours.url) as sessions, PromptClient(rival.url) as prompts:
            self.servers = compared(ours.info(), rival.info())
            yield sessions, prompts, (ours, rival)

    def _wants(self, part: str) -> bool:
        return not self._only or part in self._only
