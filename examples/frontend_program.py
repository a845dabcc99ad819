"""A program in SGLang's frontend language over a session: generate, choose and fork behind what the server keeps.

Run it: ``python examples/frontend_program.py http://localhost:30000``.
"""

from __future__ import annotations

import sys
from typing import Any

import sglang as sgl

from sgl_stateful import Client
from sgl_stateful.frontend import StatefulEndpoint, session

LOG = "Ticket 17: the lift in building B stops between floors.\nTicket 18: a window on floor 2 does not close.\n"
GREEDY = {"max_new_tokens": 8, "temperature": 0}


@sgl.function
def triage(s: Any, ticket: str) -> None:
    """Choose, explain in two ways at once, and count in a form that is given."""
    s += f"Ticket {ticket} is "
    s += sgl.select("urgency", choices=["urgent", "not urgent"])
    forks = s.fork(2)
    forks += lambda i: ["\nThe reason is", "\nThe next step is"][i] + sgl.gen("text", max_tokens=12, temperature=0)
    forks.join()
    s += "\nHours until it is done: " + sgl.gen("hours", regex=r"[1-9][0-9]?", temperature=0)


@sgl.function
def news(s: Any) -> None:
    """Change the session in the middle of a program."""
    s += "The tickets so far:" + sgl.gen("before", max_tokens=8, temperature=0)
    added = session(s).append(text="Ticket 19: water drips into the server room.\n")
    print(f"version {added.version}: {added.appended_tokens} tokens appended")
    session(s).query(text="The newest ticket is about", name="newest", sampling_params=GREEDY)


def main(url: str) -> None:
    """Run both."""
    with Client(url, owner="house") as client, client.sessions.create(text=LOG, ttl_s=600) as tickets:
        backend = StatefulEndpoint(url, owner="house", session=tickets)
        for state in triage.run_batch([{"ticket": "17"}, {"ticket": "18"}], backend=backend):
            print(f"{state['urgency']}, {state['hours']} hours; {[text.strip() for text in state['text']]}")
        state = news.run(backend=backend)
        print(f"newest: {state['newest']!r}")
        backend.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
