"""Appends, rewinds, changes of facts and questions in seeded orders, and whether any answer is of an earlier state."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from sessions_bench.clients import Unexpected

from .clients import FlashClient

TOKENS = 2
_CHANGES = ("append", "append", "rewind", "rewind", "fact")
_SETTLED = 0.4  # of the interleavings: every question is answered before they begin
_OPENING, _APPENDED, _ASKED = 24, 4, 4
_WITH_FACTS = 0.2  # of what is asked
_LONGEST = 90  # tokens; a session that is longer is followed by another
_CITIES = ("Porto", "Faro", "Braga", "Evora", "Aveiro", "Lagos")
_GREEDY = {"temperature": 0, "ignore_eos": True, "max_new_tokens": TOKENS}

Decode = Callable[[Sequence[Sequence[int]]], Sequence[Sequence[int]]]
"""Greedy answers of ``TOKENS`` tokens to prompts of token ids, by somebody who knows nothing of sessions."""


@dataclass(slots=True)
class Outcome:
    """What came of all interleavings.

    Attributes
    ----------
    stored
        Answers that had been stored, of those that were asked.
    stale
        What was asked, and differs from what the state at that moment has answered.
    """

    interleavings: int = 0
    asked: int = 0
    stored: int = 0
    with_facts: int = 0
    stale: list[str] = field(default_factory=list)


class Interleavings:
    """Runs them against one server, one after the other.

    Each is one or two changes and one or two questions in any order. Some begin with all answers there; the others meet
    questions that wait or are being answered.

    A question without facts is held against ``decode`` of the token ids that the session has by our own account. One
    with facts is asked again at once, to be decoded for real.

    Parameters
    ----------
    owner
        One that nobody else has.
    """

    def __init__(self, client: FlashClient, decode: Decode, *, seed: int, owner: str) -> None:
        self._client = client
        self._decode = decode
        self._rng = random.Random(seed)
        self._owner = owner
        self._questions = [self._ids(_ASKED) for _ in range(2)]
        self._memory = {"owner": owner, "mode": "text", "k": 2}
        self._session = ""
        self._versions: dict[int, list[int]] = {}
        self._fact = ""
        self._expected: list[tuple[str, list[int], list[int]]] = []
        self.outcome = Outcome()

    def run(self, count: int) -> Outcome:
        """Run so many, and compare everything that was answered."""
        self._fact = self._post("/v1/memory/facts", text=self._sentence(), wait=True)["facts"][0]["id"]
        for _ in range(count):
            if not self._session or len(self._now) > _LONGEST:
                self._reopen()
            steps = [*self._rng.sample(_CHANGES, self._rng.randint(1, 2)), *["ask"] * self._rng.randint(1, 2)]
            self._rng.shuffle(steps)
            if self._rng.random() < _SETTLED:
                steps.insert(0, "settle")
            for step in steps:
                self._step(step, f"interleaving {self.outcome.interleavings}: {' '.join(steps)}")
            self.outcome.interleavings += 1
        self._close()
        answers = self._decode([prompt for _, prompt, _ in self._expected])
        for (told, _, said), right in zip(self._expected, answers, strict=True):
            if list(right) != said:
                self.outcome.stale.append(f"{told}: {said}, where the state has {list(right)}")
        return self.outcome

    def _step(self, step: str, told: str) -> None:
        match step:
            case "append":
                self._append(self._ids(_APPENDED))
            case "rewind":
                self._rewind(self._rng.choice(sorted(self._versions)[-4:]))
            case "fact":
                self._post(f"/v1/memory/facts/{self._fact}", method="PATCH", text=self._sentence())
            case "settle":
                self._client.wait_answered(self._session, owner=self._owner)
            case "ask" if self._rng.random() < _WITH_FACTS:
                self._ask_with_facts(told)
            case "ask":
                self._ask(self._rng.choice(self._questions), told)

    @property
    def _now(self) -> list[int]:
        return self._versions[max(self._versions)]

    def _ids(self, count: int) -> list[int]:
        return self._rng.choices(range(1000, 40_000), k=count)

    def _sentence(self) -> str:
        return f"The office of Ana is in {self._rng.choice(_CITIES)}."

    def _post(self, path: str, *, status: int = httpx.codes.OK, method: str = "POST", **body: Any) -> dict[str, Any]:
        return self._client.call(method, path, status, json={"owner": self._owner, **body})

    def _reopen(self) -> None:
        self._close()
        ids = self._ids(_OPENING)
        self._session = self._post("/v1/sessions", status=httpx.codes.CREATED, input_ids=ids)["id"]
        self._versions = {1: ids}
        greedy = {name: value for name, value in _GREEDY.items() if name != "max_new_tokens"}
        asked: list[dict[str, Any]] = [{"input_ids": question} for question in self._questions]
        asked.append({"text": "Where is the office of Ana? In", "memory": self._memory})
        for number, question in enumerate(asked):
            body: dict[str, Any] = {"name": f"q{number}", "max_tokens": TOKENS, "sampling_params": greedy, **question}
            self._post(f"/v1/sessions/{self._session}/flash", status=httpx.codes.CREATED, **body)

    def _close(self) -> None:
        if self._session:
            self._client.call("DELETE", f"/v1/sessions/{self._session}", params={"owner": self._owner})

    def _append(self, more: list[int]) -> None:
        self._post(f"/v1/sessions/{self._session}/append", input_ids=more)
        self._versions[max(self._versions) + 1] = [*self._now, *more]

    def _rewind(self, version: int) -> None:
        self._post(f"/v1/sessions/{self._session}/rewind", version=version)
        self._versions[max(self._versions) + 1] = self._versions[version]

    def _ask(self, question: list[int], told: str) -> None:
        reply = self._query(input_ids=question)
        self._expected.append((told, [*self._now, *question], reply["output_ids"]))

    def _ask_with_facts(self, told: str) -> None:
        asked: dict[str, Any] = {"text": "Where is the office of Ana? In", "memory": self._memory}
        said = self._query(**asked)["output_ids"]
        right = self._query(**asked, fresh=True)
        if right.get("served_from") == "flash":
            raise Unexpected(f"an answer that was to be decoded was stored: {right}")
        self.outcome.with_facts += 1
        if said != right["output_ids"]:
            self.outcome.stale.append(f"{told}: {said} with facts, decoded for real {right['output_ids']}")

    def _query(self, *, fresh: bool = False, **asked: Any) -> dict[str, Any]:
        reply = self._post(f"/v1/sessions/{self._session}/query", sampling_params=_GREEDY, fresh=fresh, **asked)
        if reply["data_version"] != max(self._versions):
            self.outcome.stale.append(f"version {reply['data_version']} of {max(self._versions)}")
        if not fresh:
            self.outcome.asked += 1
            self.outcome.stored += reply.get("served_from") == "flash"
        return reply
