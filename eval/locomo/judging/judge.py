"""Judging the answers of a run: three times each, with controls, a bounded number of requests at a time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from locomo.dataset import Question
from locomo.errors import JudgeUnanswered
from locomo.judging.cache import StoredVerdict, VerdictCache, verdict_key
from locomo.judging.client import ChatClient, Message
from locomo.judging.controls import make_controls
from locomo.judging.prompt import JudgePrompt, load_prompt
from locomo.judging.report import JudgedAnswer, JudgeItem, JudgeReport, control_rates
from locomo.judging.verdict import Verdict, parse_verdict
from locomo.scoring.official import gold_answer

_ASK_AGAIN = (
    "That cannot be read as one verdict. Reply with exactly one JSON object and nothing else: "
    '{"verdict": "correct"}, {"verdict": "wrong"} or {"verdict": "abstained"}.'
)
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """Which judge, and how it is asked; defaults are the command's."""

    base_url: str
    model: str
    api_key: str | None = None
    prompt_file: Path | None = None
    parallel: int = 4
    timeout_s: float = 60.0
    control_share: float = 0.1


@dataclass(frozen=True, slots=True)
class _Case:
    """One answer in one run, as far as the judge can tell it from others."""

    question: str
    gold: str
    prediction: str
    run: int


@dataclass(frozen=True, slots=True)
class _Missing:
    """Why there is no verdict: a status or a fixed reason, nothing that the endpoint wrote."""

    reason: str


