"""A backend for SGLang's frontend language whose requests carry an owner, memory and a session."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from sglang.lang.global_config import global_config
from sglang.lang.interpreter import ProgramState, StreamExecutor
from sglang.lang.ir import SglSamplingParams

from sgl_stateful.client import Answer, Appended, Client, ClientError, InvalidCall, Session, SessionVersionConflict
from sgl_stateful.client.answers import AnswerDecoder
from sgl_stateful.client.call import Call, StreamCall, given
from sgl_stateful.client.chat import custom_params
from sgl_stateful.client.content import Messages
from sgl_stateful.client.reading import each, part

from . import frontend_select
from .frontend_flash import ProgramFlash as ProgramFlash
from .frontend_progress import arrive

MEMORY_HERE = "{{memory}}"
"""Where facts go in a program's text; without it they come first, behind the session."""

_BOUND = "sgl_stateful.session"  # variable of a program, and of its forks: the session that it is bound to
_FORWARDED = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
_SELECT_TRIES = 4  # of a decision whose session or facts change under it
_PREFILL: Mapping[str, Any] = {"sampling_params": {"max_new_tokens": 0}}


class StatefulEndpoint(RuntimeEndpoint):
    """A server of ours, for ``sglang.set_default_backend`` or ``program.run(backend=...)``.

    Programs run on it as on SGLang's ``RuntimeEndpoint``. Every ``gen`` and ``select`` is a query: the session in
    front of it stays as it is, so that forks and batches read it at once; ``session(s)`` is what changes it. Requests
    are sent once more where that is safe, as the client does. Joining forks appends their text.

    Parameters
    ----------
    owner
        Whose memory and session. Without either, prompts are still not cached together with those of others.
    memory
        Facts for every request, as ``custom_params.memory``; what is searched for is, unless ``query`` says so, the
        last user message of the program, or its text where it has no roles. ``MEMORY_HERE`` in the text says where
        they go. Nothing is prefilled ahead then: which facts it would need is not known.
    session
        A session's id or the client's handle of one; ``session(s, other)`` binds one program to another.
    timeout
        Seconds without a byte from the server after which a request is given up; None: never, as in SGLang.

    Attributes
    ----------
    client
        The client that it uses, with the same owner.
    """

    def __init__(
        self,
        url: str,
        *,
        owner: str,
        memory: Mapping[str, Any] | None = None,
        session: str | Session | None = None,
        api_key: str | None = None,
        chat_template_name: str | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__(url.rstrip("/"), api_key=api_key, chat_template_name=chat_template_name)
        self.support_concate_and_append = False  # the server has no such route any more; forks are joined as text
        self.client = Client(self.base_url, owner=owner, api_key=api_key, timeout=timeout)
        self.owner = owner
        self.memory = None if memory is None else dict(memory)
        self.session = self.client.sessions.get(session) if isinstance(session, str) else session

    def shutdown(self) -> None:
        """Close the connections."""
        self.client.close()

    def generate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> tuple[Any, Any]:
        """Text and its ``meta_info``; lists of them where ``n`` is more than one."""
        reply = self._generate_http_request(s, self._asked(s, sampling_params))
        if isinstance(reply, list):
            return [one["text"] for one in reply], [one["meta_info"] for one in reply]
        return reply["text"], reply["meta_info"]

    def generate_stream(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> Iterator[tuple[str, Any]]:
        """Pieces of text with the ``meta_info`` at that point.

        Raises
        ------
        InvalidCall
            ``n`` is more than one: pieces of several answers cannot be one text.
        """
        if sampling_params.n != 1:
            raise InvalidCall(f"a program that streams takes one answer, not n={sampling_params.n}")
        body = self._body(s, {**self._asked(s, sampling_params), "stream": True})
        with self.client.stream(StreamCall(Call("POST", "/generate", Answer.of, body=body), AnswerDecoder)) as stream:
            for piece in stream:
                yield piece, stream.last_event["meta_info"]
            yield "", stream.result.meta_info

    def select(
        self, s: StreamExecutor, choices: list[str], temperature: float, choices_method: ChoicesSamplingMethod
    ) -> ChoicesDecision:
        """The choice that ``choices_method`` prefers.

        Behind a session, whose tokens are not computed again, and with facts, whose number is not known beforehand,
        the log probabilities are read from queries of one token each; else from one request for all choices. The
        queries are about one version of the session and about the same facts: where one of these changes meanwhile,
        all of them are asked once more.

        Raises
        ------
        InvalidCall
            There is no text before the choices, or a choice adds nothing to it.
        ClientError
            A request was refused; or session or facts have changed at every try.
        """
        for _ in range(_SELECT_TRIES):
            try:
                return self._select(s, choices, choices_method)
            except SessionVersionConflict as error:
                changed: Exception = error
            except frontend_select.PromptChanged as error:
                changed = ClientError(str(error))
        raise changed

    def _select(self, s: StreamExecutor, choices: list[str], method: ChoicesSamplingMethod) -> ChoicesDecision:
        before, marker, after = s.text_.partition(MEMORY_HERE) if self.memory is not None else ("", "", "")
        if not marker:  # facts come first
            before, after = "", s.text_
        session = self._session_of(s)
        # Not what the handle knows: the session may have got its first content, or lost it, elsewhere.
        info = None if session is None else session.reload()
        # The first tokens of a prompt may be special ones, as the server makes them.
        head = self._tokenize(before, special=info is None or info.tokens == 0)
        ask = partial(self._next_tokens, s, None if info is None else info.version, head)
        return frontend_select.select(
            choices,
            method,
            text=after,
            tokenize=lambda text: self._tokenize(text, special=False),
            score=partial(self._prompt_logprobs, head)
            if session is None and self.memory is None
            else frontend_select.by_next_tokens(ask),
            alone=lambda sequences: self._input_logprobs(sequences, 0),
        )

    def cache_prefix(self, prefix_str: str) -> None:
        """Prefill what the programs of a batch have in common."""
        if self.memory is None:
            self._post(self._marked({"text": prefix_str, **_PREFILL}, None, self.session, query=""))

    def commit_lazy_operations(self, s: StreamExecutor) -> None:
        """Prefill a program's text before it is forked."""
        if self.memory is None:
            self._generate_http_request(s, {"text": s.text_, **_PREFILL})

    def fill_image(self, s: StreamExecutor) -> None:
        """The same, with its image."""
        self.commit_lazy_operations(s)

    def _generate_http_request(self, s: StreamExecutor, data: dict[str, Any]) -> Any:
        return self._post(self._body(s, data))

    def _asked(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> dict[str, Any]:
        self._handle_dtype_to_regex(sampling_params)
        sampling = {
            "skip_special_tokens": global_config.skip_special_tokens_in_output,
            "spaces_between_special_tokens": global_config.spaces_between_special_tokens_in_out,
            **sampling_params.to_srt_kwargs(),
        }
        more = {name: getattr(sampling_params, name, None) for name in _FORWARDED}
        return {"text": s.text_, "sampling_params": sampling, **{k: v for k, v in more.items() if v is not None}}

    def _body(self, s: StreamExecutor, data: dict[str, Any]) -> dict[str, Any]:
        self._add_images(s, data)
        return self._marked(data, self.memory, self._session_of(s), query=_question(s))

    def _marked(
        self,
        data: dict[str, Any],
        memory: Mapping[str, Any] | None,
        session: Session | None,
        *,
        query: str,
        if_version: int | None = None,
    ) -> dict[str, Any]:
        searched = None if memory is None else {"query": query, **memory}
        custom = custom_params(owner=self.owner, memory=searched, session=session, if_version=if_version)
        if not custom:
            return {**data, "cache_salt": self._salt}
        return {**data, "sampling_params": {**data["sampling_params"], "custom_params": custom}}

    def _post(self, body: dict[str, Any]) -> Any:
        return self.client.send(Call("POST", "/generate", lambda reply: reply, body=body, is_repeatable=True))

    def _tokenize(self, text: str, *, special: bool) -> tuple[int, ...]:
        body = {"model": "default", "prompt": text, "add_special_tokens": special}
        return self.client.send(Call("POST", "/tokenize", _read_tokens, body=body, is_repeatable=True))

    def _next_tokens(
        self,
        s: StreamExecutor,
        version: int | None,
        head: tuple[int, ...],
        prompt: tuple[int, ...],
        wanted: Sequence[int],
        facts: tuple[str, ...] | None,
    ) -> frontend_select.NextTokens:
        memory = None if self.memory is None else {**self.memory, "insert_at": len(head), **given(facts=facts)}
        data = {
            "input_ids": [*head, *prompt],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "token_ids_logprob": list(wanted),
        }
        body = self._marked(data, memory, self._session_of(s), query=_question(s), if_version=version)
        meta = self._post(body)["meta_info"]
        [step] = meta["output_token_ids_logprobs"]
        served = (meta.get("memory") or {}).get("facts") or ()
        return frontend_select.NextTokens(
            {token: logprob for logprob, token, _ in step}, tuple(fact["id"] for fact in served)
        )

    def _prompt_logprobs(
        self, head: tuple[int, ...], whole: Sequence[tuple[int, ...]], start: int
    ) -> list[list[float]]:
        before = len(head) + start - 1  # the first one read has no log probability
        rows = self._input_logprobs([(*head, *ids) for ids in whole], before)
        return [[token[0] for token in row[1:]] for row in rows]

    def _input_logprobs(self, sequences: Sequence[tuple[int, ...]], start: int) -> list[list[Any]]:
        data = {"input_ids": [list(ids) for ids in sequences], "return_logprob": True, "logprob_start_len": start}
        replies = self._post({**data, **_PREFILL, "cache_salt": self._salt})
        return [reply["meta_info"]["input_token_logprobs"] for reply in replies]

    @property
    def _salt(self) -> str:
        return f"owner:{self.owner}"

    def _session_of(self, s: StreamExecutor) -> Session | None:
        bound = s.variables.get(_BOUND)
        # Joined forks leave a list where each had bound another.
        return bound if isinstance(bound, Session) else self.session


class ProgramSession:
    """The session in front of a program: see ``session``.

    Each call waits first for what the program has asked before it, so that the order of its lines holds. Where that
    has failed, its error is raised, and the session stays as it is.
    """

    def __init__(self, state: ProgramState, handle: Session) -> None:
        self._state = state
        self.handle = handle

    def append(self, messages: Messages | None = None, **options: Any) -> Appended:
        """Add data at the session's end, as the client's ``Session.append``; later questions of the program see it."""
        self._arrive()
        return self.handle.append(messages, **options)

    def query(self, messages: Messages | None = None, *, name: str | None = None, **options: Any) -> Answer:
        """Ask as the client's ``Session.query``; with ``name``, ``s[name]`` is the answer's text."""
        self._arrive()
        return self._named(name, self.handle.query(messages, **options))

    def turn(self, messages: Messages | None = None, *, name: str | None = None, **options: Any) -> Answer:
        """Ask, and make question and answer a part of the session, as the client's ``Session.turn``."""
        self._arrive()
        return self._named(name, self.handle.turn(messages, **options))

    @property
    def flash(self) -> ProgramFlash:
        """Questions that are registered on the session: answered after each of its changes, before they are asked."""
        return ProgramFlash(self.handle, self._arrive, self._named)

    def _arrive(self) -> None:
        arrive(self._state.stream_executor)

    def _named(self, name: str | None, answer: Answer) -> Answer:
        if name is not None:
            self._state.set_var(name, answer.text)
            self._state.stream_executor.meta_info[name] = answer.meta_info
        return answer


def session(s: ProgramState, bind: str | Session | None = None) -> ProgramSession:
    """The server-side session in front of a program, to append to it, ask it and take turns in it.

    ``gen`` and ``select`` write the program's own text, which never becomes a part of the session; what shall stay
    goes through here::

        @sgl.function
        def watch(s, reading):
            session(s).append(reading)                      # every later question sees it
            s += sgl.user("Which bed needs water?")
            s += sgl.assistant(sgl.gen("bed", max_tokens=8))
            session(s).turn("Say when it is done.", name="reply", sampling_params={"max_new_tokens": 8})

    Parameters
    ----------
    s
        A program on a ``StatefulEndpoint``.
    bind
        From here on the program, and what is forked from it, is about this session instead of the endpoint's: so that
        ``run_batch`` can run one program over many.

    Raises
    ------
    InvalidCall
        There is no session, or the program runs on another backend.
    """
    executor = s.stream_executor
    endpoint = executor.backend
    if not isinstance(endpoint, StatefulEndpoint):
        raise InvalidCall(f"the program runs on a {type(endpoint).__name__}, which has no sessions")
    if bind is not None:
        arrive(executor)
        executor.variables[_BOUND] = endpoint.client.sessions.get(bind) if isinstance(bind, str) else bind
    handle = endpoint._session_of(executor)
    if handle is None:
        raise InvalidCall("which session? name one to the endpoint, or here with bind")
    return ProgramSession(s, handle)


def _question(s: StreamExecutor) -> str:
    """What facts are searched for: the last user message, or the whole text."""
    asked = [message["content"] for message in s.messages_ if message["role"] == "user"]
    text = asked[-1] if asked and isinstance(asked[-1], str) else s.text_
    return str(text).replace(MEMORY_HERE, "").strip()


def _read_tokens(reply: Any) -> tuple[int, ...]:
    return each(part(reply, "tokens"), int)
