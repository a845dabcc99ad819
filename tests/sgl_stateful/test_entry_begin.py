"""A request whose answer's beginning is known, as the scheduler queues it."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sgl_stateful.sessions.hold import HOLD_KEY, Hold, dump_hold
from sgl_stateful.sglang_adapter.request_state import begin_ahead


def request(ahead: tuple[int, ...], **more: Any) -> Any:
    hold = Hold("s", 3, True, 1, ahead=ahead)
    sampling = SimpleNamespace(custom_params={HOLD_KEY: dump_hold(hold)}, max_new_tokens=4)
    values = {"rid": "r", "stream": False, "output_ids": array("q"), "to_finish": None, "finished_reason": None}
    return SimpleNamespace(sampling_params=sampling, customized_info=None, **(values | more))


@pytest.mark.parametrize(
    ("ahead", "more", "begins_with"),
    [
        ((7, 8, 9), {}, [7, 8, 9]),
        ((), {}, []),
        ((7, 8, 9, 10), {}, []),  # one token at least is decoded, so that its end is looked for
        ((7, 8), {"to_finish": FINISH_ABORT("no")}, []),
        ((7, 8), {"finished_reason": FINISH_ABORT("no")}, []),
        ((7, 8), {"output_ids": array("q", [1])}, [1]),
    ],
)
def test_a_request_begins_behind_what_is_known(
    ahead: tuple[int, ...], more: dict[str, Any], begins_with: list[int]
) -> None:
    req = request(ahead, **more)
    begin_ahead(req)
    assert list(req.output_ids) == begins_with


def test_a_request_of_no_session_is_left_alone() -> None:
    req = request((7,))
    req.sampling_params.custom_params = None
    begin_ahead(req)
    assert not req.output_ids
