"""Who has a KV cache open: a lock file that every opener shares, and that is exclusive while the file is exchanged."""

import errno
import fcntl
import os
from pathlib import Path


class OpenersLock:
    """An advisory lock on one file, let go by the kernel when its process ends, however it ends.

    A file of its own, because LMDB's are replaced. `flock` belongs to the open file, so that two instances in one
    process exclude each other as two processes do.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def try_exclusive(self) -> bool:
        """Return whether nobody else holds the lock, which is exclusive then; where it is False, nothing is held."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            # Linux gives a shared lock up before it tries for the exclusive one: end in one state, not in two.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            return False
        return True

    def share(self) -> None:
        """Hold the lock with others, after whoever has it exclusively; gives up an exclusive one."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def close(self) -> None:
        """Let go; may be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
