"""The client on the real server: right values, real refusals, and connections that are really lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import anyio
import httpx
import pytest
from engines import RunningServer

from sgl_stateful import AsyncClient, Client
from sgl_stateful.client import (
    BadSessionRequest,
    FactNotFound,
    IdempotencyConflict,
    NotFound,
    OutcomeUnknown,
    PinRefused,
    SessionClosed,
    SessionNotFound,
    SessionVersionConflict,
    TurnInProgress,
    Unreachable,
)

pytestmark = pytest.mark.engine

GREEDY = {"max_new_tokens": 10, "temperature": 0}
LOG = "Bed 1 is moist. Bed 2 is moist. Bed 3 is dry. Bed 4 is moist."
QUESTION = " The bed that needs water is"


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    """A client whose owner has nothing yet, and is gone afterwards."""
    owner = f"ana/ü ?#%2F&{uuid4().hex}"
    with Client(server.url, owner=owner) as client:
        yield client
        for session in list(client.sessions.iter()):
            client.sessions.close(session.id)
        client.facts.purge(owner)


def generate(server: RunningServer, **body: Any) -> dict[str, Any]:
    reply = httpx.post(f"{server.url}/generate", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def token_ids(server: RunningServer, text: str) -> list[int]:
    body = {"model": "default", "prompt": text, "add_special_tokens": False}
    ids: list[int] = httpx.post(f"{server.url}/tokenize", json=body, timeout=60).json()["tokens"]
    return ids


def test_facts_from_beginning_to_end(client: Client) -> None:
    office = client.facts.add("My office is in Porto.", speaker="Ana", metadata={"n": 1}, wait=True)
    assert (office.created, office.is_encoded, office.fact.owner) == (True, True, client.owner)
    tea, cat = client.facts.add_many(["I like green tea.", {"text": "My cat is called Pim.", "stream": "pets"}])
    assert [fact.id for fact in client.facts.list()] == [office.fact.id, tea.fact.id, cat.fact.id]
    assert [fact.text for fact in client.facts.list(stream="pets")] == ["My cat is called Pim."]
    changed = client.facts.update(office.fact.id, text="My office is in Faro.", speaker=None)
    assert (changed.fact.speaker, changed.fact.metadata, changed.fact.version) == (None, {"n": 1}, 2)
    moved = client.facts.supersede(office.fact.id, "My office is in Lagos.")
    assert moved.fact.supersedes == office.fact.id
    texts = [fact.text for fact in client.facts.history(moved.fact.id)]
    assert texts[0] == "My office is in Porto."
    assert texts[-1] == "My office is in Lagos."
    assert [hit.fact.id for hit in client.facts.search("Which animal do I have?", k=1)] == [cat.fact.id]
    [hit] = client.facts.search("tea", mode="keyword", where={"stream": ""})
    assert hit.fact.id == tea.fact.id
    assert client.facts.delete(cat.fact.id).text == "My cat is called Pim."
    with pytest.raises(FactNotFound):
        client.facts.get(cat.fact.id)
    assert client.facts.status().policies == ("ladder:0+4", "window:16", "ladder:live+4")


def test_an_idempotency_key_adds_once(client: Client) -> None:
    first = client.facts.add("The spare key is under the pot.", idempotency_key="key ü\n")
    again = client.facts.add("The spare key is under the pot.", idempotency_key="key ü\n")
    assert again.fact.id == first.fact.id
    assert len(list(client.facts.list())) == 1
    with pytest.raises(IdempotencyConflict):
        client.facts.add("Something else.", idempotency_key="key ü\n")


def test_chat_with_memory_streams_what_it_says(client: Client) -> None:
    client.facts.add("The spare key is under the blue pot.", wait=True)
    whole = client.chat("Where is the spare key?", memory={"k": 1}, max_tokens=12, temperature=0)
    assert whole.memory is not None
    assert [fact["id"] for fact in whole.memory["facts"]] == [fact.id for fact in client.facts.list()]
    stream = client.chat("Where is the spare key?", memory={"k": 1}, max_tokens=12, temperature=0, stream=True)
    pieces = list(stream)
    assert len(pieces) > 1
    assert "".join(pieces) == whole.text == stream.result.text
    assert stream.result.memory is not None
    assert stream.result.memory["facts"] == whole.memory["facts"]


def test_a_query_says_what_generate_says_of_the_same_ids(client: Client, server: RunningServer) -> None:
    data, question = token_ids(server, LOG), token_ids(server, QUESTION)
    expected = generate(server, input_ids=data + question, sampling_params=GREEDY)
    with client.sessions.create(input_ids=data) as session:
        assert (session.version, session.info.tokens) == (1, len(data))
        answer = session.query(input_ids=question, sampling_params=GREEDY)
        assert (answer.text, list(answer.output_ids)) == (expected["text"], expected["output_ids"])
        assert (answer.data_version, answer.version) == (1, None)
        assert answer.session["cached_tokens"] == len(data)
        stream = session.stream(text=QUESTION, sampling_params=GREEDY)
        pieces = list(stream)
        assert len(pieces) > 1
        assert "".join(pieces) == expected["text"]
        assert stream.result.data_version == 1


def test_a_turn_becomes_part_of_what_follows(client: Client, server: RunningServer) -> None:
    with client.sessions.create(text=LOG) as session:
        stream = session.stream_turn(text=QUESTION, sampling_params=GREEDY)
        first = "".join(stream)
        assert session.version == stream.result.version == 2
        ids = token_ids(server, LOG) + token_ids(server, QUESTION) + list(stream.result.output_ids)
        expected = generate(server, input_ids=ids + token_ids(server, " Also"), sampling_params=GREEDY)
        assert session.query(text=" Also", sampling_params=GREEDY).text == expected["text"]
        assert session.rewind(1).tokens == len(token_ids(server, LOG))
        assert session.query(text=QUESTION, sampling_params=GREEDY).text == first


def test_leaving_a_turns_stream_leaves_the_session(client: Client) -> None:
    with client.sessions.create(text=LOG) as session:
        endless = {"max_new_tokens": 2000, "temperature": 0, "ignore_eos": True}
        with session.stream_turn(text=QUESTION, sampling_params=endless) as stream:
            next(iter(stream))
        deadline = time.monotonic() + 60  # until the server has noticed, another turn is refused
        while True:
            try:
                assert session.turn(text=QUESTION, sampling_params=GREEDY).data_version == 1
                break
            except TurnInProgress:
                assert time.monotonic() < deadline, "the turn that was left has not ended"


def test_forks_go_their_own_ways(client: Client) -> None:
    with client.sessions.create(text=LOG) as session, session.fork(ttl_s=60) as fork:
        assert fork.info.parent is not None
        assert (fork.info.parent.id, fork.info.parent.version, fork.info.ttl_s) == (session.id, 1, 60)
        grown = fork.append(text=" Bed 5 is dry.", if_version=1)
        assert (grown.version, fork.info.tokens) == (2, session.info.tokens + grown.appended_tokens)
        assert session.reload().tokens == session.info.tokens
        assert session.unpin().pin.state == "unpinned"
        assert session.pin(on_full="demote").pin.state == "pinned"
        assert session.refresh().version == 1


def test_what_is_queued_arrives(client: Client) -> None:
    with client.sessions.create(text=LOG) as session:
        assert session.enqueue(text=" Bed 6 is dry.").queued >= 1
        answer = session.append(text=" Bed 7 is dry.")
        assert answer.version == 3


def test_sessions_are_listed_page_after_page(client: Client) -> None:
    made = {client.sessions.create(text=LOG, pin=False).id for _ in range(3)}
    page = client.sessions.list(limit=2)
    assert len(page.items) == 2
    rest = client.sessions.list(limit=2, after=page.next)
    assert rest.next is None
    assert {session.id for session in (*page.items, *rest.items)} == made
    assert {session.id for session in client.sessions.iter()} == made
    stats = client.sessions.stats(sessions=1000)
    assert made <= {row.id for row in stats.rows}
    assert stats.cells["pool"] == 6000


def test_refusals_are_the_errors_of_their_types(client: Client, server: RunningServer) -> None:
    session = client.sessions.create(text=LOG)
    with pytest.raises(SessionVersionConflict):
        session.append(text="x", if_version=7)
    with pytest.raises(BadSessionRequest):
        session.query(text="x", sampling_params={"max_new_tokens": -3})
    with pytest.raises(BadSessionRequest):
        session.rewind(9)
    with pytest.raises(SessionNotFound), Client(server.url, owner="somebody else") as other:
        other.sessions.get(session.id)
    with pytest.raises(PinRefused) as caught, Client(server.url, owner=client.owner, retries=0) as hasty:
        hasty.sessions.create(text=LOG, reserve_tokens=5999)
    refused = caught.value
    assert refused.budget is not None
    assert refused.needed is not None
    assert refused.needed > refused.budget - (refused.pinned or 0)
    for odd in ("../x", "..", "a?b", " "):
        with pytest.raises(NotFound):
            client.sessions.get(odd)
    assert session.close().id == session.id
    with pytest.raises(SessionClosed):
        session.close()


class Lossy(httpx.HTTPTransport):
    """Loses the connection of the next append: before it was sent, or when it was answered."""

    lose: str | None = None

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """As the real one does."""
        losing, self.lose = (self.lose, None) if request.url.path.endswith("/append") else (None, self.lose)
        if losing == "request":
            raise httpx.WriteError("lost on the way")
        response = super().handle_request(request)
        if losing == "reply":
            response.read()
            raise httpx.ReadError("lost on the way back")
        return response


def test_a_lost_append_is_done_once_or_not_claimed(server: RunningServer) -> None:
    transport = Lossy()
    with (
        Client(server.url, owner=uuid4().hex, transport=transport) as client,
        client.sessions.create(text=LOG) as session,
    ):
        transport.lose = "request"
        assert session.append(text=" Bed 5 is dry.", if_version=1).version == 2
        transport.lose = "reply"
        with pytest.raises(OutcomeUnknown) as caught:
            session.append(text=" Bed 6 is dry.", if_version=2)
        assert caught.value.session.version == session.version == 3
        transport.lose = "reply"
        with pytest.raises(Unreachable):
            session.append(text=" Bed 7 is dry.")
        assert session.reload().version == 4


def test_a_server_that_is_not_there() -> None:
    with Client("http://127.0.0.1:9", retries=1) as client, pytest.raises(Unreachable) as caught:
        client.facts.status()
    assert not caught.value.was_sent


def test_the_other_client_gets_the_same(client: Client, server: RunningServer) -> None:
    with client.sessions.create(text=LOG) as session:
        questions = [QUESTION, " The first bed is", " The last bed is"]
        expected = [session.query(text=question, sampling_params=GREEDY).text for question in questions]

        async def ask() -> None:
            async with AsyncClient(server.url, owner=client.owner) as other:
                same = await other.sessions.get(session.id)
                found: dict[str, str] = {}

                async def one(question: str) -> None:
                    found[question] = (await same.query(text=question, sampling_params=GREEDY)).text

                async with anyio.create_task_group() as tasks:
                    for question in questions:
                        tasks.start_soon(one, question)
                assert [found[question] for question in questions] == expected
                pieces = [piece async for piece in same.stream(text=QUESTION, sampling_params=GREEDY)]
                assert "".join(pieces) == expected[0]
                assert [info.id async for info in other.sessions.iter()] == [session.id]
                async with await same.fork() as fork:
                    assert (await fork.append(text=" Bed 5 is dry.")).version == 2

        anyio.run(ask)
