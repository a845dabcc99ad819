"""Readings arrive one after another; after each group, several questions are asked about all of them at once.

Run it: ``python examples/session_monitor.py http://localhost:30000``.
"""

from __future__ import annotations

import asyncio
import sys

from sgl_stateful import AsyncClient

READINGS = [
    ["08:00 bed 1: 21 C, soil moist", "08:00 bed 2: 24 C, soil moist", "08:00 bed 3: 31 C, soil dry"],
    ["09:00 bed 1: 22 C, soil moist", "09:00 bed 2: 29 C, soil dry", "09:00 bed 3: 27 C, soil moist"],
]
QUESTIONS = ["Which bed is the warmest?", "Which bed needs water?", "Is anything unusual?"]
SAMPLING = {"max_new_tokens": 16, "temperature": 0}


async def main(url: str) -> None:
    """Append, and ask."""
    async with (
        AsyncClient(url, owner="greenhouse") as client,
        await client.sessions.create("You watch a greenhouse. Answer in a few words.", ttl_s=600) as session,
    ):
        print(f"session opened: {session.info.tokens} tokens, {session.info.pin.state}")
        for group in READINGS:
            for reading in group:
                added = await session.append(reading)
                print(
                    f"version {added.version}: {added.appended_tokens} tokens appended,"
                    f" {added.prefilled_tokens} computed, {added.cached_tokens} cached"
                )
            asked = [session.query(question, sampling_params=SAMPLING) for question in QUESTIONS]
            for question, answer in zip(QUESTIONS, await asyncio.gather(*asked), strict=True):
                told = answer.session
                print(f"[version {answer.data_version}] {question} {answer.text.strip()!r}")
                print(f"    {told['cached_tokens']} tokens cached, {told['prefilled_tokens']} computed")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
