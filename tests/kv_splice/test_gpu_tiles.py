"""Tiles, thresholds and tables: what is decided without a kernel."""

import subprocess
import sys

import pytest
import torch

from kv_splice.gpu.pools import angle_alignment, table_of
from kv_splice.gpu.tiers import crossover
from kv_splice.gpu.tiles import DEFAULT_TILE, TILES, Choices, Kind, Tile, blocks_of

KIND = Kind("splice", torch.int8, torch.bfloat16, 8, 128, 128, True, 1024)


def test_the_fastest_tile_is_kept_and_looked_up() -> None:
    choices = Choices()
    assert choices.tile(KIND) == DEFAULT_TILE
    times = dict(zip(TILES, (3.0, 1.5, 0.5, 2.0, 4.0), strict=True))
    asked = []

    def time_ms(tile: Tile) -> float:
        asked.append(tile)
        return times[tile]

    assert choices.choose(KIND, time_ms) == TILES[2]
    assert tuple(asked) == TILES
    assert choices.tile(KIND) == TILES[2]
    assert len(asked) == len(TILES), "looking up measures nothing"


@pytest.mark.parametrize(
    ("source", "target", "rotary_dim", "most_vectors"),
    [
        (torch.int8, torch.bfloat16, 128, 2),
        (torch.bfloat16, torch.bfloat16, 128, 2),
        (torch.float32, torch.float32, 128, 2),
        (torch.float32, torch.bfloat16, 128, 1),
        (torch.bfloat16, torch.bfloat16, 64, 1),
    ],
)
def test_what_would_not_stay_in_registers_is_not_tried(
    source: torch.dtype, target: torch.dtype, rotary_dim: int, most_vectors: int
) -> None:
    kind = KIND._replace(source=source, target=target, rotary_dim=rotary_dim)
    tried: list[Tile] = []
    Choices().choose(kind, lambda tile: tried.append(tile) or 1.0)
    assert {tile.vectors for tile in tried} == set(range(1, most_vectors + 1))
    assert max(tile.num_warps for tile in tried) == 8
    assert DEFAULT_TILE in tried


@pytest.mark.parametrize(("rotary_dim", "most_warps"), [(128, 8), (64, 4)])
def test_eight_warps_are_too_many_for_int8_into_fp32_beside_what_does_not_rotate(
    rotary_dim: int, most_warps: int
) -> None:
    kind = KIND._replace(source=torch.int8, target=torch.float32, rotary_dim=rotary_dim)
    assert max(tile.num_warps for tile in kind.tiles) == most_warps
    assert DEFAULT_TILE in kind.tiles


def test_a_length_that_was_not_measured_takes_the_nearest() -> None:
    choices = Choices()
    for size, best in ((64, TILES[0]), (2048, TILES[4])):
        choices.choose(KIND._replace(size=size), lambda tile, best=best: float(tile != best))
    assert choices.tile(KIND._replace(size=1)) == TILES[0]
    assert choices.tile(KIND._replace(size=128)) == TILES[0]
    assert choices.tile(KIND._replace(size=1024)) == TILES[4]
    assert choices.tile(KIND._replace(size=1 << 20)) == TILES[4]
    assert choices.tile(KIND._replace(is_neox=False)) == DEFAULT_TILE


@pytest.mark.parametrize(
    ("tile", "heads", "head_dim", "rotary_dim", "size", "want"),
    [
        # 128 threads of 8 pairs of 16 bits are 1,024: two tokens of 8 heads of 64 pairs.
        (Tile(1, 4), 8, 128, 128, 2, (2, 8, 64, 1)),
        (Tile(2, 8), 8, 128, 128, 2, (8, 8, 64, 1)),
        # The 48 elements that do not rotate are moved 32 at a time: as many as do.
        (Tile(1, 4), 3, 80, 32, 2, (16, 4, 16, 32)),
        (Tile(1, 4), 8, 64, 16, 2, (16, 8, 8, 16)),
        # Two of 64 rotate: the others are moved 16 at a time, and there are tokens for no more.
        (Tile(1, 4), 8, 64, 2, 2, (16, 8, 1, 16)),
        (Tile(1, 4), 8, 128, 128, 4, (1, 8, 64, 1)),
        # 256 pairs are two heads of 128; the other 14 are other programs'.
        (Tile(1, 2), 16, 256, 256, 4, (1, 2, 128, 1)),
        (Tile(1, 4), 1, 96, 96, 2, (16, 1, 64, 1)),
    ],
)
def test_blocks(
    tile: Tile, heads: int, head_dim: int, rotary_dim: int, size: int, want: tuple[int, int, int, int]
) -> None:
    assert blocks_of(tile, num_kv_heads=heads, head_dim=head_dim, rotary_dim=rotary_dim, element_size=size) == want


@pytest.mark.parametrize(
    ("first", "second", "want"),
    [
        ([1, 2, 3], [2, 1, 1], 20),
        ([1, 2, 3], [0.5, 1, 1], 10),
        ([1, 2, 3], [0.5, 3, 1], 30),
        ([1, 2, 3], [0.5, 1, 4], None),
        ([1, 2, 3], [1, 2, 3], None),
    ],
)
def test_a_threshold_is_where_the_second_way_stays_faster(
    first: list[float], second: list[float], want: int | None
) -> None:
    assert crossover([10, 20, 30], first, second) == want


def test_nothing_measured_is_no_threshold() -> None:
    assert crossover([], [], []) is None


def test_a_table_is_made_once_for_the_same_pools() -> None:
    pools = list(torch.zeros(3, 5, 2, 64, dtype=torch.bfloat16))
    table = table_of(pools, pools[::-1])
    assert table.k_addresses.tolist() == [pool.data_ptr() for pool in pools]
    assert table.v_addresses.tolist() == [pool.data_ptr() for pool in reversed(pools)]
    assert table_of(list(pools), pools[::-1]) is table
    assert table_of(pools, pools) is not table
    assert table.layers(1, 3).k_addresses.tolist() == table.k_addresses.tolist()[1:]
    assert table.layers(1, 3).num_layers == 2


def test_how_angles_are_aligned() -> None:
    rows = torch.zeros(4, 64)
    assert angle_alignment(rows) == 16
    assert angle_alignment(rows[:, :10]) == 16
    assert angle_alignment(rows[:, 1:]) == 4
    assert angle_alignment(torch.zeros(4, 6)) == 8
    assert angle_alignment(torch.zeros(4, 6).half()) == 4


def test_a_machine_without_triton_has_the_rest() -> None:
    code = "import sys; sys.modules['triton'] = None; import kv_splice"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_kernels_need_neither_sglang_nor_numba() -> None:
    code = "import sys, kv_splice.gpu; assert not {'sglang', 'numba', 'llvmlite'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
