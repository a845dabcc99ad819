from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from words import ByteTokenizer

from memstore import NewFact
from sgl_stateful.directive import DIRECTIVE_KEY, Splice, parse_directive
from sgl_stateful.errors import BadMemoryRequest, ForgedDirective, MemoryDisabled
from sgl_stateful.service import MemoryService
from sgl_stateful.sglang_adapter.requests import REPORTS, SERVICE, prepare_request, reserve_tokens

pytestmark = pytest.mark.anyio

Make = Callable[..., MemoryService]
NOTES = b"Notes:\nred kayak\n"


@pytest.fixture
async def manager(make_service: Make) -> Any:
    """What the hooks use of a tokenizer manager, with a memory that holds one encoded fact of ana."""
    service = make_service()
    await service.start()
    added = await service.facts.add("ana", [NewFact(text="red kayak")])
    await service.wait_for_kv("ana", [addition.fact.id for addition in added])
    yield SimpleNamespace(tokenizer=ByteTokenizer(), **{SERVICE: service})
    for task in service._tasks.values():
        task.cancel()


def request(*, custom: Any = None, sampling: Any = None, memory: dict[str, Any] | None = None, **fields: Any) -> Any:
    """A request of /generate with `custom_params`."""
    params = {
        "custom_params": {**({"memory": {"owner": "ana", **memory}} if memory is not None else {}), **(custom or {})}
    }
    return GenerateReqInput(sampling_params=params if sampling is None else sampling, **fields)


async def test_facts_stand_where_the_marker_is(manager: Any) -> None:
    sent = request(text="Before {{memory}}after {{memory}}", memory={"query": "kayak"})
    await prepare_request(manager, sent)
    assert sent.text is None
    assert sent.input_ids == [ByteTokenizer.BOS, *b"Before ", *NOTES, *b"after {{memory}}"]
    directive = parse_directive(sent.sampling_params["custom_params"])
    assert isinstance(directive, Splice)
    assert bytes(sent.input_ids[directive.start : directive.end]) == b"red kayak\n"
    assert "memory" not in sent.sampling_params["custom_params"]


async def test_without_a_marker_facts_come_first_behind_what_begins_a_text(manager: Any) -> None:
    sent = request(text="red kayak?", memory={})
    await prepare_request(manager, sent)
    assert sent.input_ids == [ByteTokenizer.BOS, *NOTES, *b"red kayak?"]


async def test_token_ids_take_facts_at_a_position(manager: Any) -> None:
    sent = request(input_ids=[1, 2, 3], memory={"query": "kayak", "insert_at": 2})
    await prepare_request(manager, sent)
    assert sent.input_ids == [1, 2, *NOTES, 3]


@pytest.mark.parametrize(
    ("fields", "memory", "message"),
    [
        ({"input_ids": [1, 2]}, {}, "query is needed with input_ids"),
        ({"input_ids": [1, 2]}, {"query": "q", "insert_at": 3}, "insert_at is 3 of 2 tokens"),
        ({}, {}, "needs a prompt as text or input_ids"),
        ({"text": "q", "image_data": "x"}, {}, "cannot be combined with image_data"),
        ({"text": "q", "lora_path": "x"}, {}, "cannot be combined with lora_path"),
        ({"text": "q", "session_params": {"id": "x"}}, {}, "cannot be combined with session_params"),
        ({"text": ""}, {}, "query is empty"),
        ({"text": "q"}, {"policy": "list:1"}, "'list:1' is not served here"),
        ({"text": "q"}, {"k": -1}, "k: "),
    ],
)
async def test_what_cannot_be_prepared_is_named(
    manager: Any, fields: dict[str, Any], memory: dict[str, Any], message: str
) -> None:
    if "text" not in fields and "input_ids" not in fields:
        fields = {**fields, "input_embeds": None}
    with pytest.raises(BadMemoryRequest, match=message):
        await prepare_request(manager, request(memory=memory, **fields))


