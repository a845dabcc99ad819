"""Any OpenAI-compatible endpoint, for the arms that send facts as text."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from locomo.arms.base import Answer, OnProgress, Scored, Served
from locomo.arms.prompts import STOP, messages, notes_of
from locomo.dataset import Conversation
from locomo.errors import ServerFailed
from locomo.reporting.arm_names import ArmName
from locomo.retrieval.index import UnitIndex
from locomo.retrieval.units import Unit
from memstore.embedding import Embedder

_TIMEOUT_S = 600.0


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
    """

    def __init__(
        self, url: str, model: str, *, api_key: str | None, store: Path, embedder: Embedder, max_tokens: int
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=url.rstrip("/") + "/", headers=headers, timeout=_TIMEOUT_S)
        self._model = model
        self._max_tokens = max_tokens
        self._index = UnitIndex(store, embedder, with_fields=True)
        self._owner = ""
        self._filled: set[str] = set()
        self._units: dict[str, Unit] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()
        self._index.close()

    def why_not(self, arm: ArmName) -> str | None:
        """Splicing needs a server of ours, and so do log probabilities of a given answer."""
        if arm.policy is not None:
            return "an OpenAI-compatible endpoint has no memory to splice from"
        if arm.kind == "floor":
            return "floors need log probabilities of a forced answer, which an OpenAI-compatible endpoint does not give"
        return None

    def describe(self) -> dict[str, Any]:
        """The model by its name: an endpoint says no more of it."""
        return {"model": {"name": self._model}, "endpoint": str(self._http.base_url)}

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
        """The store's default search, as a server of ours has it."""
        return [hit.unit for hit in self._index.search(self._owner, question, k=k)] if k else []

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
        started = time.perf_counter()
        try:
            with self._http.stream("POST", "chat/completions", json=body) as response:
                if response.is_error:
                    said = response.read().decode(errors="replace")[:500]
                    raise ServerFailed(f"chat/completions answered {response.status_code}: {said}")
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise ServerFailed(f"chat/completions ended with {chunk['error']}")
                    usage = chunk.get("usage") or usage
                    for choice in chunk.get("choices", []):
                        if content := choice.get("delta", {}).get("content"):
                            first_s = first_s if first_s is not None else time.perf_counter() - started
                            text.append(content)
        except (httpx.HTTPError, ValueError) as error:
            raise ServerFailed(f"chat/completions: {type(error).__name__}: {error}") from error
        elapsed_s = time.perf_counter() - started
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
