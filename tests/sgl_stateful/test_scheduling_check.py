"""What pins and ordering rely on in SGLang is looked for by name before a server serves."""

from __future__ import annotations

import pytest
from sglang.srt.managers import schedule_batch, schedule_policy
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import UnifiedTreeCoreInterface

from sgl_stateful.errors import IncompatibleServer
from sgl_stateful.sglang_adapter.control import StatefulScheduler
from sgl_stateful.sglang_adapter.selfcheck import check_assigned, check_calls, check_scheduling


class Declared:
    """A class of another SGLang."""

    given: int

    def __init__(self) -> None:
        self.made: int = 1
        if self.never == 2:
            self.later = 3

    never = property(lambda self: 0)


def test_this_sglang_has_all_of_it() -> None:
    check_scheduling(StatefulScheduler)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (UnifiedTreeCoreInterface, "match_full_device_prefix"),
        (schedule_batch.ScheduleBatch, "_get_decode_retraction_order"),
        (schedule_policy.PrefillAdder, "_replay_len"),
        (StatefulScheduler.__mro__[1], "_reqs_finishing_inflight"),
    ],
)
def test_a_call_that_is_gone_is_named(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(IncompatibleServer, match=rf"{owner.__name__} is not .*: {name} is missing"):
        check_scheduling(StatefulScheduler)


def test_a_call_with_other_parameters_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatefulScheduler.__mro__[1], "update_running_batch", lambda self, batch, more: batch)
    with pytest.raises(IncompatibleServer, match=r"update_running_batch takes \('self', 'batch', 'more'\)"):
        check_scheduling(StatefulScheduler)


def test_a_function_is_checked_itself() -> None:
    check_calls(check_calls, {"__call__": ("owner", "calls")})
    with pytest.raises(IncompatibleServer, match="check_calls"):
        check_calls(check_calls, {"__call__": ("owner",)})


def test_attributes_are_declared_or_assigned() -> None:
    check_assigned(Declared, ["given", "made", "later"])
    with pytest.raises(IncompatibleServer, match="never, other missing"):
        check_assigned(Declared, ["given", "never", "other"])