async def test_token_ids_without_facts_need_no_query(manager: Any) -> None:
    for memory in ({"k": 0}, {"mode": "off"}):
        sent = request(input_ids=[1, 2], memory=memory)
        await prepare_request(manager, sent)
        assert sent.input_ids == [1, 2]
        assert sent.sampling_params["custom_params"] is None


async def test_requests_without_memory_are_left_alone(manager: Any) -> None:
    sent = request(text="q", custom={"other": 1})
    await prepare_request(manager, sent)
    assert (sent.text, sent.cache_salt, hasattr(sent, REPORTS)) == ("q", None, False)
    assert sent.sampling_params == {"custom_params": {"other": 1}}


async def test_a_callers_own_parameters_and_salt_are_kept(manager: Any) -> None:
    sent = request(text="red kayak?", memory={}, custom={"other": 1}, cache_salt="mine")
    await prepare_request(manager, sent)
    assert sent.sampling_params["custom_params"]["other"] == 1
    salt = getattr(manager, SERVICE).salt("ana")
    assert sent.cache_salt == f"{salt}/mine"


async def test_a_prompt_that_may_recur_knows_under_which_salt_it_is_cached(manager: Any) -> None:
    several = request(text=["red kayak?", "kayak"], memory={"query": "kayak"}, cache_salt=["mine", "yours"])
    apart = request(text="red kayak?", memory={}, extra_key="tenant")  # SGLang keeps it apart by that as well
    without = request(text="red kayak?", memory={"mode": "text"})
    for sent in (several, apart, without):
        await prepare_request(manager, sent)
    salt = getattr(manager, SERVICE).salt("ana")
    blocks = [report.block for sent in (several, apart, without) for report in getattr(sent, REPORTS)]
    assert [block and block.salt for block in blocks] == [f"{salt}/mine", f"{salt}/yours", None, None]
    assert [bytes(block.token_ids[1:].tolist()) if block else b"" for block in blocks] == [NOTES, NOTES, NOTES, b""]


async def test_a_directive_of_a_callers_is_refused_with_or_without_memory(manager: Any) -> None:
    for memory in (None, {}):
        with pytest.raises(ForgedDirective):
            await prepare_request(manager, request(text="q", memory=memory, custom={DIRECTIVE_KEY: "{}"}))


async def test_a_server_without_memory_says_so() -> None:
    with pytest.raises(MemoryDisabled, match="--memory DIR"):
        await prepare_request(SimpleNamespace(), request(text="q", memory={}))


async def test_a_batch_is_prepared_prompt_by_prompt(manager: Any) -> None:
    one = {"custom_params": {"memory": {"owner": "ana"}}}
    other = {"custom_params": {"memory": {"owner": "bob"}}, "max_new_tokens": 3}
    sent = request(text=["red kayak?", "hello"], sampling=[one, other])
    await prepare_request(manager, sent)
    assert sent.input_ids == [[ByteTokenizer.BOS, *NOTES, *b"red kayak?"], [ByteTokenizer.BOS, *b"hello"]]
    service = getattr(manager, SERVICE)
    assert sent.cache_salt == [service.salt("ana"), service.salt("bob")]
    assert [DIRECTIVE_KEY in (params["custom_params"] or {}) for params in sent.sampling_params] == [True, False]
    assert sent.sampling_params[1]["max_new_tokens"] == 3
    assert [report.owner for report in getattr(sent, REPORTS)] == ["ana", "bob"]


async def test_a_batch_that_does_not_fit_its_parameters_is_refused(manager: Any) -> None:
    one = {"custom_params": {"memory": {"owner": "ana"}}}
    with pytest.raises(BadMemoryRequest, match="1 sampling_params for 2 prompts"):
        await prepare_request(manager, request(text=["a", "b"], sampling=[one]))
    with pytest.raises(BadMemoryRequest, match="for all of its prompts or for none"):
        await prepare_request(manager, request(text=["a", "b"], sampling=[one, {}]))


async def test_tokens_reserved_for_the_answer() -> None:
    assert [
        reserve_tokens(s) for s in ({}, {"max_new_tokens": 0}, {"max_new_tokens": 9}, {"max_new_tokens": 10**6})
    ] == [
        256,
        0,
        9,
        1024,
    ]
