"""Sessions and memory from the `openai` package: they travel in `extra_body`.

Run it: ``python examples/openai_client.py http://localhost:30000``.
"""

from __future__ import annotations

import sys
from typing import Any

from openai import OpenAI

from sgl_stateful import Client

OWNER = "ana-openai"


def main(url: str) -> None:
    """Ask with both, whole and in pieces."""
    with Client(url, owner=OWNER) as client, OpenAI(base_url=f"{url}/v1", api_key="none") as openai:
        client.facts.add("The spare key is under the blue pot.", wait=True, idempotency_key="spare-key")
        with client.sessions.create("You know Ana's house. Be brief.", ttl_s=600) as session:
            session.append("The front door has been locked since 08:00.")
            named = {"id": session.id, "owner": OWNER}
            custom: dict[str, Any] = {"memory": {"owner": OWNER, "k": 1}, "session": named}
            answer = openai.chat.completions.create(
                model="default",
                messages=[{"role": "user", "content": "Where is the spare key?"}],
                max_tokens=24,
                temperature=0,
                extra_body={"custom_params": custom},
            )
            extra = answer.model_extra or {}
            print(f"{answer.choices[0].message.content!r}")
            print(f"  memory: {extra['memory']['tier']}, session: version {extra['session']['data_version']}")

            named["mode"] = "turn"
            stream = openai.chat.completions.create(
                model="default",
                messages=[{"role": "user", "content": "Since when is the door locked?"}],
                max_tokens=24,
                temperature=0,
                stream=True,
                extra_body={"custom_params": custom},
            )
            for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    print(chunk.choices[0].delta.content, end="|", flush=True)
            print(f"\n  the turn made version {session.reload().version}")


if __name__ == "__main__":
    main(sys.argv[1])
