"""A session on a running server, with the token ids that a test knows it to have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx

GREEDY = {"temperature": 0}


def new_owner() -> str:
    """An owner nobody else has."""
    return f"owner-{uuid4().hex}"


def fresh(http: httpx.Client, token_ids: Sequence[int], *, max_new_tokens: int = 6, **more: Any) -> dict[str, Any]:
    """The answer to a prompt of which nothing is cached: nobody has had its cache salt before."""
    sampling = {"max_new_tokens": max_new_tokens, "ignore_eos": True, **GREEDY}
    body = {"input_ids": list(token_ids), "sampling_params": sampling, "cache_salt": uuid4().hex, **more}
    reply = http.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    assert answer["meta_info"]["cached_tokens"] == 0
    return answer


@dataclass
class KnownSession:
    """A session whose content is given as token ids, so that a test can say what it has to answer."""

    http: httpx.Client
    owner: str
    id: str
    token_ids: list[int] = field(default_factory=list)

    @classmethod
    def open(cls, http: httpx.Client, owner: str, token_ids: Sequence[int], **more: Any) -> KnownSession:
        reply = http.post("/v1/sessions", json={"owner": owner, "input_ids": list(token_ids), **more})
        assert reply.status_code == 201, reply.text
        return cls(http, owner, reply.json()["id"], list(token_ids))

    def post(self, what: str, **body: Any) -> httpx.Response:
        return self.http.post(f"/v1/sessions/{self.id}/{what}", json={"owner": self.owner, **body})

    def append(self, token_ids: Sequence[int], **more: Any) -> dict[str, Any]:
        reply = self.post("append", input_ids=list(token_ids), **more)
        assert reply.status_code == 200, reply.text
        self.token_ids += token_ids
        done: dict[str, Any] = reply.json()
        return done

    def ask(self, what: str, token_ids: Sequence[int], *, max_new_tokens: int = 6, **more: Any) -> dict[str, Any]:
        sampling = {"max_new_tokens": max_new_tokens, "ignore_eos": True, **GREEDY}
        reply = self.post(what, input_ids=list(token_ids), sampling_params=sampling, **more)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        if what == "turn":
            self.token_ids += [*token_ids, *answer["output_ids"]]
        return answer

    def show(self) -> dict[str, Any]:
        reply = self.http.get(f"/v1/sessions/{self.id}", params={"owner": self.owner})
        assert reply.status_code == 200, reply.text
        shown: dict[str, Any] = reply.json()
        return shown

    def close(self) -> httpx.Response:
        return self.http.delete(f"/v1/sessions/{self.id}", params={"owner": self.owner})
