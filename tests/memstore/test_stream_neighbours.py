"""What stands beside a fact, against a list of all facts."""

import random

from memstore import Fact
from memstore.search.streams import StreamIndex
from memstore.types import FactId, OwnerId


def fact(seq: int, stream: str, event_at: float | None = None) -> Fact:
    return Fact(
        id=FactId(str(seq)), owner=OwnerId("ana"), text="x", stream=stream, speaker=None, time=None, metadata={},
        version=1, seq=seq, created_at=0.0, updated_at=0.0, event_at=event_at,
    )  # fmt: skip


def test_facts_stand_beside_each_other_within_a_stream() -> None:
    index = StreamIndex()
    index.add([fact(9, "a"), fact(2, "a"), fact(5, "b", -1.5), fact(7, "a", 0.0)])
    assert [index.beside(seq) for seq in (2, 5, 7, 9, 3)] == [[7], [], [2, 9], [7], []]
    assert [index.event_at(seq) for seq in (2, 5, 7, 3)] == [None, -1.5, 0.0, None]
    index.remove([7, 3])
    assert [index.beside(seq) for seq in (2, 7, 9)] == [[9], [], [2]]
    # It moves to another stream, and gets a time; of two in one call the last one counts.
    index.add([fact(5, "c"), fact(5, "a", 4.0)])
    assert [index.beside(seq) for seq in (2, 5, 9)] == [[5], [2, 9], [5]]
    assert index.event_at(5) == 4.0
    assert len(index) == 3


def test_facts_without_a_stream_stand_beside_none() -> None:
    index = StreamIndex()
    index.add([fact(1, "", 3.0), fact(2, ""), fact(3, "a"), fact(4, "a")])
    assert [index.beside(seq) for seq in (1, 2, 3, 4)] == [[], [], [4], [3]]
    assert [index.stream_of(seq) for seq in (1, 3, 9)] == ["", "a", ""]
    assert (len(index), index.event_at(1)) == (4, 3.0)
    # One joins a stream, another leaves it.
    index.add([fact(2, "a"), fact(4, "")])
    assert [index.beside(seq) for seq in (1, 2, 3, 4)] == [[], [3], [2], []]
    index.remove([1, 2, 3, 4])
    assert (len(index), index.nbytes) == (0, 0)


def test_an_empty_index_takes_nothing() -> None:
    index = StreamIndex()
    assert (len(index), index.nbytes, index.beside(1)) == (0, 0, [])
    index.add([fact(n, f"stream {n}") for n in range(50)])
    assert index.nbytes > 0
    index.remove(range(50))
    assert (len(index), index.nbytes) == (0, 0)


def test_any_changes_leave_what_a_list_of_all_facts_says() -> None:
    chance = random.Random(11)
    index, kept = StreamIndex(), dict[int, Fact]()
    for _ in range(300):
        if chance.random() < 0.6:
            times = chance.choices((None, 1.0, 2.5), k=4)
            added = [fact(chance.randrange(80), chance.choice(("a", "b", "")), event_at) for event_at in times]
            index.add(added)
            kept |= {new.seq: new for new in added}
        else:
            gone = [chance.randrange(80) for _ in range(8)]
            index.remove(gone)
            for seq in gone:
                kept.pop(seq, None)
        assert len(index) == len(kept)
        for seq in range(80):
            mine = kept.get(seq)
            others = [other.seq for other in kept.values() if mine and mine.stream and other.stream == mine.stream]
            before, after = [o for o in others if o < seq], [o for o in others if o > seq]
            assert index.beside(seq) == [*([max(before)] if before else []), *([min(after)] if after else [])]
            assert index.event_at(seq) == (None if mine is None else mine.event_at)
