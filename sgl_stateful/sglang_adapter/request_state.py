"""What the cache knows and has decided about one request, and what of it goes back to the HTTP process."""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sgl_stateful.directive import DIRECTIVE_KEY, Directive, Splice, parse_directive
from sgl_stateful.sessions.hold import HOLD_KEY, Hold, parse_hold

logger = logging.getLogger(__name__)

_STATE = "_sgl_stateful"  # attribute of SGLang's request


@dataclass(slots=True)
class RequestState:
    """What the cache decided about one request; decided anew until the request is admitted."""

    directive: Directive | None
    hold: Hold | None = None
    exact: bool = True  # the radix key is the real token ids
    reason: str | None = None  # why a splice was not served
    spliced_tokens: int = 0
    splice_ms: float = 0.0
    private_slots: torch.Tensor | None = None  # [e - p] int64, until the row of the request holds them
    computed_tokens: int = 0  # in holes between the facts
    hole_tokens: int = 0  # those that the match promises to compute; 0 where the request is exact
    failed: str | None = None  # loading failed: exact from here on, until the request is released
    snapshot: Mapping[str, Any] | None = None  # what became of the session's, once it was tried
    virtual: array[int] | None = None  # ids of [first span's start, last span's end), made once; holes hold 0
    more: dict[str, Any] = field(default_factory=dict)  # of the report
    session: Mapping[str, Any] | None = None  # report about the hold
    _prompt_ids: npt.NDArray[np.int64] | None = None

    def shareable_tokens(self, tokens: int) -> int:
        """How many of the first ``tokens`` tokens have KV that a request without the splice may use."""
        return min(tokens, self.directive.start) if isinstance(self.directive, Splice) else tokens

    def prompt_ids(self, req: Any) -> npt.NDArray[np.int64]:
        """Prompt tokens whose KV other requests may share; a copy, since SGLang appends to its array."""
        if self._prompt_ids is None:
            ids = req.origin_input_ids
            self._prompt_ids = np.array(ids[: self.shareable_tokens(len(ids))], dtype=np.int64)
        return self._prompt_ids

    def tell(self, req: Any, more: Mapping[str, Any] | None = None) -> None:
        """Attach what was decided to the request's first reply, which is also the last one unless it streams."""
        self.more.update(more or {})
        report = {} if self.directive is None else self._decided()
        if self.session is not None:
            report["session"] = self.session
        _attach(req, DIRECTIVE_KEY, [json.dumps(report)])

    def tell_session(self, req: Any, session: Mapping[str, Any]) -> None:
        """Attach what became of the hold to the request's last reply."""
        self.session = session
        if not (req.stream and req.send_token_offset):
            self.tell(req)
            return
        # The first reply has gone out. Each reply brings the values of its own tokens; the last token's is still due.
        values: list[str | None] = [None] * len(req.output_ids_through_stop)
        values[-1] = json.dumps(session)
        _attach(req, HOLD_KEY, values)

    def _decided(self) -> dict[str, Any]:
        tier = "spliced"
        if self.exact:
            tier = "exact" if self.reason == "exact_prefix_cached" else "text"
        return {
            "tier": tier,
            "reason": self.reason,
            "spliced_tokens": self.spliced_tokens,
            "computed_tokens": self.computed_tokens,
            "splice_ms": self.splice_ms,
            **self.more,
        }


def state_of(req: Any) -> RequestState:
    """The state of a request; made from its ``custom_params`` where it has none yet."""
    state: RequestState | None = req.__dict__.get(_STATE)
    if state is None:
        custom = req.sampling_params.custom_params
        state = RequestState(_parsed(parse_directive, custom, req), _parsed(parse_hold, custom, req))
        if state.hold is not None and req.stream:
            _attach(req, HOLD_KEY, None)  # counted for every token, so that the last one's value finds its place
        setattr(req, _STATE, state)
    return state


def hole_tokens_of(req: Any) -> int:
    """Tokens that admitting a request computes in holes, as far as its last match knows."""
    state: RequestState | None = req.__dict__.get(_STATE)
    return 0 if state is None or state.exact else state.hole_tokens


def begin_ahead(req: Any) -> None:
    """Put the tokens of the answer that are known into a new request, where it may have them and one more."""
    hold = state_of(req).hold
    if hold is None or not hold.ahead or req.output_ids or req.to_finish is not None or req.finished_reason is not None:
        return
    if len(hold.ahead) < req.sampling_params.max_new_tokens:
        req.output_ids.extend(hold.ahead)


def forget_state(req: Any) -> None:
    """Drop the state: a request that was retracted is decided anew."""
    req.__dict__.pop(_STATE, None)


def _parsed(parse: Any, custom_params: Any, req: Any) -> Any:
    try:
        return parse(custom_params)
    except Exception:
        # The HTTP process writes these and refuses those of callers; one that is bad is served as plain text.
        logger.exception("request %s carries what %s cannot read; it is ignored", req.rid, parse.__name__)
        return None


def _attach(req: Any, key: str, values: list[Any] | None) -> None:
    req.customized_info = {**(req.customized_info or {}), key: values}
