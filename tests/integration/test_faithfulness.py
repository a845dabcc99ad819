"""The gate on the real engine: what is encoded behind the bare header alone is refused, the default is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engines import RunningEngine

from sgl_stateful.encoding import parse_ladder
from sgl_stateful.faithfulness.choice import Target, Verdict, choose, verdict_at
from sgl_stateful.faithfulness.conversations import built_in
from sgl_stateful.faithfulness.measure import measure
from sgl_stateful.faithfulness.table import FLOOR, WITHOUT, Table
from sgl_stateful.idle import IdleTime
from sgl_stateful.repair import parse_repair

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

_K, _QUESTIONS = 20, 6


def measured(engine: RunningEngine, policy: str) -> Table:
    engine.run(engine.service.start())
    subject = replace(engine.service.gate._subject, ladder=parse_ladder(policy), salt=f"faithfulness-test:{policy}")
    return engine.run(
        measure(
            subject,
            built_in(),
            questions_at={_K: _QUESTIONS},
            repairs=[parse_repair("none")],
            idle=IdleTime(engine.port, idle_s=0.01),
        )
    )


def test_the_default_policy_is_not_refused_and_the_bare_header_is(engine: RunningEngine) -> None:
    default, bare = measured(engine, "ladder:live+4"), measured(engine, "window:0")
    # The reference, the floor and the question alone are prefilled as text: what is spliced does not touch them.
    for name in (FLOOR, WITHOUT):
        assert default.row(_K, name).kl == pytest.approx(bare.row(_K, name).kl, abs=1e-3)
    assert choose(default, Target.FLOOR).at(_K).repair == "none"
    assert choose(bare, Target.FLOOR).at(_K).repair is None
    assert verdict_at(bare, _K, "none", Target.FLOOR) is Verdict.BEYOND
