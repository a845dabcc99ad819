"""Questions are registered once; their answers are there before they are asked, and followed as they come.

Run it: ``python examples/flash_questions.py http://localhost:30000``.
"""

from __future__ import annotations

import sys

from sgl_stateful import Client

READINGS = ["08:00 bed 1: 21 C, soil moist", "08:00 bed 2: 24 C, soil moist", "08:00 bed 3: 31 C, soil dry"]
SAMPLING = {"max_new_tokens": 16, "temperature": 0}


def main(url: str) -> None:
    """Register, append, and ask for what is known already."""
    with (
        Client(url, owner="greenhouse") as client,
        client.sessions.create("You watch a greenhouse. Answer in a few words.", ttl_s=600) as session,
    ):
        session.flash.register("warmest", "Which bed is the {{most}}?", data={"most": "warmest"}, max_tokens=16)
        session.flash.register("dry", "Is any bed dry?", choices=["Yes", "No"], gate={"target": 0.95}, max_tokens=16)
        for reading in READINGS:
            session.append(reading)
        newest: dict[str, int] = {}
        # From the beginning: whatever has happened before is sent first.
        for event in session.flash.follow(last_event_id="0"):
            if event.kind == "answer":
                print(f"[version {event.data['data_version']}] {event.data['name']}: {event.data['text'].strip()!r}")
                newest[event.data["name"]] = event.data["data_version"]
            if list(newest.values()) == [session.version] * 2:
                break
        answer = session.query("Which bed is the warmest?", sampling_params=SAMPLING)
        print(f"asked: {answer.text.strip()!r}, served from {answer.served_from}")
        fresh = session.query("Which bed is the warmest?", sampling_params=SAMPLING, fresh=True)
        print(f"decoded for real: {fresh.text == answer.text}, served from {fresh.served_from}")
        for question in session.flash.list():
            print(f"{question.name}: {question.evaluations} evaluations, {question.hits} hits, {question.state}")


if __name__ == "__main__":
    main(sys.argv[1])