class Judge:
    """Judges answers through one endpoint and remembers every verdict.

    Parameters
    ----------
    client
        The endpoint and the pinned model.
    cache
        Verdicts had before, and where new ones go. What could not be judged is not kept: it is asked again next time.
    prompt
        The template.
    parallel
        Largest number of requests at a time.
    control_share
        Share of the questions that get a known-wrong and a vague answer besides, in every run.
    readings
        How often one answer is asked about until the reply can be read.
    give_up_after
        After this many requests in a row without an answer the endpoint is taken to be away: the rest is unjudged.
    on_progress
        Called with the verdicts had or given up and their total, from the thread that called `judge`.
    """

    def __init__(
        self,
        client: ChatClient,
        cache: VerdictCache,
        *,
        prompt: JudgePrompt,
        parallel: int = 4,
        control_share: float = 0.1,
        readings: int = 3,
        give_up_after: int = 20,
        on_progress: Progress | None = None,
    ) -> None:
        assert parallel > 0, parallel
        assert readings > 0, readings
        self._client = client
        self._cache = cache
        self._prompt = prompt
        self._parallel = parallel
        self._control_share = control_share
        self._readings = readings
        self._give_up_after = give_up_after
        self._on_progress = on_progress
        self._unanswered_in_a_row = 0
        self._lock = threading.Lock()

    def judge(
        self, items: Iterable[JudgeItem], *, runs: int = 3, pool: Sequence[Question] | None = None
    ) -> JudgeReport:
        """Judge every answer `runs` times, and the controls of their questions as often.

        Parameters
        ----------
        items
            Answers of any number of arms. Those that agree in question, gold and text are asked about once per run.
        runs
            How often each is judged; runs differ in nothing but the endpoint's own variation.
        pool
            Questions whose golds serve as known-wrong answers; those of `items` by default.

        Raises
        ------
        ScoringError
            A question has no gold answer.
        JudgeRefused
            The endpoint refuses every request; the message holds nothing of the data. Verdicts had until then are kept.
        VerdictCacheError
            A verdict cannot be kept. After either of the last two the client no longer retries: make another.
        """
        answers = list(items)
        questions = list({(item.question.sample_id, item.question.index): item.question for item in answers}.values())
        others = questions if pool is None else pool
        controls = make_controls(questions, others, share=self._control_share)
        asked = [(item.question, item.prediction) for item in answers]
        asked += [(control.question, control.prediction) for control in controls]
        cases = [
            [_Case(question.question, gold_answer(question), prediction, run) for question, prediction in asked]
            for run in range(1, runs + 1)
        ]
        outcomes = self._ask_all(dict.fromkeys(case for row in cases for case in row))
        verdicts = [[_verdict(outcomes[case]) for case in row] for row in cases]  # [run][answer, then control]
        missing = [outcome.reason for row in cases for case in row if isinstance(outcome := outcomes[case], _Missing)]
        stored = (outcome for outcome in outcomes.values() if isinstance(outcome, StoredVerdict))
        return JudgeReport(
            model=self._client.model,
            served_models=tuple(sorted({outcome.model for outcome in stored})),
            prompt_sha256=self._prompt.sha256,
            answers=tuple(
                JudgedAnswer(item, tuple(row[position] for row in verdicts)) for position, item in enumerate(answers)
            ),
            controls=tuple(control_rates(controls, row[len(answers) :]) for row in verdicts),
            missing=dict(Counter(missing)),
        )

    def _ask_all(self, cases: Iterable[_Case]) -> dict[_Case, StoredVerdict | _Missing]:
        keys = {case: self._key(case) for case in cases}
        outcomes: dict[_Case, StoredVerdict | _Missing] = {
            case: stored for case, key in keys.items() if (stored := self._cache.get(key)) is not None
        }
        self._unanswered_in_a_row = 0
        self._report(len(outcomes), len(keys))
        pool = ThreadPoolExecutor(self._parallel, thread_name_prefix="judge")
        try:
            futures = {pool.submit(self._ask, case, key): case for case, key in keys.items() if case not in outcomes}
            for future in as_completed(futures):
                outcomes[futures[future]] = future.result()
                self._report(len(outcomes), len(keys))
        except BaseException:
            self._client.abandon()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        return outcomes

    def _ask(self, case: _Case, key: str) -> StoredVerdict | _Missing:
        with self._lock:
            if self._unanswered_in_a_row >= self._give_up_after:
                return _Missing(f"not asked: {self._give_up_after} requests in a row had no answer")
        prompt = self._prompt.render(question=case.question, gold=case.gold, prediction=case.prediction)
        messages: list[Message] = [{"role": "user", "content": prompt}]
        for _ in range(self._readings):
            try:
                reply = self._client.complete(messages)
            except JudgeUnanswered as error:
                with self._lock:
                    self._unanswered_in_a_row += 1
                return _Missing(str(error))
            with self._lock:
                self._unanswered_in_a_row = 0
            if (verdict := parse_verdict(reply.text)) is not None:
                stored = StoredVerdict(key, verdict, reply.model, reply.text)
                self._cache.put(stored)
                return stored
            # At temperature 0 the same question would have the same reply.
            messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": _ASK_AGAIN}]
        return _Missing(f"no reply could be read as one verdict, of {self._readings}")

    def _key(self, case: _Case) -> str:
        return verdict_key(
            endpoint=self._client.base_url,
            prompt=self._prompt.template,
            model=self._client.model,
            question=case.question,
            gold=case.gold,
            prediction=case.prediction,
            run=case.run,
        )

    def _report(self, done: int, total: int) -> None:
        if self._on_progress is not None:
            self._on_progress(done, total)


@contextmanager
def open_judge(settings: JudgeSettings, verdicts: Path, *, on_progress: Progress | None = None) -> Iterator[Judge]:
    """Make a judge whose verdicts are kept in the file `verdicts`; closes what it opened.

    Raises
    ------
    JudgePromptError
        The prompt's file cannot be used.
    VerdictCacheError
        The verdicts' file cannot be used.
    """
    prompt = load_prompt(settings.prompt_file)
    client = ChatClient(settings.base_url, settings.model, api_key=settings.api_key, timeout_s=settings.timeout_s)
    try:
        with VerdictCache(verdicts) as cache:
            yield Judge(
                client,
                cache,
                prompt=prompt,
                parallel=settings.parallel,
                control_share=settings.control_share,
                on_progress=on_progress,
            )
    finally:
        client.close()


def _verdict(outcome: StoredVerdict | _Missing) -> Verdict:
    return outcome.verdict if isinstance(outcome, StoredVerdict) else Verdict.UNJUDGED
