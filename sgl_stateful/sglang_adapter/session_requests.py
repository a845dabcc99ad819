"""Sessions on SGLang's own doors: the session's tokens in front of a prompt, and the answer behind it.

What is asked is rendered first, and put behind the session only when the request begins: until then nothing is held
that a caller who goes away could leave behind.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_stateful.directive import DIRECTIVE_KEY, dump_directive
from sgl_stateful.errors import (
    BadSessionRequest,
    SessionError,
    SessionNotFound,
    SessionVersionConflict,
)
from sgl_stateful.params import MEMORY_KEY, MemoryParams
from sgl_stateful.sessions.hold import HOLD_KEY, dump_hold
from sgl_stateful.sessions.params import SESSION_KEY
from sgl_stateful.sessions.service import SessionService
from sgl_stateful.sessions.use import Answer, Use

from .prepared import REPORTS, reserve_tokens
from .resumed import Resumed
from .session_questions import Asked

ASKED = "_sgl_stateful_asked"  # attribute of a request whose prompt is the question alone
FAILED = "_sgl_stateful_failed"  # attribute of an HTTP request's state: why the session refused

NOT_TOGETHER = (
    "image_data",
    "video_data",
    "audio_data",
    "input_embeds",
    "session_params",
    "lora_path",
    "cache_salt",
    "extra_key",
)
_CLOSING_TOKENS = 16  # more than templates put behind an answer
_TURN_TOKENS = 1024  # of an answer without a limit of its own


def refuse_unsupported(request: GenerateReqInput, *, is_turn: bool, samples: int) -> None:
    """Refuse, by name, what a session cannot be combined with."""
    for field in NOT_TOGETHER:
        if getattr(request, field, None):
            raise BadSessionRequest(f"a session cannot be combined with {field}")
    if request.logprob_start_len is not None and request.logprob_start_len >= 0:
        raise BadSessionRequest("a session cannot be combined with logprob_start_len: its own tokens are not computed")
    if is_turn and samples != 1:
        raise BadSessionRequest("a turn takes one answer: n has to be 1")


async def begin(sessions: SessionService, memory_service: Any, request: GenerateReqInput, asked: Asked) -> Use:
    """Begin a query or turn and make ``request`` its prompt: session, facts, question.

    Raises
    ------
    SessionError, BadMemoryRequest, StoreError
        Nothing is held then.
    """
    params = asked.params
    use = await sessions.answering.begin(params.id, params.owner, params.mode, if_version=params.if_version)
    try:
        if asked.memory is not None and asked.memory.owner != use.session.header.owner:
            raise SessionNotFound("there is no such session of this owner")
        if asked.is_first != (len(use.token_ids) == 0):
            raise SessionVersionConflict("the session got its first content meanwhile: repeat the request")
        sampling = dict(request.sampling_params or {})
        question = [*asked.head, *asked.tail]
        use.is_chat = asked.is_chat
        limit = _limit(sampling, use, question, sessions.table.max_tokens)
        sessions.answering.admit(use, question, limit)
        if params.mode == "turn":
            sampling["max_new_tokens"] = limit
        own: dict[str, Any] = {}
        ids = [*use.token_ids, *question]
        if asked.memory is not None:
            ids, own = await _with_facts(memory_service, request, use, asked, asked.memory, sampling)
        given = {k: v for k, v in (sampling.get("custom_params") or {}).items() if k not in (SESSION_KEY, MEMORY_KEY)}
        assert not given.keys() & {DIRECTIVE_KEY, HOLD_KEY}, "keys that were to be refused"
        sampling["custom_params"] = {**given, **own, HOLD_KEY: dump_hold(use.hold)}
        request.sampling_params, request.text, request.input_ids = sampling, None, ids
        request.cache_salt = use.salt
        if not isinstance(request.rid, str) or not request.rid:
            request.rid = uuid.uuid4().hex
        sessions.answering.check(use)
    except BaseException:
        await sessions.answering.drop(use)
        raise
    return use


def _limit(sampling: dict[str, Any], use: Use, question: list[int], max_tokens: int) -> int | None:
    """How long an answer may be, tokens; None: as long as it gets, which a turn's may not."""
    limit = sampling.get("max_new_tokens")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise BadSessionRequest(f"max_new_tokens has to be a number of tokens, not {limit!r}")
    if use.mode == "turn" and limit is None:
        return max(min(max_tokens - len(use.token_ids) - len(question) - _CLOSING_TOKENS, _TURN_TOKENS), 1)
    if use.mode == "turn" and limit == 0:
        raise BadSessionRequest("a turn needs an answer: max_new_tokens is 0")
    return limit


