import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from judge_endpoint import Answer, Endpoint, Script, completion, serve

from locomo.dataset import Category, Question
from locomo.errors import JudgeRefused, ScoringError
from locomo.judging.cache import VerdictCache
from locomo.judging.client import ChatClient, Patience
from locomo.judging.controls import VAGUE_ANSWERS, ControlKind, make_controls
from locomo.judging.judge import Judge, JudgeSettings, open_judge
from locomo.judging.prompt import JudgePrompt
from locomo.judging.report import JudgedAnswer, JudgeItem, JudgeReport
from locomo.judging.verdict import Verdict

TEMPLATE = "{question}|{gold}|{prediction}"
C, W, A, U = Verdict.CORRECT, Verdict.WRONG, Verdict.ABSTAINED, Verdict.UNJUDGED


def question(index: int, category: int = 4, sample: str = "conv-1") -> Question:
    answer = None if category == 5 else f"town {index} of {sample}"
    return Question(sample, index, f"Where is {index}?", answer, "trap", (), (), Category(category))


QUESTIONS = [question(index) for index in range(10)]


def verdict(word: str) -> Answer:
    return completion(f'{{"verdict": "{word}"}}')


def exact(body: dict[str, Any], number: int = 0) -> Answer:
    """A judge that knows: the gold is correct, "I don't know" abstains."""
    _, gold, prediction = body["messages"][0]["content"].split("|")
    return verdict("correct" if prediction == gold else "abstained" if prediction == "I don't know" else "wrong")


def generous(body: dict[str, Any], number: int) -> Answer:
    return verdict("correct")


def item(question: Question, prediction: str | None = None, arm: str = "text/tail@10") -> JudgeItem:
    return JudgeItem(arm, question, question.answer or "" if prediction is None else prediction)


