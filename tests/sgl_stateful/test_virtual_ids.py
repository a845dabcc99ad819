import subprocess
import sys

import numpy as np
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_stateful.splice import VIRTUAL_BIT, virtual_ids

M64 = 2**64 - 1


def split_mix_64(seed: int, count: int) -> list[int]:
    """SplitMix64 in unbounded integers, after the C of Vigna's splitmix64.c."""
    out, state = [], seed
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & M64
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
        out.append(z ^ (z >> 31))
    return out


def expected(encoding_id: str, count: int) -> list[int]:
    seed = xxhash.xxh3_64_intdigest(encoding_id.encode())
    return [2**62 + value % 2**62 for value in split_mix_64(seed, count)]


def test_the_oracle_gives_the_published_first_outputs_of_split_mix_64() -> None:
    # seed 1234567, as in the test vectors of Rosetta Code's "Pseudo-random numbers/Splitmix64"
    assert split_mix_64(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(st.text(max_size=40), st.integers(0, 300))
@settings(deadline=None)
def test_ids_are_split_mix_64_of_the_encoding_and_offset(encoding_id: str, count: int) -> None:
    ids = virtual_ids(encoding_id, count)
    assert ids.typecode == "q"
    assert ids.tolist() == expected(encoding_id, count)
    assert all(VIRTUAL_BIT <= i < 2 * VIRTUAL_BIT for i in ids)


def test_another_process_makes_the_same_ids() -> None:
    code = "from sgl_stateful.splice import virtual_ids; print(virtual_ids('a' * 32, 5).tolist())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(expected("a" * 32, 5))


def test_a_longer_fact_begins_with_the_ids_of_a_shorter_one() -> None:
    assert virtual_ids("ab", 100)[:7] == virtual_ids("ab", 7)


@given(st.integers(0, 40), st.integers(0, 40))
def test_a_part_of_a_fact_has_the_ids_that_it_has_in_the_whole(offset: int, count: int) -> None:
    assert list(virtual_ids("ab", count, offset=offset)) == expected("ab", offset + count)[offset:]


def test_a_million_ids_of_one_encoding_are_different() -> None:
    assert len(np.unique(np.asarray(virtual_ids("c0ffee", 10**6)))) == 10**6


def test_encodings_share_no_id() -> None:
    ids = np.concatenate([np.asarray(virtual_ids(f"{number:032x}", 100)) for number in range(10_000)])
    assert len(np.unique(ids)) == 10**6
