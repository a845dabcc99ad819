import asyncio

import httpx
import pytest
from memory_bench.client import Client, Timed
from memory_bench.gate import RedGate
from scripted_server import HEAD, OTHER, TAIL, Ids, Server, answered, stream

from locomo.errors import ServerFailed


def ask(server: Server, *, mode: str = "splice", answer: int = 2, other_beginning: bool = False) -> Timed:
    async def asked() -> Timed:
        async with server.client() as client:
            return await client.ask("Where?", mode=mode, k=3, answer=answer, other_beginning=other_beginning)

    return asyncio.run(asked())


def test_a_question_is_sent_as_ids_with_the_place_of_its_facts() -> None:
    server = Server()
    timed = ask(server)
    assert server.bodies == [
        {
            "input_ids": [*HEAD, *TAIL],
            "stream": True,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": 2,
                "ignore_eos": True,
                "custom_params": {
                    "memory": {
                        "owner": "ana",
                        "k": 3,
                        "mode": "splice",
                        "query": "Where?",
                        "insert_at": 2,
                        "policy": "ladder:live+4+32",
                    }
                },
            },
        }
    ]
    assert 0 < timed.ttft_ms <= timed.total_ms
    assert timed.forward_ms == 250.0  # the scheduler's 10.0 to 10.25 s


def test_another_beginning_stands_before_the_facts() -> None:
    server = Server()
    ask(server, mode="text", other_beginning=True)
    [body] = server.bodies
    assert body["input_ids"] == [*HEAD, *OTHER, *TAIL]
    assert body["sampling_params"]["custom_params"]["memory"]["insert_at"] == 4
    assert "policy" not in body["sampling_params"]["custom_params"]["memory"]


def test_a_flush_leaves_both_beginnings_in_the_cache() -> None:
    server = Server()

    async def flush() -> None:
        async with server.client() as client:
            await client.flush()

    asyncio.run(flush())
    assert server.asked == ["flush", ("text", 1, "Hello?", False), ("text", 1, "Hello?", True)]


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (httpx.Response(503, text="starting"), "503: starting"),
        (stream({"error": {"message": "out of memory"}}), "out of memory"),
        (stream('{"output_ids": [5, '), "broke off"),
        (stream("[DONE]"), "without 2 tokens"),
        (stream({"output_ids": [5], "meta_info": {}}), "without 2 tokens"),
    ],
)
def test_what_is_no_answer_is_the_servers_failure(reply: httpx.Response, said: str) -> None:
    with pytest.raises(ServerFailed, match=said):
        ask(Server(lambda body, number: reply))


def test_a_server_that_is_gone_is_named_in_both_requests() -> None:
    async def asked(what: str) -> None:
        async with Client("http://127.0.0.1:1", Ids(), owner="ana", policy="anchor:4") as client:
            await (client.flush() if what == "flush" else client.ask("Where?", mode="off", k=0, answer=1))

    for what, path in (("flush", "/flush_cache"), ("ask", "/generate")):
        with pytest.raises(ServerFailed, match=f"{path}: ConnectError"):
            asyncio.run(asked(what))


def test_a_splice_that_was_served_as_text_is_no_time() -> None:
    server = Server(lambda body, number: answered(body, tier="text", reason="not_encoded:3"))
    with pytest.raises(RedGate, match=r"'Where\?'.* served as 'text': not_encoded:3"):
        ask(server)
    ask(Server(), mode="text")  # which is what that mode asks for
