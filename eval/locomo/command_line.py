"""What every command of the evaluation has: errors in one line, and a data file that is the published one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from locomo.errors import DatasetError, LocomoError
from locomo.retrieval.reference import PUBLISHED_SHA256


@contextmanager
def failing_in_one_line(program: str) -> Iterator[None]:
    """Print an error of this package as ``program: what was wrong`` and exit with 1."""
    try:
        yield
    except LocomoError as error:
        print(f"{program}: {error}", file=sys.stderr)
        raise SystemExit(1) from error


def unlike_published(path: Path, digest: str, *, allowed: bool) -> str | None:
    """What to warn of where a data file is not the published one; None where it is.

    Parameters
    ----------
    digest
        The file's SHA-256, hex.
    allowed
        Whether the user goes on with another file.

    Raises
    ------
    DatasetError
        It is another file, and that was not allowed.
    """
    if digest == PUBLISHED_SHA256:
        return None
    said = f"{path} is not the published locomo10.json (SHA-256 {digest[:12]}..., not {PUBLISHED_SHA256[:12]}...)"
    if not allowed:
        raise DatasetError(f"{said}: results are not comparable; go on with --allow-data-changes")
    return said
