"""What is measured, in which order, and what is checked before anything is timed."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from memstore.embedding import Embedder
from memstore_bench.corpus import Corpus, metadata_of
from memstore_bench.environment import RedisServer
from memstore_bench.measure import Row, Timed, interleaved, rows_of
from memstore_bench.mem0_process import Mem0, Mem0Process
from memstore_bench.ours import K, Ours

_FRESH_APART = 10_000
_OWNERS_COUNTED = (10, 100, 1000)
_FACTS_PER_OWNER = 100
_OWNERS_STORE = "mem0-owners"


@dataclass(frozen=True, slots=True)
class Repeats:
    """How often, at most; what mem0 rewrites all its files for is repeated less."""

    usual: int = 200
    slow: int = 30
    owners: int = 1000
    probes: int = 200

    def of(self, arms: Mapping[str, object], *, mem0: int | None = None) -> dict[str, int]:
        """Return the repeats of each arm."""
        return {arm: mem0 if arm == "mem0" and mem0 else self.usual for arm in arms}


class Suite:
    """Makes the stores below `directory`, checks them, and times them.

    Parameters
    ----------
    only
        Names of rows; empty for all.
    mem0_packages
        None leaves mem0 out.
    """

    def __init__(
        self,
        directory: Path,
        corpus: Corpus,
        embedder: Embedder,
        *,
        backends: Sequence[str],
        mem0_packages: Path | None,
        repeats: Repeats,
        only: Sequence[str],
        say: Callable[[str], None],
    ) -> None:
        self._directory = directory
        self._corpus = corpus
        self._embedder = embedder
        self._backends = backends
        self._packages = mem0_packages
        self._repeats = repeats
        self._only = only
        self._say = say
        self._fresh = 0
        self.rows: list[Row] = []
        self.recall = 1.0
        """Of the ten best, over all backends and sizes, the worst."""

    def run(self, sizes: Sequence[int]) -> None:
        """Measure everything."""
        mem0 = None if self._packages is None else Mem0Process(self._packages, self._directory)
        try:
            if mem0 is not None:
                mem0.ask("warm_up")
            self._embedder.embed(["a text to warm up with"])
            for place, size in enumerate([0, *sorted(sizes)]):
                self._of_size(size, mem0, is_grown=place < 3, is_middle=place == 2, is_largest=place == len(sizes))
            if self._wants("open_owner") or self._wants("memory"):
                self._of_owners(mem0)
        finally:
            if mem0 is not None:
                mem0.close()

    def _of_size(
        self, size: int, mem0: Mem0Process | None, *, is_grown: bool, is_middle: bool, is_largest: bool
    ) -> None:
        ours = {backend: self._store(f"{backend}-{size}", backend) for backend in self._backends}
        rival = None if mem0 is None else Mem0(mem0, f"mem0-{size}", self._corpus)
        try:
            for name, arm in _all(ours, rival).items():
                start = time.perf_counter()
                if size:
                    arm.fill(size)
                self._say(f"{name}: {size} facts stored in {time.perf_counter() - start:.1f} s")
            if size:
                self._verify(size, ours, rival)
                self._searches(size, ours, rival)
                if is_middle or is_largest:
                    self._words(size, ours)
            if is_largest:
                self._bytes(size, ours, rival)
                self._filters(size, ours, rival)
                self._reopening(size, ours, rival)
            if is_grown:
                self._writes(size, ours, rival, changes=is_middle)
        finally:
            for arm in _all(ours, rival).values():
                arm.close()

    def _verify(self, size: int, ours: Mapping[str, Ours], rival: Mem0 | None) -> None:
        """Our hits against products in float64, and mem0's first hit against ours."""
        found = hits = rivals = 0
        for question, best in enumerate(self._corpus.best(self._repeats.probes, K, num_facts=size)):
            for arm in ours.values():
                nearest = arm.nearest(question)
                hits += len(set(nearest) & set(best))
                found += len(best)
                if nearest[0] != best[0]:
                    raise SystemExit(f"question {question} at {size} facts: {nearest[:3]}, not {best[:3]}")
            if rival is not None:
                nearest = rival.nearest(question)
                rivals += len(set(nearest) & set(best))
                if nearest[0] != best[0]:
                    raise SystemExit(f"question {question} at {size} facts: mem0 has {nearest[:3]}, not {best[:3]}")
        if found:
            self.recall = min(self.recall, hits / found)
        theirs = "" if rival is None else f", mem0's {rivals / (K * self._repeats.probes):.4f}"
        self._say(f"{size} facts: same first hit everywhere; recall at 10 is {hits / max(1, found):.4f}{theirs}")

    def _searches(self, size: int, ours: Mapping[str, Ours], rival: Mem0 | None) -> None:
        arms: dict[str, Timed] = {name: arm.search_vector for name, arm in ours.items()}
        if rival is not None:
            arms |= {"mem0": rival.search_vector, "mem0-faiss": rival.search_below}
        notes = {
            "mem0": "Memory.search, its embedder looks the vector up",
            "mem0-faiss": "the vector store below Memory, not compared",
        }
        self._time("search_vector", size, arms, notes=notes)
        arms = {name: arm.search for name, arm in ours.items()}
        self._time("search", size, arms | ({"mem0": rival.search} if rival else {}))

    def _words(self, size: int, ours: Mapping[str, Ours]) -> None:
        note = dict.fromkeys(ours, "mem0's FAISS store has none")
        for mode in ("keyword", "hybrid"):
            arms = {name: _with(arm.search, mode=mode) for name, arm in ours.items()}
            self._time(mode, size, arms, notes=note)

    def _filters(self, size: int, ours: Mapping[str, Ours], rival: Mem0 | None) -> None:
        for percent, filters in ((1, {"bucket": 7}), (50, {"half": 1})):
            where = {f"metadata.{key}": value for key, value in filters.items()}
            arms: dict[str, Timed] = {name: _with(arm.search_vector, where=where) for name, arm in ours.items()}
            notes = {}
            if rival is not None:
                arms["mem0"] = _with(rival.search_vector, filters=filters)
                counts = [len(rival.nearest(i, filters=filters)) for i in range(20)]
                notes["mem0"] = f"filters afterwards: finds {sum(counts) / len(counts):.1f} of {K}"
            self._time(f"search_filtered_{percent}_percent", size, arms, notes=notes)
            # Afterwards, so that the first of the timed calls is the first of all.
            self._verify_filtered(size * percent // 100, ours, where=where, filters=filters)

    def _verify_filtered(
        self, num_matching: int, ours: Mapping[str, Ours], *, where: dict[str, int], filters: dict[str, int]
    ) -> None:
        for name, arm in ours.items():
            for question in range(min(20, self._repeats.probes)):
                found = arm.nearest(question, where=where)
                passing = [fact for fact in found if filters.items() <= metadata_of(fact).items()]
                if len(passing) != min(K, num_matching) or passing != found:
                    raise SystemExit(f"{name}, question {question}: {found} with {where}, of {num_matching} facts")

    def _reopening(self, size: int, ours: Mapping[str, Ours], rival: Mem0 | None) -> None:
        arms: dict[str, Timed] = {name: arm.reopen for name, arm in ours.items()}
        arms |= {"mem0": rival.reopen} if rival else {}
        self._time("reopen", size, arms, repeats=dict.fromkeys(arms, self._repeats.slow), warm_up=1)

    def _writes(self, size: int, ours: Mapping[str, Ours], rival: Mem0 | None, *, changes: bool) -> None:
        stores = _all(ours, rival)
        slow = self._repeats.slow if size > 1000 else None
        notes = {"mem0": f"of {size} facts {'stored by its bulk calls' if size else 'it starts with'}"}
        repeats = self._repeats.of(stores, mem0=slow)
        self._time("add", size, {name: arm.add for name, arm in stores.items()}, repeats=repeats, notes=notes)
        if rival is not None and size and self._wants("add"):
            rival.check_fields()
        if not changes:
            return
        self._time("update", size, {name: arm.update for name, arm in stores.items()}, repeats=repeats)
        # Other facts than those that were updated.
        first = max(repeats.values()) + 100
        self._time("delete", size, {name: arm.delete for name, arm in stores.items()}, repeats=repeats, first=first)

    def _bytes(self, size: int, ours: Mapping[str, Ours], rival: Mem0 | None) -> None:
        if not self._wants("bytes_per_fact"):
            return
        stores = _all(ours, rival)
        taken = {name: {what: count / size for what, count in arm.bytes().items()} for name, arm in stores.items()}
        for name, of_arm in taken.items():
            ratio = taken["mem0"]["disk"] / of_arm["disk"] if "mem0" in taken and name != "mem0" else None
            others = {what: round(value) for what, value in of_arm.items() if what != "disk"}
            note = ", ".join(f"{what} {value}" for what, value in others.items())
            self.rows.append(
                Row(
                    "bytes_per_fact",
                    size,
                    name,
                    "B",
                    of_arm["disk"],
                    None,
                    1,
                    ratio=ratio,
                    note=note,
                    details={**others},
                )
            )

    def _of_owners(self, mem0: Mem0Process | None) -> None:
        num_owners, size = self._repeats.owners, self._repeats.owners * _FACTS_PER_OWNER
        ours = {backend: self._store(f"{backend}-owners", backend) for backend in self._backends}
        rival = None if mem0 is None else Mem0(mem0, _OWNERS_STORE, self._corpus)
        try:
            for arm in _all(ours, rival).values():
                arm.fill_owners(num_owners, _FACTS_PER_OWNER)
            self._say(f"{num_owners} owners of {_FACTS_PER_OWNER} facts stored")
            arms: dict[str, Timed] = {name: arm.open_owners for name, arm in ours.items()}
            notes = {}
            if rival is not None:
                arms |= {"mem0": rival.search_owners, "mem0-faiss": rival.open_owners}
                counts = rival.found_of_owners(20)
                notes["mem0"] = f"one collection, open already; finds {sum(counts) / len(counts):.1f} of {K}"
                notes["mem0-faiss"] = "below Memory: a collection for each owner, not compared"
            repeats = dict.fromkeys(arms, num_owners - 3) | {"mem0": min(num_owners - 3, self._repeats.usual)}
            self._time("open_owner", size, arms, repeats=repeats, notes=notes, warm_up=3)
            if self._wants("memory"):
                self._memory(size, ours)
        finally:
            for arm in _all(ours, rival).values():
                arm.close()

    def _memory(self, size: int, ours: Mapping[str, Ours]) -> None:
        """What a fresh process grows by; mem0's, by a store of as many facts, which it reads as a whole."""
        theirs = None
        if self._packages is not None:
            theirs = self._memory_of_mem0()
            note = "the same facts, in one collection"
            self.rows.append(Row("memory", size, "mem0", "MiB", theirs, None, 1, note=note))
        counts = [count for count in _OWNERS_COUNTED if count <= self._repeats.owners]
        for name, arm in ours.items():
            for taken in arm.memory_by_owners(counts):
                note = f"after {taken['owners']} owners; index_bytes {taken['index_bytes'] / 2**20:.1f} MiB"
                growth = taken["rss_growth"] / 2**20
                ratio = theirs / growth if theirs is not None and taken["owners"] == self._repeats.owners else None
                row = Row("memory", size, name, "MiB", growth, None, 1, ratio=ratio, note=note, details={**taken})
                self.rows.append(row)

    def _memory_of_mem0(self) -> float:
        assert self._packages is not None
        process = Mem0Process(self._packages, self._directory)
        try:
            before = process.ask("rss")
            process.ask("open", store=_OWNERS_STORE)
            return float(process.ask("rss") - before) / 2**20
        finally:
            process.close()

    def _store(self, name: str, backend: str) -> Ours:
        directory = self._directory / name
        server = RedisServer(directory) if backend == "redis" else None
        return Ours(directory, self._corpus, self._embedder, server=server)

    def _time(
        self,
        name: str,
        size: int,
        arms: Mapping[str, Timed],
        *,
        repeats: Mapping[str, int] | None = None,
        notes: Mapping[str, str] | None = None,
        warm_up: int = 5,
        first: int | None = None,
    ) -> None:
        if not self._wants(name):
            return
        self._say(f"{name} at {size} facts")
        if first is None:
            # Every row has texts of its own: what was embedded or added before is not asked for again.
            first = self._fresh if name in ("add", "search", "keyword", "hybrid") else 0
        self._fresh += _FRESH_APART
        measured = interleaved(arms, repeats or self._repeats.of(arms), warm_up=warm_up, first=first)
        self.rows += rows_of(name, size, measured, notes=notes)

    def _wants(self, name: str) -> bool:
        return not self._only or any(name.startswith(wanted) for wanted in self._only)


def _all(ours: Mapping[str, Ours], rival: Mem0 | None) -> dict[str, Ours | Mem0]:
    return {**ours, **({"mem0": rival} if rival else {})}


def _with(run: Callable[..., list[float]], **arguments: object) -> Timed:
    return lambda first, count: run(first, count, **arguments)
