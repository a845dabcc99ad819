"""The servers of a run: ones that are running, ones that the run starts on a store in its folder, or an endpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from locomo.arms.base import System
from locomo.arms.openai import OpenAIEndpoint
from locomo.arms.prompts import PromptIds
from locomo.arms.stateful import StatefulServer
from locomo.errors import RunError
from locomo.runs.config import RunConfig
from locomo.server import ServerProcess
from memstore import MemStoreError, SentenceTransformerEmbedder

# Of a server that asks one question at a time. Left to itself, SGLang takes most of the machine's memory.
_POOL = ["--max-total-tokens", "20000"]
_SIZES = ("--max-total-tokens", "--mem-fraction-static")


@dataclass(frozen=True, slots=True)
class Servers:
    """What a run talks to; ``precise`` only where an arm needs fp32."""

    system: System
    precise: StatefulServer | None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible chat endpoint; ``url`` as in ``https://host/v1``."""

    url: str
    model: str
    api_key: str | None


@contextmanager
def asking(endpoint: Endpoint, config: RunConfig) -> Iterator[Servers]:
    """Connect to an endpoint; what is retrieved for it comes from a store of ours that ends with the run.

    Raises
    ------
    RunError
        The store fails.
    """
    try:
        with (
            tempfile.TemporaryDirectory(prefix="locomo-") as store,
            OpenAIEndpoint(
                endpoint.url,
                endpoint.model,
                api_key=endpoint.api_key,
                store=Path(store) / "memory",
                embedder=SentenceTransformerEmbedder(),
                max_tokens=config.max_tokens,
            ) as system,
        ):
            yield Servers(system, None)
    except MemStoreError as error:
        raise RunError(f"the store beside the endpoint: {error}") from error


@contextmanager
def serving(
    config: RunConfig,
    *,
    model: Path,
    folder: Path,
    url: str | None,
    precise_url: str | None,
    flags: Sequence[str] = (),
) -> Iterator[Servers]:
    """Connect to ``url``, or start a server that encodes the policies of the run's arms.

    Facts and their KV stay in ``folder/memory``: a run that goes on finds the encodings that it began with.

    Raises
    ------
    ServerFailed
        One does not start.
    ConfigError
        The model has no tokenizer.
    """
    PromptIds(model)  # a server takes a minute to say so
    arms = config.parsed_arms()
    policies = list(dict.fromkeys(arm.policy for arm in arms if arm.policy is not None))
    with ExitStack() as stack:
        if url is None:
            own = ["--policy", policies[0]] if policies else []
            own += ["--also-encode", ",".join(policies[1:])] if len(policies) > 1 else []
            own += _POOL if not any(flag.startswith(_SIZES) for flag in flags) else []
            process = ServerProcess(model, folder / "memory", flags=[*own, *flags], log=folder / "server.log")
            url = stack.enter_context(process).url
        system = stack.enter_context(StatefulServer(url, model, max_tokens=config.max_tokens))
        precise = None
        if any(arm.floor == "fp32" for arm in arms):
            if precise_url is None:
                log = folder / "server-fp32.log"
                fp32 = ["--dtype", "float32", "--max-total-tokens", "10000"]
                process = ServerProcess(model, folder / "memory-fp32", flags=fp32, log=log)
                precise_url = stack.enter_context(process).url
            precise = stack.enter_context(StatefulServer(precise_url, model, max_tokens=1))
        yield Servers(system, precise)
