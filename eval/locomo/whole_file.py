"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from locomo.errors import RunError


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step; it is on the disk on return.

    Raises
    ------
    RunError
        It cannot be written; the one before it, if any, is still there.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