async def _with_facts(
    memory_service: Any,
    request: GenerateReqInput,
    use: Use,
    asked: Asked,
    memory: MemoryParams,
    sampling: dict[str, Any],
) -> tuple[list[int], dict[str, Any]]:
    """The prompt with facts between session and question, and what the scheduler is told about them."""
    prepared = await asyncio.to_thread(
        memory_service.prepare_ids,
        memory,
        head=[*use.token_ids, *asked.head],
        tail=asked.tail,
        query=asked.query,
        reserve_tokens=reserve_tokens(sampling),
        retrieved=asked.retrieved,
    )
    # What becomes part of the session is question and answer without the facts: their KV stands elsewhere.
    use.hold = replace(use.hold, tokens=len(use.token_ids))
    setattr(request, REPORTS, [prepared.report])
    own = {} if prepared.directive is None else {DIRECTIVE_KEY: dump_directive(prepared.directive)}
    return prepared.token_ids, own


@dataclass(frozen=True, slots=True)
class Answered:
    """What is left of a request that needed no engine; ``shown``: what its responses say of the session."""

    shown: dict[str, Any] | None


class AnswerReader:
    """Follows the replies of one request and ends its use of a session with the last one.

    Parameters
    ----------
    abort
        Ends a request in the engine, by its id.
    resumed
        What it goes on from; None: it is decoded from its beginning.
    """

    def __init__(
        self,
        sessions: SessionService,
        use: Use,
        *,
        rid: str,
        abort: Callable[[str], None],
        samples: int,
        incremental: bool,
        resumed: Resumed | None = None,
    ) -> None:
        self._sessions = sessions
        self._use = use
        self._rids = {rid}
        self._abort = abort
        self._samples = samples
        self._incremental = incremental
        self._resumed = resumed
        self._ids: list[int] = []
        self._text = ""
        self._finished = 0
        self._scheduler: dict[str, Any] | None = None
        self.shown: dict[str, Any] | None = None
        use.cancel = self.cancel

    def cancel(self) -> None:
        """End the request in the engine, all of its answers; harmless when it has ended."""
        for rid in self._rids:
            self._abort(rid)

    def early(self) -> dict[str, Any] | None:
        """A reply before the engine's first; None: there is none."""
        if self._resumed is None or self._resumed.early is None:
            return None
        self._use.saw_token()
        return self._resumed.early

    async def see(self, item: Any, scheduler: dict[str, Any] | None) -> None:
        """Take one reply; the last one is given a ``session``.

        Raises
        ------
        SessionError
            The session has ended, or the turn did not become part of it.
        """
        if self._resumed is not None:
            self._resumed.see(item, incremental=self._incremental)
        self._rids.add(item["meta_info"]["id"])  # several answers have ids of SGLang's own
        self._use.saw_token()
        self._scheduler = scheduler or self._scheduler
        if self._use.mode == "turn":
            ids, text = list(item.get("output_ids") or ()), item.get("text") or ""
            self._ids, self._text = (self._ids + ids, self._text + text) if self._incremental else (ids, text)
        meta = item["meta_info"]
        reason = meta.get("finish_reason")
        if not reason:
            self._sessions.answering.check(self._use)
            return
        self._finished += 1
        if self._finished < self._samples:
            return
        answer = Answer(
            token_ids=self._ids,
            text=self._text,
            stopped_by=reason.get("matched"),
            aborted=reason["type"] == "abort",
            prompt_tokens=meta["prompt_tokens"],
            cached_tokens=meta["cached_tokens"],
            scheduler=self._scheduler,
        )
        self.shown = meta[SESSION_KEY] = await self._sessions.answering.end(self._use, answer)
        if self._resumed is not None and not answer.aborted:
            self.shown |= self._resumed.told(meta)

    async def drop(self) -> None:
        """The request has come to its end; harmless after the last reply."""
        if not self._use.is_ended:
            self.cancel()
        await self._sessions.answering.drop(self._use)


def note_failure(raw_request: Any, error: SessionError) -> None:
    """Leave word of why a session refused, where SGLang's own handlers only pass a message on."""
    if raw_request is not None:
        setattr(raw_request.state, FAILED, error)
