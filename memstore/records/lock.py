"""One writer per directory."""

import fcntl
import os
from pathlib import Path

from memstore.errors import StoreLocked


class DirectoryLock:
    """An advisory lock on `directory/lock`, which the kernel releases when its process ends.

    Raises
    ------
    StoreLocked
        While another lock on this directory is held, in this process or another.
    OSError
        Where the file cannot be opened.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "lock"
        # flock belongs to the open file and not to the process, so a second one in this process is refused too.
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._fd, 32, 0).strip()
            self.release()
            pid = int(holder) if holder.isdigit() else None
            raise StoreLocked(
                f"{directory} is held by process {pid or 'unknown'}: close that store first, or use another directory",
                pid=pid,
            ) from error
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Give the directory free; may be called twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
