"""Facts that were never in a store."""

from collections.abc import Sequence
from typing import Any

from memstore import Fact, FactId, OwnerId


def fact(seq: int, **fields: Any) -> Fact:
    values: dict[str, Any] = {
        "id": FactId(f"fact-{seq}"),
        "owner": OwnerId("ana"),
        "text": f"Thing {seq} happened.",
        "stream": "",
        "speaker": None,
        "time": None,
        "metadata": {},
        "version": 1,
        "seq": seq,
        "created_at": 0.0,
        "updated_at": 0.0,
    }
    return Fact(**(values | fields))


def ids(facts: Sequence[Fact]) -> list[FactId]:
    return [f.id for f in facts]
