import pytest
from memory_bench.encode import bars_of, policies, row_of
from memory_bench.gate import Divergence
from memory_bench.setting import Setting


def setting(counts: dict) -> Setting:
    status = {"encoder": {"policies": counts}}
    return Setting("http://server", "ana", "ladder:live+4+32", 5.0, status, Divergence(0.1, 0.2, 1.5))


def test_encoding_and_adding_are_told_apart() -> None:
    bare = {"facts": 100, "fact_tokens": 5000, "tokens_prefilled": 5100, "bytes": 700_000, "seconds": 12.0}
    anchored = {"facts": 100, "fact_tokens": 5000, "tokens_prefilled": 5150, "bytes": 800_000, "seconds": 13.0}
    row = row_of(setting({"window:0": bare, "anchor:4": anchored}), 100)
    assert row == {
        "policy": "ladder:live+4+32",
        "facts": 100,
        "facts_per_s": 4.0,  # 100 in 12 + 13 s: both encodings of each
        "added_per_s": 20.0,  # 100 in 5 s
        "encode_s": 25.0,
        "add_s": 5.0,
        "tokens_prefilled_per_fact_token": 2.05,  # 10,250 for 5,000
        "bytes_per_fact": 15_000.0,
        "gate_kl": {"spliced": 0.1, "shuffled": 0.2, "without": 1.5},
    }


def test_the_bar_is_the_default_policys_wherever_it_stands() -> None:
    anchor = {"policy": "anchor:4", "tokens_prefilled_per_fact_token": 1.05}
    default = {"policy": "ladder:live+4+32", "tokens_prefilled_per_fact_token": 2.05}
    assert bars_of([anchor, default]) == {"encode_tokens_per_fact_token": 2.05}
    assert bars_of([anchor]) == {"encode_tokens_per_fact_token": None}


def test_a_policy_that_is_none_is_refused_before_any_server_starts() -> None:
    assert policies("anchor:4, ladder:live+4+32,anchor:4") == ("anchor:4", "ladder:live+4+32")
    with pytest.raises(ValueError, match="unknown encoding policy"):
        policies("anchor:4,nonsense")
