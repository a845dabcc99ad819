"""Whether LMDB may map a file: its page structure, read without LMDB.

`lmdb.verify` checks that every page is in its place, reachable once, and within its bounds. It leaves open what LMDB
relies on when it deletes, and when it looks a key up: that the nodes of a page do not overlap, that the keys under a
branch lie between its separators, and that no flag makes a plain table one of another kind. The layout is that of
`MDB_meta`, `MDB_db`, `MDB_page` and `MDB_node` in mdb.c of LMDB 0.9, of 64 bits, in the byte order of the machine.
"""

import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from lmdb.verify import VerifyError, verify

_PAGE = struct.Struct("=QHHHH")  # number, pad, flags, lower, upper
_NODE = struct.Struct("=HHHH")  # low and high half of the data's size, flags, size of the key
_META = struct.Struct("=IIQQ")  # magic, version, address, map size
_TABLE = struct.Struct("=IHHQQQQQ")  # pad, flags, depth, pages of three kinds, entries, root
_BRANCH, _BIG_DATA, _SUB_DATA, _INTEGER_KEY = 0x01, 0x01, 0x02, 0x08
_NO_SUBDIR = 0x4000  # an option of whoever made the file, which LMDB writes down and ignores
_NO_PAGE = 2**64 - 1


class _Tree(NamedTuple):
    root: int
    is_free_list: bool


class _Branch(NamedTuple):
    page: int
    low: bytes
    high: bytes | None


def require_sound(data: Path) -> None:
    """Raise `VerifyError` where LMDB should not map the file, which must be at rest; one that is empty is fine."""
    if not data.exists() or not data.stat().st_size:
        return
    damage = verify(os.fspath(data))
    if damage:
        raise VerifyError(damage[0])
    with data.open("rb") as file:
        try:
            _walk(file)
        except struct.error as error:
            raise VerifyError(f"a page is cut: {error}") from error


def _walk(file: BinaryIO) -> None:
    size, trees = _read_headers(file)
    while trees:
        tree = trees.pop()
        branches = [_Branch(tree.root, b"", None)] if tree.root != _NO_PAGE else []
        while branches:
            branch = branches.pop()
            file.seek(branch.page * size)
            trees += _check_page(file.read(size), branch, branches, tree)


def _read_headers(file: BinaryIO) -> tuple[int, list[_Tree]]:
    """Return the size of a page, and the two trees of the newer header."""
    newest, found = -1, (0, [_Tree(_NO_PAGE, False)])
    size = 0
    for number in range(2):
        file.seek(number * size + _PAGE.size)
        header = file.read(_META.size + 2 * _TABLE.size + 16)
        _, _, address, _ = _META.unpack_from(header)
        free, main = (_TABLE.unpack_from(header, _META.size + i * _TABLE.size) for i in range(2))
        size = free[0]  # which stands where other tables have their pad
        if (address, free[1] & ~_NO_SUBDIR, main[0], main[1]) != (0, _INTEGER_KEY, 0, 0):
            raise VerifyError(f"header {number} has flags {free[1]} and {main[1]}, pad {main[0]}, address {address}")
        (transaction,) = struct.unpack_from("=Q", header, len(header) - 8)
        if transaction > newest:
            newest, found = transaction, (size, [_Tree(free[-1], True), _Tree(main[-1], False)])
    return found


def _check_page(page: bytes, branch: _Branch, branches: list[_Branch], tree: _Tree) -> Iterator[_Tree]:
    """Check one page, add those under it to `branches`, and return the trees whose roots stand in it."""
    _, _, flags, lower, upper = _PAGE.unpack_from(page)
    used_bytes = 0
    children: list[tuple[int, bytes]] = []
    for index, at in enumerate(struct.unpack_from(f"={(lower - _PAGE.size) // 2}H", page, _PAGE.size)):
        low_half, high_half, node_flags, key_size = _NODE.unpack_from(page, at)
        start = at + _NODE.size
        key = page[start : start + key_size]
        if tree.is_free_list:
            key = int.from_bytes(key, sys.byteorder).to_bytes(len(key), "big")
        if flags & _BRANCH:
            data_size = 0
            # The first separator of a branch stands for whatever comes before the second.
            children.append((low_half | high_half << 16 | node_flags << 32, key if index else branch.low))
            key = children[-1][1]
        else:
            data_size = 8 if node_flags & _BIG_DATA else low_half | high_half << 16
            if node_flags & _SUB_DATA:
                pad, table_flags, *_, root = _TABLE.unpack_from(page, start + key_size)
                if pad or table_flags:
                    raise VerifyError(f"table {key!r} has flags {table_flags} and pad {pad}")
                yield _Tree(root, False)
        if key < branch.low or (branch.high is not None and key >= branch.high):
            raise VerifyError(f"page {branch.page} has a key that its branch does not lead to")
        used_bytes += (_NODE.size + key_size + data_size + 1) & ~1
    if used_bytes != len(page) - upper:
        raise VerifyError(f"the nodes of page {branch.page} take {used_bytes} bytes of {len(page) - upper}")
    highs = [*(low for _, low in children[1:]), branch.high]
    branches += [_Branch(child, low, high) for (child, low), high in zip(children, highs, strict=False)]