class Towards(httpx.HTTPTransport):
    """Sends every request to an endpoint of the test's, whatever its address: verdicts are kept by address."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__()
        self._url = httpx.URL(endpoint.url)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.url = request.url.copy_with(host=self._url.host, port=self._url.port)
        return super().handle_request(request)


@contextmanager
def judge(endpoint: Endpoint, folder: Path, *, model: str = "judge", **settings: Any) -> Iterator[Judge]:
    patience = Patience(attempts=2)
    address = settings.pop("address", "http://judge.example/v1")
    client = ChatClient(
        address, model, timeout_s=30, patience=patience, transport=Towards(endpoint), sleep=lambda seconds: None
    )
    prompt = JudgePrompt(settings.pop("template", TEMPLATE))
    with closing(client), VerdictCache(folder / "verdicts.jsonl") as cache:
        yield Judge(client, cache, prompt=prompt, **settings)


def judged_by(script: Script, folder: Path, items: list[JudgeItem], **settings: Any) -> tuple[JudgeReport, Endpoint]:
    runs = settings.pop("runs", 3)
    with serve(script) as endpoint, judge(endpoint, folder, **settings) as it:
        return it.judge(items, runs=runs), endpoint


def test_three_runs_with_controls_and_no_verdict_asked_for_twice(tmp_path: Path) -> None:
    items = [item(asked) for asked in QUESTIONS[:6]]
    items += [item(asked, "I don't know") for asked in QUESTIONS[6:8]] + [
        item(asked, "Oslo") for asked in QUESTIONS[8:]
    ]
    progress: list[tuple[int, int]] = []
    with (
        serve(exact) as endpoint,
        judge(
            endpoint, tmp_path, control_share=0.2, on_progress=lambda done, total: progress.append((done, total))
        ) as it,
    ):
        report = it.judge(items)
        # 10 answers, and a known-wrong and a vague one for two questions; each in three runs
        assert len(endpoint.bodies) == 3 * (10 + 2 * 2)
        assert progress[0] == (0, 42)
        assert progress[-1] == (42, 42)
        assert it.judge(items) == report
        assert len(endpoint.bodies) == 42
    assert [answer.verdicts for answer in report.answers] == [(C, C, C)] * 6 + [(A, A, A)] * 2 + [(W, W, W)] * 2
    figures = report.arm("text/tail@10").as_json()
    assert figures["accuracy"] == pytest.approx(0.6)
    assert (figures["n"], figures["abstained"], figures["unjudged"], figures["runs"]) == (10, 2, 0, [0.6] * 3)
    assert figures["interval"][0] < 0.6 < figures["interval"][1]
    assert figures["over"] == "questions"
    assert [(run.known_wrong_accepted, run.vague_accepted, run.judged) for run in report.controls] == [
        (0.0, 0.0, 4)
    ] * 3
    assert (report.model, report.served_models, report.missing) == ("judge", ("judge-2026-01-01",), {})


def test_a_judge_that_accepts_everything_is_seen_to(tmp_path: Path) -> None:
    report, _ = judged_by(generous, tmp_path, [item(asked, "Oslo") for asked in QUESTIONS], control_share=0.3)
    assert report.arm("text/tail@10").accuracy is not None
    assert [(run.known_wrong_accepted, run.vague_accepted, run.judged) for run in report.controls] == [
        (1.0, 1.0, 6)
    ] * 3
    assert report.as_json()["controls"][0]["known_wrong_accepted"] == 1.0
    assert report.arms_json()["text/tail@10"]["false_accepts"] == {"known_wrong": 1.0, "vague": 1.0}


def test_a_stopped_judge_goes_on_where_it_was(tmp_path: Path) -> None:
    items = [item(asked) for asked in QUESTIONS]

    def fails_later(body: dict[str, Any], number: int) -> Answer:
        return exact(body) if number < 7 else (401, {}, b"key expired")

    with pytest.raises(JudgeRefused, match="refused with 401"):
        judged_by(fails_later, tmp_path, items, parallel=1, control_share=0.2)
    report, endpoint = judged_by(exact, tmp_path, items, control_share=0.2)
    assert len(endpoint.bodies) == 42 - 7
    whole, _ = judged_by(exact, tmp_path / "other", items, control_share=0.2)
    assert report == whole


@pytest.mark.parametrize(
    "change",
    [
        {"model": "another"},
        {"template": "Now: {question}|{gold}|{prediction}"},
        {"address": "http://another.example/v1"},
    ],
)
def test_another_judge_is_asked_anew(tmp_path: Path, change: dict[str, str]) -> None:
    items = [item(QUESTIONS[0])]
    first, _ = judged_by(exact, tmp_path, items, runs=1, control_share=1)
    second, endpoint = judged_by(generous, tmp_path, items, runs=1, control_share=1, **change)
    assert len(endpoint.bodies) == 2  # no other question to take a known-wrong answer from
    assert (first.controls[0].vague_accepted, second.controls[0].vague_accepted) == (0.0, 1.0)
    assert second.controls[0].known_wrong_accepted is None


def test_prose_is_asked_about_again_and_then_read(tmp_path: Path) -> None:
    def rambles(body: dict[str, Any], number: int) -> Answer:
        if len(body["messages"]) < 3:
            return completion("The correct answer might be another.")
        assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
        return verdict("wrong")

    report, endpoint = judged_by(rambles, tmp_path, [item(QUESTIONS[0])], runs=1, control_share=1)
    assert report.answers[0].verdicts == (W,)
    assert len(endpoint.bodies) == 2 * 2


def test_what_stays_prose_is_unjudged_and_no_zero(tmp_path: Path) -> None:
    def rambles(body: dict[str, Any], number: int) -> Answer:
        prediction = body["messages"][0]["content"].split("|")[2]
        return completion("Hard to say.") if prediction == "vexing" else exact(body)

    items = [item(QUESTIONS[0]), item(QUESTIONS[1], "vexing"), item(QUESTIONS[2])]
    report, endpoint = judged_by(rambles, tmp_path, items, runs=2, control_share=0.1)
    figures = report.arm("text/tail@10")
    assert [answer.verdict for answer in report.answers] == [C, U, C]
    assert figures.accuracy is not None
    assert figures.accuracy.estimate == 1.0
    assert (figures.n, figures.unjudged, figures.missing_verdicts, figures.runs) == (3, 1, 2, (1.0, 1.0))
    assert report.missing == {"no reply could be read as one verdict, of 3": 2}
    # not kept: asked again, and had
    report, endpoint = judged_by(exact, tmp_path, items, runs=2, control_share=0.1)
    assert len(endpoint.bodies) == 2
    assert [answer.verdict for answer in report.answers] == [C, W, C]


def test_an_endpoint_that_goes_away_is_given_up_and_the_rest_is_unjudged(tmp_path: Path) -> None:
    def goes(body: dict[str, Any], number: int) -> Answer:
        return exact(body) if number < 4 else (503, {}, b"")

    items = [item(asked) for asked in QUESTIONS]
    report, endpoint = judged_by(goes, tmp_path, items, parallel=1, give_up_after=3, control_share=0.1)
    assert len(endpoint.bodies) == 4 + 3 * 2
    figures = report.arm("text/tail@10")
    assert figures.runs == (1.0, None, None)
    assert (figures.unjudged, figures.missing_verdicts) == (6, 26)
    assert figures.accuracy is not None
    assert figures.accuracy.estimate == 1.0
    assert report.missing == {
        "answered 503, after 2 attempts": 3,
        "not asked: 3 requests in a row had no answer": 26 - 3 + 6,
    }
    assert [run.unjudged for run in report.controls] == [2, 2, 2]
    assert report.false_accepts() == {"known_wrong": None, "vague": None}


def test_an_endpoint_that_fails_now_and_then_is_not_given_up(tmp_path: Path) -> None:
    def limps(body: dict[str, Any], number: int) -> Answer:
        return exact(body) if number % 3 == 2 else (503, {}, b"")  # two attempts in vain, then one that succeeds

    items = [item(asked) for asked in QUESTIONS]
    report, _ = judged_by(limps, tmp_path, items, parallel=1, give_up_after=2, control_share=0.1)
    assert report.missing == {"answered 503, after 2 attempts": 18}  # every other one of 3 * 12


def test_a_refusal_ends_the_waits_of_the_other_requests(tmp_path: Path) -> None:
    waiting = threading.Event()

    def refuses(body: dict[str, Any], number: int) -> Answer:
        if number == 0:
            waiting.set()
            return 429, {"Retry-After": "90000"}, b""
        assert waiting.wait(60)
        return 401, {}, b"key expired"

    patience = Patience(longest_retry_after_s=90_000.0)
    with (
        serve(refuses) as endpoint,
        closing(ChatClient(endpoint.url, "judge", patience=patience)) as client,
        VerdictCache(tmp_path / "verdicts.jsonl") as cache,
        pytest.raises(JudgeRefused, match="refused with 401"),
    ):
        Judge(client, cache, prompt=JudgePrompt(TEMPLATE), parallel=2).judge([item(asked) for asked in QUESTIONS])


def test_without_any_verdict_there_is_no_accuracy(tmp_path: Path) -> None:
    report, _ = judged_by(lambda body, number: (500, {}, b""), tmp_path, [item(QUESTIONS[0])])
    figures = report.arm("text/tail@10").as_json()
    assert (figures["accuracy"], figures["interval"], figures["runs"]) == (None, None, [None] * 3)
    assert figures["unjudged"] == 1


def test_requests_run_side_by_side_up_to_the_bound(tmp_path: Path) -> None:
    three = threading.Barrier(3, timeout=60)
    lock, running, most = threading.Lock(), 0, 0

    def counts(body: dict[str, Any], number: int) -> Answer:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        three.wait()  # nobody goes on before three are there
        with lock:
            running -= 1
        three.wait()  # nor before all three are counted out
        return exact(body)

    judged_by(counts, tmp_path, [item(asked) for asked in QUESTIONS], runs=3, parallel=3, control_share=0.1)
    assert most == 3


def test_arms_share_verdicts_on_the_same_text(tmp_path: Path) -> None:
    items = [item(asked, arm=arm) for arm in ("full@0", "none@0") for asked in QUESTIONS[:3]]
    items.append(item(QUESTIONS[3], "Oslo", arm="none@0"))
    report, endpoint = judged_by(exact, tmp_path, items, runs=1, control_share=0.1)
    assert len(endpoint.bodies) == 3 + 1 + 2
    assert report.arms == ("full@0", "none@0")
    assert [report.arm(name).as_json()["accuracy"] for name in report.arms] == [1.0, 0.75]
    assert [answer.share_correct for answer in report.of_arm("none@0")] == [1.0, 1.0, 1.0, 0.0]


def test_adversarial_questions_are_counted_apart_by_the_judge_and_by_wording(tmp_path: Path) -> None:
    def strict(body: dict[str, Any], number: int) -> Answer:
        _, gold, prediction = body["messages"][0]["content"].split("|")
        assert gold in {"Not mentioned in the conversation", QUESTIONS[0].answer}
        return verdict("abstained" if prediction in {"I don't know", "Nobody said"} else "wrong")

    predictions = ["I don't know", "Nobody said", "Rome", "Not mentioned, perhaps Rome"]
    items = [item(question(20 + number, 5), prediction) for number, prediction in enumerate(predictions)]
    report, _ = judged_by(strict, tmp_path, [*items, item(QUESTIONS[0], "Rome")], control_share=1)
    figures = report.arm("text/tail@10").as_json()
    assert (figures["n"], figures["accuracy"], figures["abstained"]) == (1, 0.0, 0)
    assert figures["adversarial"] == {"n": 4, "declined_by_judge": 2, "declined_by_wording": 2, "unjudged": 0}
    assert report.controls[0].judged == 1  # adversarial questions have no controls


def test_figures_without_the_audited_questions() -> None:
    answers = [
        JudgedAnswer(item(question(0, sample="a"), "x"), (C, C, W)),
        JudgedAnswer(item(question(0, sample="b"), "x"), (W, U, W)),
        JudgedAnswer(item(question(1, sample="b"), "x"), (C, U, U)),
        JudgedAnswer(item(question(2, sample="b"), "x"), (A, A, C)),
    ]
    report = JudgeReport("judge", (), "0", tuple(answers), (), {})
    sound = {("a", 0), ("b", 1), ("b", 2), ("z", 9)}
    every, audited = report.arm("text/tail@10"), report.arm("text/tail@10", among=sound)
    assert every.accuracy is not None
    assert audited.accuracy is not None
    # questions: 2/3, 0, 1, 1/3; two conversations are too few for an interval
    assert every.accuracy == (pytest.approx(0.5), None, None, "conversations", 2)
    assert every.runs == (0.5, 0.5, pytest.approx(1 / 3))
    assert (every.abstained, every.missing_verdicts) == (1, 3)
    assert (audited.n, audited.accuracy.estimate) == (3, pytest.approx(2 / 3))
    assert [report.arms_json(among=among)["text/tail@10"]["n"] for among in (None, sound)] == [4, 3]


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [((C, C, W), C), ((A, W, A), A), ((C, W, A), U), ((C, W, U), U), ((U, A, U), A), ((U, U, U), U)],
)
def test_the_verdict_of_most_runs(verdicts: tuple[Verdict, ...], verdict: Verdict) -> None:
    assert JudgedAnswer(item(QUESTIONS[0]), verdicts).verdict is verdict


@pytest.mark.parametrize(
    ("verdicts", "correct"),
    [
        ((C, C, W), True),
        ((C, W, A), False),
        ((C, W, U), None),
        ((U, C, U), True),
        ((A, A, C), False),
        ((U, U, U), None),
    ],
)
def test_a_tie_is_neither_right_nor_wrong(verdicts: tuple[Verdict, ...], correct: bool | None) -> None:
    assert JudgedAnswer(item(QUESTIONS[0]), verdicts).is_correct is correct


def test_ties_are_counted_apart_from_what_no_run_judged() -> None:
    judged = [(C, W, U), (U, U, U), (C, W, A), (C, C, C)]
    answers = tuple(JudgedAnswer(item(QUESTIONS[number], "x"), found) for number, found in enumerate(judged))
    figures = JudgeReport("judge", (), "0", answers, (), {}).arm("text/tail@10")
    assert (figures.n, figures.unjudged, figures.tied, figures.missing_verdicts) == (4, 1, 2, 4)


def test_why_verdicts_are_missing_is_told_without_the_words_of_the_endpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def repeats(body: dict[str, Any], number: int) -> Answer:
        return 400, {}, f"not this: {body['messages'][0]['content']}".encode()

    report, _ = judged_by(repeats, tmp_path, [item(asked) for asked in QUESTIONS], runs=1, control_share=0.1)
    assert report.missing == {"refused with 400": 12}
    [told] = caplog.messages  # of the first; the others are alike
    assert "answered 400: not this: Where is " in told


def test_controls_are_a_fixed_share_and_the_same_each_time() -> None:
    questions = [question(index, 1 + index % 5, f"conv-{index % 3}") for index in range(250)]
    controls = make_controls(questions, questions, share=0.1)
    assert Counter(control.kind for control in controls) == {ControlKind.KNOWN_WRONG: 20, ControlKind.VAGUE: 20}
    assert make_controls(questions[::-1], questions[::-1], share=0.1) == controls
    golds = {asked.answer: asked for asked in questions if asked.answer is not None}
    for control in controls:
        assert control.question.category is not Category.ADVERSARIAL
        if control.kind is ControlKind.VAGUE:
            assert control.prediction in VAGUE_ANSWERS
        else:
            taken_from = golds[control.prediction]
            assert taken_from != control.question
            assert taken_from.category is control.question.category
            assert taken_from.sample_id == control.question.sample_id
    assert {control.prediction for control in controls} >= set(VAGUE_ANSWERS)
    assert len(make_controls(questions[:1], questions, share=0.01)) == 2
    assert make_controls([question(0, 5)], questions, share=1) == ()


def test_a_question_without_a_gold_is_named_before_anything_is_asked(tmp_path: Path) -> None:
    broken = Question("conv-1", 3, "Where?", None, None, (), (), Category.SINGLE_HOP)
    with serve(exact) as endpoint, judge(endpoint, tmp_path) as it:
        with pytest.raises(ScoringError, match="question 3 of conv-1"):
            it.judge([item(QUESTIONS[0]), item(broken, "Rome")])
        assert endpoint.bodies == []


def test_nothing_to_judge(tmp_path: Path) -> None:
    report, endpoint = judged_by(exact, tmp_path, [])
    assert (report.answers, report.arms, endpoint.bodies) == ((), (), [])
    assert [run.known_wrong_accepted for run in report.controls] == [None] * 3


def test_a_judge_from_settings(tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(TEMPLATE, encoding="utf-8")
    with serve(exact) as endpoint:
        settings = JudgeSettings(endpoint.url, "judge", api_key="k", prompt_file=prompt, control_share=1)
        with open_judge(settings, tmp_path / "out/verdicts.jsonl") as it:
            report = it.judge([item(QUESTIONS[0])], pool=QUESTIONS)
    assert report.arm("text/tail@10").runs == (1.0, 1.0, 1.0)
    assert report.controls[0].known_wrong_accepted == 0.0
    assert endpoint.headers[0]["Authorization"] == "Bearer k"
    # sha256sum of the template
    assert report.prompt_sha256 == "535fcfe4de4d3f88d57f08d032758241bb86f2c0bc6b8238b091825c6ee53efd"
    assert len((tmp_path / "out/verdicts.jsonl").read_text().splitlines()) == 3 * 3
