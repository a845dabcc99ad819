"""What ``sgl-stateful session`` asks a server: docs/sessions.md over HTTP, read with distrust."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote

import httpx

Document: TypeAlias = dict[str, Any]

MOST_ROWS = 1000  # that the stats show
_PAGE = 100
# A pin may have to prefill the session first.
_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
# Sooner than the server, which closes an idle connection after 5 s and loses a request that is on its way.
_LIMITS = httpx.Limits(keepalive_expiry=2.0)


class Refused(Exception):
    """The server said no, or not what a server of ours says."""


class Unreachable(Exception):
    """There is no answer."""


class BadAddress(ValueError):
    """The URL or the key cannot be sent anything with; the message repeats neither, since both may be secret."""


class Listing(NamedTuple):
    """Some sessions, and whether the server has more."""

    sessions: Sequence[Document]
    has_more: bool


class SessionServer:
    """One server's session routes.

    Every method raises ``Refused`` or ``Unreachable``.

    Parameters
    ----------
    url
        As of a browser: ``http://HOST:PORT``.
    api_key
        Sent as a bearer token; None: nothing.

    Raises
    ------
    BadAddress
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        try:
            base = httpx.URL(url)
        except (httpx.InvalidURL, UnicodeError):
            raise BadAddress("the URL is not valid: write http://HOST:PORT") from None
        if base.scheme not in ("http", "https") or not base.host:
            raise BadAddress("the URL is not valid: write http://HOST:PORT")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise BadAddress("the API key has a character that no header can carry")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._where = f"{base.scheme}://{base.netloc.decode()}"  # without user and password
        self._http = httpx.Client(base_url=base, headers=headers, timeout=_TIMEOUT, limits=_LIMITS)

    def close(self) -> None:
        """End the connection."""
        self._http.close()

    def stats(self, *, sessions: int) -> Document:
        """Counts of the server, and up to ``sessions`` sessions as ``rows``."""
        return self._ask("GET", "/v1/sessions/stats", params={"sessions": sessions})

    def sessions(self, owner: str | None, *, limit: int) -> Listing:
        """Up to ``limit`` sessions: of one owner, or of all."""
        if owner is None:
            stats = self.stats(sessions=min(limit, MOST_ROWS))
            rows = sessions_of(stats, "rows")
            return Listing(rows, number(stats, "sessions", "open") > len(rows))
        found: list[Document] = []
        after: Any = None
        while True:
            params = {"owner": owner, "limit": min(limit - len(found), _PAGE)} | (
                {} if after is None else {"after": after}
            )
            page = self._ask("GET", "/v1/sessions", params=params)
            found += sessions_of(page, "sessions")
            after = page.get("next")
            if after is None or len(found) >= limit:
                return Listing(found[:limit], after is not None)

    def show(self, session_id: str, owner: str) -> Document:
        """One session."""
        return self._ask("GET", _path(session_id), params={"owner": owner})

    def pin(self, session_id: str, owner: str, *, on_full: str | None) -> Document:
        """Ask for its KV to be kept; the session as it is then."""
        body = {"owner": owner} | ({} if on_full is None else {"on_full": on_full})
        return self._ask("POST", f"{_path(session_id)}/pin", json=body)

    def unpin(self, session_id: str, owner: str) -> Document:
        """Let its KV go when room is needed; the session as it is then."""
        return self._ask("POST", f"{_path(session_id)}/unpin", json={"owner": owner})

    def delete(self, session_id: str, owner: str) -> Document:
        """Close it: ``{"closed": session}``."""
        return self._ask("DELETE", _path(session_id), params={"owner": owner})

    def owner_of(self, session_id: str) -> str:
        """Whose session it is, by the stats."""
        stats = self.stats(sessions=MOST_ROWS)
        rows = sessions_of(stats, "rows")
        for row in rows:
            if row.get("id") == session_id:
                return str(part(row, "owner"))
        unseen = number(stats, "sessions", "open") - len(rows)
        hint = f"; {unseen} more are not in the stats: pass --owner" if unseen > 0 else ""
        raise Refused(f"there is no session {session_id} among {len(rows)}{hint}")

    def _ask(self, method: str, path: str, **content: Any) -> Document:
        try:
            reply = self._http.request(method, path, **content)
        except httpx.RequestError as error:
            raise Unreachable(f"{self._where} cannot be reached: {error or type(error).__name__}") from error
        if not reply.is_success:
            raise Refused(_complaint(reply, f"{method} {path}"))
        try:
            document = reply.json()
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise Refused(f"{method} {path}: {self._where} does not answer as a server of sessions does")
        return document


def part(document: Document, *names: str) -> Any:
    """Return ``document[names[0]][names[1]]...``; raises ``Refused`` where an answer lacks it."""
    value: Any = document
    for depth, name in enumerate(names, start=1):
        if not isinstance(value, dict) or name not in value:
            raise Refused(f"the server's answer has no {'.'.join(names[:depth])}")
        value = value[name]
    return value


def number(document: Document, *names: str) -> int:
    """Return the whole number there; raises ``Refused`` where an answer lacks it."""
    value = part(document, *names)
    if not isinstance(value, int):
        raise Refused(f"{'.'.join(names)} in the server's answer is not a number")
    return value


def documents_of(document: Document, name: str, *, what: str = "objects") -> list[Document]:
    """Return the list of objects under that name; raises ``Refused`` where there is none."""
    value = part(document, name)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Refused(f"{name} in the server's answer is not a list of {what}")
    return value


def sessions_of(document: Document, name: str) -> list[Document]:
    """Return the sessions under that name; raises ``Refused`` where there are none."""
    return documents_of(document, name, what="sessions")


def _path(session_id: str) -> str:
    return f"/v1/sessions/{quote(session_id, safe='')}"


def _complaint(reply: httpx.Response, asked: str) -> str:
    try:
        body = reply.json()
    except ValueError:
        body = None
    retry_s = reply.headers.get("Retry-After")
    later = f"; try again in {retry_s} s" if retry_s else ""
    match body:
        case {"error": {"message": str(message), "type": str(kind)}}:
            return f"{message} ({kind}){later}"
        case {"error": str(message)} | {"detail": str(message)} | {"message": str(message)}:
            text = message
        case _:
            text = reply.reason_phrase
    hint = ""
    if reply.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        # Of the stats the server wants another key than of one owner's sessions, if it has both.
        hint = ": pass the admin key, or --owner" if asked.endswith("/stats") else ": pass --api-key"
    return f"{asked}: {reply.status_code} {text}{hint}{later}"
