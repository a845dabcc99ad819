"""The gate: measures in idle time after start-up, and from then on decides how facts are served by default."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sgl_stateful.idle import IdleTime, ServerClosing
from sgl_stateful.repair import parse_repair
from sgl_stateful.settings import StatefulSettings

from .cached import read_result, result_path, write_result
from .choice import Choices, Target, Verdict, choose
from .conversations import built_in
from .measure import Subject, measure
from .shown import table_json, table_text
from .table import Table

logger = logging.getLogger(__name__)

REPAIRS = ("none", "first:4", "last:32", "first:4+last:32", "first:8+last:64")
"""What is measured beside the repair that the settings name."""

QUESTIONS_AT = MappingProxyType({5: 12, 20: 12, 50: 12})
"""Questions of the set by the number of facts they are served with."""

_RETRY_AFTER_S = 60.0  # twice as long each time
_LONGEST_RETRY_S = 3600.0


class State(StrEnum):
    """How far the gate is, and what came of it."""

    OFF = "off"
    MEASURING = "measuring"
    PASSED = "passed"
    """What the settings say is within the target."""
    REPAIRED = "repaired"
    """It is not with every number of facts; with a repair, which is served by default there, it is."""
    LIMITED = "limited"
    """With some numbers of facts nothing that was measured is: so many are served as text."""
    REFUSED = "refused"
    """Nothing that was measured is, with any number of facts: they are served as text."""


class FaithfulnessGate:
    """The gate of one server, for one state of its model's weights.

    Parameters
    ----------
    repair
        As the settings have it.
    is_repair_named
        Whether the settings name it: then it is kept, and nothing else is chosen.
    questions_at, repairs
        What is measured; the configured repair is measured in any case.
    folder
        Where results are kept; None keeps none.
    """

    def __init__(
        self,
        subject: Subject,
        *,
        target: Target,
        repair: str,
        is_repair_named: bool,
        folder: Path | None,
        questions_at: Mapping[int, int] = QUESTIONS_AT,
        repairs: Sequence[str] = REPAIRS,
        idle: IdleTime | None = None,
    ) -> None:
        self._subject = subject
        self._target = target
        self._configured = repair
        self._is_repair_named = is_repair_named
        self._folder = folder
        self._questions_at = questions_at
        self._repairs = list(dict.fromkeys((*repairs, repair)))
        self._idle = idle or IdleTime(subject.engine)
        self._table: Table | None = None
        self._choices: Choices | None = None
        self._error: str | None = None

    @classmethod
    def of(cls, settings: StatefulSettings, subject: Subject, *, is_kept: bool) -> FaithfulnessGate:
        """Return the gate that the settings ask for; ``is_kept`` says whether results are."""
        return cls(
            subject,
            target=settings.faithfulness,
            repair=settings.repair,
            is_repair_named="repair" in settings.model_fields_set,
            folder=settings.cache.expanduser() / "sgl-stateful" / "faithfulness" if is_kept else None,
        )

    @property
    def state(self) -> State:
        """How far the gate is."""
        if self._target is Target.OFF:
            return State.OFF
        if self._choices is None:
            return State.MEASURING
        repairs = {choice.repair for choice in self._choices.by_size.values()}
        if not repairs - {None}:
            return State.REFUSED
        if None in repairs:
            return State.LIMITED
        return State.PASSED if repairs == {self._configured} else State.REPAIRED

    def refusal(self, count: int) -> str | None:
        """Why ``count`` facts are not spliced, as a response's reason; None where they may be."""
        is_refused = self._choices is not None and self._choices.at(count).repair is None
        return f"faithfulness:{self._target}" if is_refused else None

    def repair(self, count: int) -> str:
        """What ``count`` facts are spliced with where a request names no repair."""
        return (self._choices and self._choices.at(count).repair) or self._configured

    def interrupt(self) -> None:
        """A caller's request has been served; to be called on the event loop."""
        self._idle.interrupt()

    async def run(self) -> None:
        """Find the result or measure it, trying again where that fails; cancel to stop."""
        retry_s = _RETRY_AFTER_S
        while self.state is State.MEASURING:
            try:
                self._adopt(await self._result())
            except asyncio.CancelledError:
                raise
            except ServerClosing:
                return
            except Exception as error:
                # Callers are served as the settings say meanwhile, and the status says that nothing is known.
                self._error = f"{type(error).__name__}: {error}"
                logger.exception("measuring faithfulness failed; trying again in %.0f s", retry_s)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _LONGEST_RETRY_S)

    async def _result(self) -> Table:
        conversations = built_in()
        path = self._folder and result_path(
            self._folder,
            fingerprint=self._subject.codec.fingerprint,
            policy=self._subject.ladder.name,
            repairs=self._repairs,
            questions_at=self._questions_at,
            conversations=conversations.version,
        )
        if path is not None and (known := await asyncio.to_thread(read_result, path)) is not None:
            return known
        table = await measure(
            self._subject,
            conversations,
            questions_at=self._questions_at,
            repairs=[parse_repair(name) for name in self._repairs],
            idle=self._idle,
        )
        if path is not None and not table.skipped:  # what does not fit now may fit at another start
            await asyncio.to_thread(write_result, path, table)
        return table

    def _adopt(self, table: Table) -> None:
        self._table, self._error = table, None
        self._choices = choose(table, self._target, repairs=[self._configured] if self._is_repair_named else None)
        level = logging.WARNING if self.state in (State.LIMITED, State.REFUSED) else logging.INFO
        logger.log(
            level,
            "faithfulness of %s, target %s: %s; KL to full prefill at the next token, nats:\n%s",
            table.policy,
            self._target,
            self._said(self._choices),
            table_text(table, self._target),
        )

    def _said(self, choices: Choices) -> str:
        if self.state is State.REFUSED:
            return "missed, facts are served as text"
        worst = max(choice.verdict for choice in choices.by_size.values())
        said = {
            Verdict.WITHIN: "met",
            Verdict.UNDECIDED: "undecided by so few questions",
            Verdict.BEYOND: "missed with some numbers of facts",
        }[worst]
        if self.state is State.PASSED:
            return said
        served = (f"{k} facts: {choice.repair or 'text'}" for k, choice in choices.by_size.items())
        return f"{said}, served by default: {', '.join(served)}"

    def as_dict(self) -> dict[str, Any]:
        """As the status shows it."""
        shown: dict[str, Any] = {"state": self.state, "target": self._target, "policy": self._subject.ladder.name}
        if self._table is None or self._choices is None:
            return {**shown, "chosen": None, "table": [], "measured_at": None, "error": self._error}
        return {
            **shown,
            "chosen": [
                {"k": k, "served": choice.repair or "text", "verdict": choice.verdict.name.lower()}
                for k, choice in self._choices.by_size.items()
            ],
            "table": table_json(self._table, self._target),
            "not_measured": list(self._table.skipped),
            "measured_at": self._table.measured_at,
            "error": None,
        }
