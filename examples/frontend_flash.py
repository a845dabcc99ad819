"""A program in SGLang's frontend language whose questions are answered before they are asked.

Run it: ``python examples/frontend_flash.py http://localhost:30000``.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import sglang as sgl

from sgl_stateful import Client
from sgl_stateful.client import Session
from sgl_stateful.frontend import StatefulEndpoint, session

LOG = "Ticket 17: the lift in building B stops between floors.\nTicket 18: a window on floor 2 does not close.\n"
OPEN, NEXT = "Tickets that are open:", "The next step for ticket 17 is"


@sgl.function
def prepare(s: Any) -> None:
    """Register what will be asked."""
    questions = session(s).flash
    questions.register("open", text=OPEN, max_tokens=12)
    questions.register("next", text="The next step for ticket {{ticket}} is", data={"ticket": 17}, max_tokens=12)


@sgl.function
def report(s: Any) -> None:
    """Ask by name, and by the words alone."""
    answer = session(s).flash.ask("open")
    print(f"open: {answer.text.strip()!r}, served from {answer.served_from}")
    s += NEXT + sgl.gen("next", max_tokens=12, temperature=0)


def answered(tickets: Session) -> None:
    """Wait until nobody waits: the server answers while nobody asks."""
    while any(question.state != "fresh" for question in tickets.flash.list()):
        time.sleep(0.05)


def main(url: str) -> None:
    """Prepare, append, and report."""
    with Client(url, owner="house") as client, client.sessions.create(text=LOG, ttl_s=600) as tickets:
        backend = StatefulEndpoint(url, owner="house", session=tickets)
        prepare.run(backend=backend).sync()
        tickets.append(text="Ticket 19: water drips into the server room.\n")
        answered(tickets)
        state = report.run(backend=backend)
        told = state.get_meta_info("next")["session"]
        print(f"next: {state['next'].strip()!r}, version {told['data_version']}, served from {told['served_from']}")
        backend.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
