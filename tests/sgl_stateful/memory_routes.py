"""Talking to the routes of a memory."""

from typing import Any

import httpx

FACTS = "/v1/memory/facts"


async def add(client: httpx.AsyncClient, *texts: str, owner: str = "ana", **fields: Any) -> list[dict[str, Any]]:
    body = {"owner": owner, "facts": [{"text": text, **fields} for text in texts]}
    reply = await client.post(FACTS, json=body)
    assert reply.status_code == 200, reply.text
    facts: list[dict[str, Any]] = reply.json()["facts"]
    return facts


def refusal(reply: httpx.Response, status: int) -> str:
    """The message of an error in the shape that the API promises."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["code"] == status
    assert error["type"]
    return str(error["message"])
