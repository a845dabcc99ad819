"""One session forked into alternatives that go on by themselves, and a way back.

Run it: ``python examples/fork_and_compare.py http://localhost:30000``.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from sgl_stateful import Client

STORY = "Mila has trained for the Ghent marathon all summer. A week before the start she hurts her knee. "
TURNS = ["She decides to run anyway. ", "She decides to stay at home. ", "She walks the whole way. "]
SAMPLING = {"max_new_tokens": 24, "temperature": 0}


def main(url: str) -> None:
    """Fork, continue each, compare, rewind."""
    with Client(url, owner="writer") as client, client.sessions.create(text=STORY, ttl_s=600) as story:
        forks = [story.fork() for _ in TURNS]
        print(f"{len(forks)} forks of version {forks[0].info.parent.version if forks[0].info.parent else None}")

        def tell(i: int) -> str:
            forks[i].append(text=TURNS[i])
            return forks[i].turn(text="In the end,", sampling_params=SAMPLING).text

        with ThreadPoolExecutor(len(forks)) as threads:
            endings = list(threads.map(tell, range(len(forks))))
        for fork, turn, ending in zip(forks, TURNS, endings, strict=True):
            now = fork.reload()
            print(f"version {now.version}, {now.tokens} tokens: {turn}In the end,{ending!r}")
        print(f"the session itself: version {story.reload().version}, {story.info.tokens} tokens")

        shortened = forks[0].rewind(1)
        print(f"the first, rewound: version {shortened.version}, {shortened.tokens} tokens")
        print(f"sessions of this owner: {sum(1 for _ in client.sessions.iter())}")
        for fork in forks:
            fork.close()


if __name__ == "__main__":
    main(sys.argv[1])
