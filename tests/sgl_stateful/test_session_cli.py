"""``sgl-stateful session`` against an HTTP server that answers as docs/sessions.md says and keeps what it was asked."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from redis_server import free_port
from typer.testing import CliRunner

from sgl_stateful import cli

STATS: dict[str, Any] = {
    "cells": {
        "pool": 6000,
        "budget": 3000,
        "quota": 2000,
        "pinned": 1451,
        "admitted": 1963,
        "reserved": 512,
        "evictable": 2210,
        "free": 1827,
        "by_owner_class": {"farm-": 1912, "other": 51},
    },
    "sessions": {"open": 3, "pinned": 2, "lost": 1, "unpinned": 0},
    "totals": {
        "admissions": 8,
        "refusals": {"budget": 1, "quota": 0, "queue": 4},
        "demotions": 6,
        "expiries": {"idle": 3, "age": 0},
        "lost": {"flushed": 1},
        "dropped": 12,
        "tokens": {"cached": 90210, "prefilled": 4096},
        "operations": {
            "append": {"count": 1200, "p50_ms": 18.44, "p99_ms": 61.0},
            "query": {"count": 310, "p50_ms": 22.1, "p99_ms": 70.9},
            "turn": {"count": 0, "p50_ms": None, "p99_ms": None},
            "rebuild": {"count": 1, "p50_ms": 140.3, "p99_ms": 140.3},
        },
    },
    "queue": {"waiting": 5, "dropped": 12},
}


# Of a pin that does not fit, as the server shows it.
NUMBERS = {"needed": 51, "pinned": 2950, "budget": 3000, "owner_pinned": 51, "quota": 2000}


def session(id: str, owner: str, cells: int, *, state: str = "pinned", reason: str | None = None) -> dict[str, Any]:
    return {
        "id": id,
        "owner": owner,
        "state": "open",
        "version": 2,
        "tokens": 77,
        "pin": {"state": state, "cells": cells, "reason": reason},
        "ttl_s": 3600,
        "max_age_s": None,
        "created_at": 1790000000.0,
        "used_at": 1790000012.5,
        "expires_at": 1790003612.5,
        "priority": 0,
        "reserve_tokens": 0,
        "on_full": "refuse",
        "window": {"tokens": 4096, "dropped_messages": 3, "dropped_tokens": 212},
        "queue": {"waiting": 0, "dropped": 0},
        "parent": None,
    }


class Asked(NamedTuple):
    method: str
    path: str
    query: dict[str, str]
    body: Any
    authorization: str | None


class Reply(NamedTuple):
    status: int
    body: Any
    headers: dict[str, str] = {}  # noqa: RUF012


def error(status: int, kind: str, message: str, **headers: str) -> Reply:
    return Reply(status, {"error": {"message": message, "type": kind, "code": status}}, headers)


class FarmServer:
    """Sessions in memory, and the routes that the command line needs."""

    def __init__(self) -> None:
        self.sessions = {
            item["id"]: item
            for item in (
                session("aa01", "ana", 51),
                session("bb02", "farm-1", 1400),
                session("cc03", "farm-2", 0, state="lost"),
            )
        }
        self.asked: list[Asked] = []
        self.key: str | None = None
        self.instead: Reply | None = None
        self.is_full = False
        farm = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                url = urlsplit(self.path)
                query = {name: values[-1] for name, values in parse_qs(url.query).items()}
                body = json.loads(self.rfile.read(length)) if length else None
                reply = farm.answer(Asked(self.command, url.path, query, body, self.headers.get("Authorization")))
                content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
                self.send_response(reply.status)
                for name, value in {"Content-Length": str(len(content)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_DELETE = do  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def answer(self, asked: Asked) -> Reply:
        self.asked.append(asked)
        if self.instead is not None:
            return self.instead
        if self.key is not None and asked.authorization != f"Bearer {self.key}":
            return Reply(401, {"error": "Unauthorized"})
        owner = asked.query.get("owner") or (asked.body or {}).get("owner")
        match [asked.method, *asked.path.split("/")[3:]]:
            case ["GET", "stats"] if int(asked.query.get("sessions", 0)) > 1000:
                return error(422, "BadSessionRequest", "sessions: Input should be less than or equal to 1000")
            case ["GET", "stats"]:
                rows = list(self.sessions.values())[: int(asked.query.get("sessions", 0))]
                return Reply(200, STATS | {"sessions": STATS["sessions"] | {"open": len(self.sessions)}, "rows": rows})
            case ["GET"]:
                after, limit = asked.query.get("after", ""), int(asked.query["limit"])
                owned = sorted(id for id, item in self.sessions.items() if item["owner"] == owner and id > after)
                page = [self.sessions[id] for id in owned[:limit]]
                return Reply(200, {"sessions": page, "next": page[-1]["id"] if len(owned) > limit else None})
            case [method, id, *action]:
                found = self.sessions.get(unquote(id))
                if found is None or found["owner"] != owner:
                    return error(404, "SessionNotFound", f"there is no session {id}")
                return self.of_one(method, found, action, asked.body)
        return Reply(404, {"detail": "Not Found"})

    def of_one(self, method: str, found: dict[str, Any], action: list[str], body: Any) -> Reply:
        match [method, *action]:
            case ["GET"]:
                return Reply(200, found)
            case ["DELETE"]:
                return Reply(200, {"closed": self.sessions.pop(found["id"]) | {"state": "closed"}})
            case ["POST", "pin"] if self.is_full and body.get("on_full") != "demote":
                return error(429, "PinRefused", "51 more cells do not fit", **{"Retry-After": "2"})
            case ["POST", "pin"] if self.is_full:
                found["pin"] = {"state": "unpinned", "cells": 0, "reason": NUMBERS}
                return Reply(200, found)
            case ["POST", "pin"]:
                found["pin"] = {"state": "pinned", "cells": 77, "reason": None}
                return Reply(200, found)
            case ["POST", "unpin"]:
                found["pin"] = {"state": "unpinned", "cells": 0, "reason": None}
                return Reply(200, found)
        return Reply(404, {"detail": "Not Found"})


class Run(NamedTuple):
    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.stderr
        assert self.stderr == ""
        [line] = self.stdout.splitlines()
        return json.loads(line)

    @property
    def rows(self) -> list[dict[str, str]]:
        assert self.code == 0, self.stderr
        names, *rows = (line.split("\t") for line in self.stdout.splitlines() if "\t" in line)
        return [dict(zip(names, row, strict=True)) for row in rows]

    @property
    def complaint(self) -> str:
        assert self.stdout == ""
        [line] = self.stderr.splitlines()
        assert line.startswith("sgl-stateful: ")
        return line.removeprefix("sgl-stateful: ")


@pytest.fixture
def farm() -> Iterator[FarmServer]:
    server = FarmServer()
    yield server
    server.close()


@pytest.fixture
def sessions(farm: FarmServer) -> Callable[..., Run]:
    """Run a command on the server."""

    def run(*arguments: str, url: str = farm.url, key: str | None = None) -> Run:
        env = {"SGL_STATEFUL_URL": url, "SGL_STATEFUL_API_KEY": key}
        result = CliRunner().invoke(cli.app, ["session", *arguments], env=env)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return Run(result.exit_code, result.stdout, result.stderr)

    return run


def test_list_shows_the_sessions_of_all_owners(farm: FarmServer, sessions: Callable[..., Run]) -> None:
    run = sessions("list")
    assert run.stderr == ""
    assert [(row["id"], row["owner"], row["pin.state"], row["pin.cells"]) for row in run.rows] == [
        ("aa01", "ana", "pinned", "51"),
        ("bb02", "farm-1", "pinned", "1400"),
        ("cc03", "farm-2", "lost", "0"),
    ]
    assert run.rows[0]["expires_at"] == "2026-09-21T15:13:32Z"  # `date -u -d @1790003612`
    assert run.rows[0]["used_at"] == "2026-09-21T14:13:32Z"
    assert sessions("list", "--json").json == list(farm.sessions.values())
    assert [asked[:3] for asked in farm.asked] == [("GET", "/v1/sessions/stats", {"sessions": "100"})] * 2


def test_list_says_where_there_are_more(farm: FarmServer, sessions: Callable[..., Run]) -> None:
    run = sessions("list", "--limit", "2")
    assert [row["id"] for row in run.rows] == ["aa01", "bb02"]
    assert run.stderr == "sgl-stateful: there are more: raise --limit\n"
    assert [item["id"] for item in sessions("list", "--limit", "2", "--json").json] == ["aa01", "bb02"]


def test_list_of_an_owner_goes_from_page_to_page(farm: FarmServer, sessions: Callable[..., Run]) -> None:
    farm.sessions |= {f"d{number:03}": session(f"d{number:03}", "dov", 1) for number in range(230)}
    run = sessions("list", "--owner", "dov", "--limit", "220", "--json")
    assert [item["id"] for item in run.json] == [f"d{number:03}" for number in range(220)]
    assert [(asked.path, asked.query) for asked in farm.asked] == [
        ("/v1/sessions", {"owner": "dov", "limit": "100"}),
        ("/v1/sessions", {"owner": "dov", "limit": "100", "after": "d099"}),
        ("/v1/sessions", {"owner": "dov", "limit": "20", "after": "d199"}),
    ]
    assert "there are more" in sessions("list", "--owner", "dov", "--limit", "220").stderr
    assert sessions("list", "--owner", "dov", "--limit", "230").stderr == ""
    assert len(sessions("list", "--owner", "dov", "--limit", "500").rows) == 230
    assert sessions("list", "--owner", "nobody", "--json").json == []


def test_show_looks_the_owner_up_unless_it_is_given(farm: FarmServer, sessions: Callable[..., Run]) -> None:
    assert sessions("show", "bb02", "--json").json == farm.sessions["bb02"]
    assert [(asked.path, asked.query) for asked in farm.asked] == [
        ("/v1/sessions/stats", {"sessions": "1000"}),
        ("/v1/sessions/bb02", {"owner": "farm-1"}),
    ]
    farm.asked.clear()
    run = sessions("show", "bb02", "--owner", "farm-1")
    assert [(asked.path, asked.query) for asked in farm.asked] == [("/v1/sessions/bb02", {"owner": "farm-1"})]
    shown = {row["name"]: row["value"] for row in run.rows}
    assert shown["pin.cells"] == "1400"
    assert shown["window.dropped_tokens"] == "212"
    assert shown["created_at"] == "2026-09-21T14:13:20Z"
    assert shown["parent"] == ""


def test_more_sessions_than_the_stats_show(farm: FarmServer, sessions: Callable[..., Run]) -> None:
    farm.sessions |= {f"d{number:04}": session(f"d{number:04}", f"dov-{number}", 1) for number in range(1200)}
    assert sessions("show", "d0996", "--json").json["owner"] == "dov-996"  # the last of the first thousand
    run = sessions("show", "d0997")
    assert run.code == 1
    assert run.complaint == "there is no session d0997 among 1000; 203 more are not in the stats: pass --owner"
    assert sessions("show", "d0997", "--owner", "dov-997", "--json").json["id"] == "d0997"
    listed = sessions("list", "--limit", "5000")
    assert (len(listed.rows), listed.stderr) == (1000, "sgl-stateful: there are more: pass --owner\n")


def test_pin_and_unpin(farm: FarmServer, sessions: Callable[..., Run]) -> None:
    assert sessions("unpin", "aa01").stdout == "aa01 is unpinned, 0 cells\n"
    assert sessions("pin", "aa01", "--owner", "ana").stdout == "aa01 is pinned, 77 cells\n"
    assert sessions("unpin", "aa01", "--json").json == farm.sessions["aa01"]
    posts = [(asked.path, asked.body) for asked in farm.asked if asked.method == "POST"]
    assert posts == [
        ("/v1/sessions/aa01/unpin", {"owner": "ana"}),
        ("/v1/sessions/aa01/pin", {"owner": "ana"}),
        ("/v1/sessions/aa01/unpin", {"owner": "ana"}),
    ]


def test_a_pin_that_does_not_fit(farm: FarmServer, sessions: Callable[..., Run]) -> None:
    farm.is_full = True
    run = sessions("pin", "cc03")
    assert (run.code, run.complaint) == (1, "51 more cells do not fit (PinRefused); try again in 2 s")
    run = sessions("pin", "cc03", "--on-full", "demote")
    shown = "does not fit: needed 51  pinned 2950  budget 3000  owner_pinned 51  quota 2000"
    assert (run.code, run.stdout) == (0, f"cc03 is unpinned, 0 cells: {shown}\n")
    assert farm.asked[-1].body == {"owner": "farm-2", "on_full": "demote"}
    farm.sessions["bb02"]["pin"] |= {"state": "lost", "reason": "reclaimed"}
    for run in (sessions("list"), sessions("top", "--once")):
        assert {row["id"]: row["pin.reason"] for row in run.rows} == {"aa01": "", "bb02": "reclaimed", "cc03": shown}
    assert {row["name"]: row["value"] for row in sessions("show", "cc03").rows}["pin.reason"] == shown
    assert sessions("show", "cc03", "--json").json["pin"]["reason"] == NUMBERS


def test_close(farm: FarmServer, sessions: Callable[..., Run]) -> None:
    assert sessions("close", "aa01").stdout == "closed aa01 of ana\n"
    assert farm.asked[-1][:3] == ("DELETE", "/v1/sessions/aa01", {"owner": "ana"})
    assert sessions("close", "bb02", "--owner", "farm-1", "--json").json["closed"]["state"] == "closed"
    assert list(farm.sessions) == ["cc03"]
    again = sessions("close", "bb02", "--owner", "farm-1")
    assert (again.code, again.complaint) == (1, "there is no session bb02 (SessionNotFound)")
    again = sessions("close", "bb02")
    assert (again.code, again.complaint) == (1, "there is no session bb02 among 1")


def test_an_id_cannot_name_another_route(farm: FarmServer, sessions: Callable[..., Run]) -> None:
    odd = "../stats?x=1#y"
    farm.sessions[odd] = session(odd, "ana", 3)
    assert sessions("show", odd, "--owner", "ana", "--json").json["id"] == odd
    assert farm.asked[-1].path == "/v1/sessions/..%2Fstats%3Fx%3D1%23y"
    farm.asked.clear()
    for id in ("", ".", ".."):
        assert sessions("close", id, "--owner", "ana").code == 2
    assert farm.asked == []


def test_the_key_comes_from_the_option_or_the_environment(farm: FarmServer, sessions: Callable[..., Run]) -> None:
    farm.key = "open-sesame"
    assert len(sessions("list", "--json", key="open-sesame").json) == 3
    assert len(sessions("list", "--json", "--api-key", "open-sesame", key="wrong").json) == 3
    for run, hint in ((sessions("list"), "admin key"), (sessions("list", "--owner", "ana", key="shut"), "--api-key")):
        assert run.code == 1
        assert "401 Unauthorized" in run.complaint
        assert hint in run.complaint
        assert "shut" not in run.stderr
    run = sessions("list", key="open\nsesame")
    assert (run.code, "sesame" in run.complaint) == (2, False)


def test_a_server_that_is_not_there(sessions: Callable[..., Run]) -> None:
    port = free_port()
    for arguments in (["list"], ["show", "aa01"], ["close", "aa01", "--owner", "ana"], ["top", "--once"], ["top"]):
        run = sessions(*arguments, url=f"http://ana:open-sesame@127.0.0.1:{port}/")
        assert run.code == 3
        assert run.complaint.startswith(f"http://127.0.0.1:{port} cannot be reached: ")
        assert "open-sesame" not in run.stderr


@pytest.mark.parametrize("url", ["localhost:30000", "ftp://127.0.0.1", "http://", "http://ana:open-sesame@h:port", "x"])
def test_a_url_that_is_none(sessions: Callable[..., Run], url: str) -> None:
    run = sessions("list", url=url)
    assert (run.code, run.complaint) == (2, "the URL is not valid: write http://HOST:PORT")


@pytest.mark.parametrize(
    "arguments",
    [
        ["list", "--limit", "0"],
        ["list", "--limit", "many"],
        ["list", "--nonsense"],
        ["show"],
        ["pin", "aa01", "--on-full", "explode"],
        ["top", "--interval", "0"],
        ["explode"],
    ],
)
def test_bad_usage_is_one_line_and_asks_nothing(
    farm: FarmServer, sessions: Callable[..., Run], arguments: list[str]
) -> None:
    run = sessions(*arguments)
    assert run.code == 2
    assert run.complaint.endswith(": see --help")
    assert farm.asked == []


@pytest.mark.parametrize("arguments", [["list"], ["list", "--owner", "ana"], ["show", "aa01"], ["top", "--once"]])
@pytest.mark.parametrize(
    "instead",
    [
        Reply(200, b"<html>hello</html>"),
        Reply(200, []),
        Reply(200, {}),
        Reply(200, {"rows": 3, "sessions": ["aa01"]}),
        Reply(200, {"rows": [], "sessions": {"open": "many"}}),
        Reply(404, {"detail": "Not Found"}),
        Reply(307, b"", {"Location": "/elsewhere"}),
        Reply(500, b"<html>oh\nno</html>"),
        Reply(503, {"error": {"message": "the store\nis busy", "type": "StoreUnreachable", "code": 503}}),
    ],
    ids=lambda reply: f"{reply.status}-{reply.body!r:.20}",
)
def test_what_no_server_of_ours_says_is_one_line(
    farm: FarmServer, sessions: Callable[..., Run], arguments: list[str], instead: Reply
) -> None:
    farm.instead = instead
    run = sessions(*arguments)
    assert run.code == 1
    assert len(run.complaint) > 0


def test_control_characters_of_an_owner_reach_no_terminal(farm: FarmServer, sessions: Callable[..., Run]) -> None:
    farm.sessions = {"aa01": session("aa01", "a\x1b[2Jna\tb\n", 1)}
    for run in (sessions("list"), sessions("top", "--once"), sessions("show", "aa01"), sessions("close", "aa01")):
        assert "a\\x1b[2Jna\\tb\\n" in run.stdout
        assert "\x1b" not in run.stdout


def test_top_shows_counts_and_the_largest_first(farm: FarmServer, sessions: Callable[..., Run]) -> None:
    run = sessions("top", "--once")
    assert run.stderr == ""
    assert [row["id"] for row in run.rows] == ["bb02", "aa01", "cc03"]
    shown = " ".join(run.stdout.split())
    for part in (
        "pool 6000 pinned 1451 evictable 2210 free 1827 budget 3000 quota 2000 admitted 1963 reserved 512",
        "farm- 1912 other 51",
        "open 3 pinned 2 lost 1 unpinned 0",
        "waiting 5 dropped 12",
        "admissions 8 demotions 6",
        "refusals budget 1 quota 0 queue 4",
        "expiries idle 3 age 0",
        "tokens cached 90210 prefilled 4096",
        "append 18.4/61.0 ms of 1200",
        "query 22.1/70.9 ms of 310",
        "turn none",
    ):
        assert part in shown


def test_top_for_scripts(farm: FarmServer, sessions: Callable[..., Run]) -> None:
    document = sessions("top", "--once", "--json").json
    assert {name: document[name] for name in STATS} == STATS
    assert [row["id"] for row in document["rows"]] == ["bb02", "aa01", "cc03"]
    assert [row["id"] for row in sessions("top", "--once", "--json", "--limit", "1").json["rows"]] == ["bb02"]
    assert [row["id"] for row in sessions("top", "--once", "--owner", "ana").rows] == ["aa01"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sgl_stateful.cli", "session", *arguments]


def interrupt(process: "subprocess.Popen[Any]") -> None:
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


def test_top_into_a_pipe_prints_a_look_a_line_until_it_is_interrupted(farm: FarmServer) -> None:
    arguments = command("top", "--json", "--interval", "0.05", "--url", farm.url)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert len(json.loads(process.stdout.readline())["rows"]) == 3
        del farm.sessions["aa01"]
        while len(json.loads(process.stdout.readline())["rows"]) != 2:
            pass  # looks that were under way
        interrupt(process)
        assert process.stderr.read() == ""


class Terminal:
    """A command on a terminal of 160 columns, and what it has written there."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
        self.process = subprocess.Popen(
            command(*arguments), stdin=slave, stdout=slave, stderr=subprocess.PIPE, env=env, start_new_session=True
        )
        os.close(slave)
        self.written = ""

    def read_until(self, wanted: str, *, behind: int = 0) -> None:
        deadline = time.monotonic() + 60
        while wanted not in self.written[behind:]:
            assert time.monotonic() < deadline, self.written
            self.read()

    def read(self) -> bool:
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other end is closed
            return False
        self.written += data.decode()
        return bool(data)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_top_on_a_terminal_follows_what_happens_until_ctrl_c(
    farm: FarmServer, terminal: Callable[..., Terminal]
) -> None:
    shown = terminal("top", "--interval", "0.05", "--url", farm.url)
    shown.read_until("bb02")
    assert "pool 6000" in shown.written
    farm.sessions["dd04"] = session("dd04", "dov", 9000)
    shown.read_until("dd04")
    shown.read_until("bb02", behind=shown.written.index("dd04"))  # which has fewer cells
    interrupt(shown.process)
    while shown.read():
        pass
    assert "\x1b[?1049l" in shown.written, "the terminal shows again what it had"
    assert shown.process.stderr is not None
    assert shown.process.stderr.read() == b""


def test_top_on_a_terminal_ends_with_the_server(farm: FarmServer, terminal: Callable[..., Terminal]) -> None:
    shown = terminal("top", "--interval", "0.05", "--url", farm.url)
    shown.read_until("bb02")
    farm.instead = error(503, "StoreUnreachable", "the store is away")
    while shown.read():
        pass
    assert shown.process.wait(60) == 1
    assert shown.process.stderr is not None
    assert shown.process.stderr.read() == b"sgl-stateful: the store is away (StoreUnreachable)\n"


def test_list_on_a_terminal_is_a_table(farm: FarmServer, terminal: Callable[..., Terminal]) -> None:
    shown = terminal("list", "--url", farm.url)
    while shown.read():
        pass
    assert shown.process.wait(60) == 0
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in shown.written.splitlines()]
    assert ["bb02", "farm-1", "pinned", "1400"] in [line[:4] for line in lines]
