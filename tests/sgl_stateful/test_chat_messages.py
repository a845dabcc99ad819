import copy
from typing import Any

import pytest

from sgl_stateful.errors import BadMemoryRequest
from sgl_stateful.prompt import SENTINEL, Placement
from sgl_stateful.sglang_adapter.messages import mark_messages

SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Hello yourself"}
LAST = {"role": "user", "content": "Whose kayak?"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("placement", "messages", "marked"),
    [
        ("tail", [SYSTEM, FIRST, ANSWER, LAST], [SYSTEM, FIRST, ANSWER, LAST | {"content": f"{SENTINEL}Whose kayak?"}]),
        ("tail", [FIRST, ANSWER], [FIRST | {"content": f"{SENTINEL}Hello"}, ANSWER]),
        ("system", [SYSTEM, LAST], [SYSTEM | {"content": f"Be brief.\n{SENTINEL}"}, LAST]),
        ("system", [SYSTEM | {"content": "Ends.\n"}, LAST], [SYSTEM | {"content": f"Ends.\n{SENTINEL}"}, LAST]),
        ("system", [SYSTEM | {"content": ""}, LAST], [SYSTEM | {"content": SENTINEL}, LAST]),
        ("system", [FIRST, SYSTEM], [{"role": "system", "content": SENTINEL}, FIRST, SYSTEM]),
    ],
)
def test_where_the_facts_go(placement: Placement, messages: list[dict[str, Any]], marked: list[dict[str, Any]]) -> None:
    given = copy.deepcopy(messages)
    assert mark_messages(messages, placement)[0] == marked
    assert messages == given, "the caller's messages stay as they are"


def test_the_query_is_the_last_user_message() -> None:
    for placement in ("tail", "system"):
        assert mark_messages([FIRST, ANSWER, LAST, ANSWER], placement)[1] == "Whose kayak?"


def test_content_in_parts() -> None:
    user = {"role": "user", "content": [part("Look"), IMAGE, part("here")]}
    marked, query = mark_messages([user], "tail")
    assert marked == [{"role": "user", "content": [part(SENTINEL), part("Look"), IMAGE, part("here")]}]
    assert query == "Look\nhere"
    system = {"role": "system", "content": [part("Be brief.")]}
    assert mark_messages([system, LAST], "system")[0] == [
        {"role": "system", "content": [part("Be brief."), part(SENTINEL)]},
        LAST,
    ]


@pytest.mark.parametrize("content", [None, ""])
def test_an_empty_user_message_can_be_marked(content: str | None) -> None:
    assert mark_messages([{"role": "user", "content": content}], "tail") == (
        [{"role": "user", "content": SENTINEL}],
        "",
    )


@pytest.mark.parametrize("messages", [[], [SYSTEM], [SYSTEM, ANSWER], [{"content": "no role"}]])
@pytest.mark.parametrize("placement", ["tail", "system"])
def test_without_a_user_message(messages: list[dict[str, Any]], placement: Placement) -> None:
    with pytest.raises(BadMemoryRequest, match="needs a user message"):
        mark_messages(messages, placement)


@pytest.mark.parametrize("content", [f"a{SENTINEL}b", [part(f"{SENTINEL}")]])
def test_a_caller_cannot_place_the_marker(content: Any) -> None:
    with pytest.raises(BadMemoryRequest, match="the server's own insertion marker"):
        mark_messages([{"role": "assistant", "content": content}, LAST], "tail")
