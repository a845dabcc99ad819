"""Any OpenAI-compatible endpoint, for the arms that send facts as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from locomo.arms.base import Answer, OnProgress, Scored, Served
from locomo.arms.prompts import STOP, messages, notes_of
from locomo.connection import ServerConnection
from locomo.dataset import Conversation
from locomo.errors import RequestRefused, ServerFailed
from locomo.judging.client import Patience
from locomo.reporting.arm_names import ArmName
from locomo.retrieval.index import UnitIndex
from locomo.retrieval.units import Unit, UnitText
from memstore.embedding import Embedder
from memstore.search.views import SearchMode


class OpenAIEndpoint:
    """A chat endpoint; a `System` and a context manager. What it serves is found by a store of ours beside it.

    Parameters
    ----------
    url
        As in ``https://host/v1``.
    api_key
        None sends none.
    store
        Empty directory for the store.
    max_tokens
        Longest answer.
    patience
        With an endpoint that is busy.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str | None,
        store: Path,
        embedder: Embedder,
        max_tokens: int,
        patience: Patience | None = None,
    ) -> None:
        self._server = ServerConnection(url, api_key=api_key, patience=patience)
        self._model = model
        self._max_tokens = max_tokens
        self._embedder = embedder.fingerprint
        self._index = UnitIndex(store, embedder, text=UnitText.PLAIN, one_stream=True)
        self._owner = ""
        self._filled: set[str] = set()
        self._units: dict[str, Unit] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self._index.close()

    def why_not(self, arm: ArmName) -> str | None:
        """Splicing needs a server of ours, and so do log probabilities of a given answer."""
        if arm.policy is not None:
            return "an OpenAI-compatible endpoint has no memory to splice from"
        if arm.kind == "floor":
            return "floors need log probabilities of a forced answer, which an OpenAI-compatible endpoint does not give"
        return None

    def describe(self) -> dict[str, Any]:
        """The model by its name, for an endpoint says no more of it, and what embeds here."""
        return {"model": {"name": self._model}, "endpoint": self._server.shown_url, "embedder": self._embedder}

    def check(self) -> None:
        """Ask for one token.

        Raises
        ------
        ServerFailed
            It is refused, hence everything is, or the endpoint fails.
        """
        body = {"model": self._model, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1}
        try:
            self._server.json("POST", "chat/completions", json=body)
        except RequestRefused as error:
            raise ServerFailed(f"the endpoint refuses any prompt: {error}") from error

    def encodings(self) -> dict[str, dict[str, float]]:
        """None: an endpoint encodes nothing."""
        return {}

    def open(self, conversation: Conversation, units: Sequence[Unit], on_progress: OnProgress) -> None:
        """Embed the units, once for each conversation."""
        self._owner = conversation.sample_id
        self._units = {unit.id: unit for unit in units}
        if self._owner in self._filled:
            return
        done = 0

        def more(count: int) -> None:
            nonlocal done
            done += count
            on_progress(done, len(units))

        self._index.fill(self._owner, units, on_progress=more)
        self._filled.add(self._owner)

    def retrieve(self, question: str, k: int) -> list[str]:
        """The search that is the default of a server of ours."""
        if k == 0:
            return []
        return [hit.unit for hit in self._index.search(self._owner, question, k=k, mode=SearchMode.HYBRID)]

    def forget(self) -> None:
        """Nothing: the endpoint's caches are its own."""

    def answer(self, question: str, served: Served) -> Answer:
        """Decode greedily, to the end of the line at most."""
        notes = notes_of([self._units[unit] for unit in served.units])
        body = {
            "model": self._model,
            "messages": messages(question, placement=served.placement, notes=notes),
            "temperature": 0,
            "max_tokens": self._max_tokens,
            "stop": [STOP],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text: list[str] = []
        usage: dict[str, Any] = {}
        first_s: float | None = None
        elapsed_s = 0.0
        for elapsed_s, chunk in self._server.events("chat/completions", body):
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices") or []:
                if content := (choice.get("delta") or {}).get("content"):
                    first_s = first_s if first_s is not None else elapsed_s
                    text.append(content)
        prompt = int(usage.get("prompt_tokens", 0))
        cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        return Answer(
            text="".join(text),
            used=served.units,
            tier="text" if served.units else "none",
            reason=None,
            tokens={"prompt": prompt, "prefilled": prompt - cached, "spliced": 0},
            ttft_ms=1e3 * (first_s if first_s is not None else elapsed_s),
            ms={},
        )

    def score(
        self, question: str, served: Served, continuations: Sequence[str], *, prompt: Answer, top: int
    ) -> list[Scored] | None:
        """None: chat endpoints give no log probabilities of a given answer."""
        return None
