"""A process that searches one owner after another, and says what it holds in memory meanwhile."""

import json
import sys
from collections.abc import Sequence

import numpy as np

from memstore import MemStore
from memstore.embedding import Vectors
from memstore_bench.environment import rss_bytes
from memstore_bench.ours import SETTINGS, K


class AbsentEmbedder:
    """Stands for the embedder that made the store's vectors: nothing is embedded here."""

    max_tokens = 256

    def __init__(self, fingerprint: str, dimension: int) -> None:
        self.fingerprint = fingerprint
        self.dimension = dimension

    def count_tokens(self, text: str) -> int:
        """Never called."""
        raise NotImplementedError

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Never called."""
        raise NotImplementedError


def main() -> None:
    """Print the growth since the start, one object per count of owners."""
    request = json.loads(sys.argv[1])
    query = np.random.default_rng(0).standard_normal(request["dimension"])
    embedder = AbsentEmbedder(request["fingerprint"], request["dimension"])
    taken, searched = [], 0
    with MemStore(request["location"], embedder=embedder, settings=SETTINGS) as store:
        start = rss_bytes()
        for count in request["counts"]:
            for owner in range(searched, count):
                store.search_vector(f"owner-{owner}", query, K)
            searched = count
            taken.append({"owners": count, "rss_growth": rss_bytes() - start, "index_bytes": store.index_bytes()})
    print(json.dumps(taken))


if __name__ == "__main__":
    main()
