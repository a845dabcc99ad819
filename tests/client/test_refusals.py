"""Error replies as errors: by their type, else by their status."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from wire import Wire

from sgl_stateful import errors as server_errors
from sgl_stateful.client import errors

OURS = [
    (404, "SessionNotFound", errors.SessionNotFound),
    (404, "SessionClosed", errors.SessionClosed),
    (404, "SessionExpired", errors.SessionExpired),
    (409, "SessionVersionConflict", errors.SessionVersionConflict),
    (409, "TurnInProgress", errors.TurnInProgress),
    (409, "SessionOfAnotherModel", errors.SessionOfAnotherModel),
    (413, "SessionTooLong", errors.SessionTooLong),
    (422, "BadSessionRequest", errors.BadSessionRequest),
    (429, "PinRefused", errors.PinRefused),
    (429, "AppendQueueFull", errors.AppendQueueFull),
    (503, "SessionNotSaved", errors.SessionNotSaved),
    (404, "FlashNotFound", errors.FlashNotFound),
    (409, "FlashExists", errors.FlashExists),
    (409, "FlashNotReady", errors.FlashNotReady),
    (422, "BadFlashRequest", errors.BadFlashRequest),
    (422, "EmptyFlashQuestion", errors.EmptyFlashQuestion),
    (422, "FlashSlotMissing", errors.FlashSlotMissing),
    (422, "FlashChoicesAlike", errors.FlashChoicesAlike),
    (422, "FlashNeedsMemory", errors.FlashNeedsMemory),
    (429, "FlashLimitReached", errors.FlashLimitReached),
    (429, "FlashReadersFull", errors.FlashReadersFull),
    (400, "BadMemoryRequest", errors.BadMemoryRequest),
    (404, "FactNotFound", errors.FactNotFound),
    (409, "VersionConflict", errors.VersionConflict),
    (409, "DuplicateFact", errors.DuplicateFact),
    (409, "FactSuperseded", errors.FactSuperseded),
    (409, "IdempotencyConflict", errors.IdempotencyConflict),
    (507, "BlobStoreFull", errors.StoreFull),
]
OTHERS = [
    (400, "RequestValidationError", errors.BadRequest),
    (401, "", errors.Unauthorized),
    (403, "x", errors.Unauthorized),
    (404, "HTTPException", errors.NotFound),
    (410, "FeedGap", errors.Gone),
    (418, "", errors.Refused),
    (500, "KeyError", errors.ServerFailed),
    (503, "StoreReadOnly", errors.Unavailable),
]


def refused(status: int, content: bytes | None = None, **body: Any) -> errors.Refused:
    wire = Wire(lambda request: httpx.Response(status, content=content, json=None if content is not None else body))
    with wire.client(owner="ana", retries=0) as client, pytest.raises(errors.Refused) as caught:
        client.facts.get("f1")
    return caught.value


@pytest.mark.parametrize(("status", "kind", "expected"), [*OURS, *OTHERS])
def test_each_type_has_its_error(status: int, kind: str, expected: type[errors.Refused]) -> None:
    error = refused(status, error={"message": "because", "type": kind, "code": status})
    assert type(error) is expected
    assert (error.status, error.refusal.type) == (status, kind)
    assert str(error) == f"because (HTTP {status})"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"object": "error", "message": "too hot", "type": "BadRequest", "code": 400}, "too hot"),
        ({"error": {"message": "too hot"}}, "too hot"),
        ({"error": "Unauthorized"}, "Unauthorized"),
        ({"detail": "Not Found"}, "Not Found"),
    ],
)
def test_sglangs_own_errors_keep_their_message(body: dict[str, Any], message: str) -> None:
    error = refused(400, **body)
    assert type(error) is errors.BadRequest
    assert str(error) == f"{message} (HTTP 400)"


@pytest.mark.parametrize("content", [b"", b"<h1>Bad gateway</h1>", b"\xff\xfe", b"[1]", b"null"])
def test_a_proxys_page_is_an_error_too(content: bytes) -> None:
    assert type(refused(502, content)) is errors.ServerFailed


def test_every_session_error_of_the_server_is_known() -> None:
    def names(kind: type) -> set[str]:
        return {kind.__name__}.union(*(names(child) for child in kind.__subclasses__()))

    known = names(errors.Refused)
    never_raised = {"SessionError", "FlashError"}
    assert names(server_errors.SessionError) - never_raised <= known


def test_the_doctree_names_every_error() -> None:
    def names(kind: type) -> set[str]:
        return {kind.__name__}.union(*(names(child) for child in kind.__subclasses__()))

    tree = (errors.__doc__ or "").split()
    assert [name for name in names(errors.ClientError) if name not in tree] == []
