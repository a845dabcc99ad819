"""An agent that knows facts of its user and follows one conversation: memory and a session in the same request.

Run it: ``python examples/agent_memory.py http://localhost:30000``.
"""

from __future__ import annotations

import sys

from sgl_stateful import Client

FACTS = [
    "My new office is in Porto, near the river.",
    "I take the train on Mondays and cycle on other days.",
    "My sister Salma paints the northern lights in Tromso.",
]


def main(url: str) -> None:
    """Remember, talk, and correct what was remembered."""
    with Client(url, owner="ana-agent") as client:
        client.facts.purge("ana-agent")
        added = client.facts.add_many([{"text": text, "speaker": "Ana"} for text in FACTS], wait=True)
        print(f"{len(added)} facts, all encoded: {all(fact.is_encoded for fact in added)}")
        for hit in client.facts.search("Where does Ana work?", k=2):
            print(f"  {hit.score:.2f} {hit.fact.text}")

        with client.sessions.create("You are Ana's assistant. Be brief.", ttl_s=600) as session:
            for question in ["Where is my office?", "And how do I get there on a Tuesday?"]:
                answer = client.chat(
                    question, memory={"k": 2}, session=session, mode="turn", max_tokens=24, temperature=0
                )
                assert answer.memory is not None
                assert answer.session is not None
                tokens = answer.memory["tokens"]
                print(f"{question} {answer.text.strip()!r}")
                print(f"  {answer.memory['tier']}: {tokens['spliced']} tokens spliced, {tokens['prefilled']} computed")
                print(f"  session version {answer.session['version']}")

        moved = client.facts.supersede(added[0].fact.id, "My new office is in Faro, near the airport.")
        for version in client.facts.history(moved.fact.id):
            print(f"  {version.state}: {version.text}")
        stream = client.chat("Where is my office?", memory={"k": 1}, stream=True, max_tokens=16, temperature=0)
        for piece in stream:
            print(piece, end="|", flush=True)
        print()


if __name__ == "__main__":
    main(sys.argv[1])
