"""Cases against one server, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from locomo.client import MemoryClient
from locomo.dataset import Conversation
from locomo.errors import OracleError
from memstore import KVBlobs

from .cases import Case
from .comparison import Difference
from .oracle import SpliceOracle
from .reference import ReferenceModel
from .serving import OracleClient
from .subject import Subject, read_subject


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one case.

    ``control`` is the difference with the positions of the prompt's middle fact off by one, None where that was not
    computed.
    """

    case: Case
    difference: Difference
    control: Difference | None
    spliced_tokens: int
    seen_tokens: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self.case), "k": self.case.k, **{k: v for k, v in asdict(self).items() if k != "case"}}


class CaseRunner:
    """Conversations on a server, ready to be asked about.

    Parameters
    ----------
    blobs
        The server's KV store, opened beside the server.
    top, steps
        As for ``SpliceOracle``.
    """

    def __init__(self, url: str, blobs: KVBlobs, reference: ReferenceModel, *, top: int, steps: int) -> None:
        self._memory = MemoryClient(url)
        self._client = OracleClient(url)
        self._blobs = blobs
        self._oracle = SpliceOracle(self._client, reference, top=top, steps=steps)
        self._subjects: list[tuple[Subject, list[str]]] = []

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
        self._memory.close()

    def model_description(self) -> dict[str, Any]:
        """The model and the KV pool, as the server describes them."""
        described: dict[str, Any] = self._client.status()["model"]
        return described

    def add(self, conversation: Conversation, *, on_progress: Callable[[int, int], None]) -> None:
        """Add a conversation's turns as facts, wait for their KV, and learn its first question's prompts."""
        if not conversation.questions:
            raise OracleError(f"conversation {conversation.sample_id} has no question to ask behind its facts")
        owner = f"oracle-{conversation.sample_id}"
        fact_ids = self._memory.ingest(conversation, owner=owner, on_progress=on_progress)
        question = conversation.questions[0].question
        subject = read_subject(self._client, self._blobs, owner=owner, fact_id=fact_ids[0], question=question)
        self._subjects.append((subject, fact_ids))

    def run(self, case: Case, *, with_control: bool) -> Row:
        """Have a case served and compare it.

        Raises
        ------
        OracleError, ServerFailed
        """
        started = time.monotonic()
        subject, fact_ids = self._subjects[case.conversation]
        asked = self._oracle.ask(subject, case.placement, [fact_ids[i] for i in case.turns], policy=case.policy)
        difference = self._oracle.compare(asked)
        control = self._oracle.compare(asked, shifts={case.k // 2: 1}) if with_control else None
        seconds = time.monotonic() - started
        return Row(case, difference, control, asked.spliced_tokens, asked.seen_tokens, seconds)
