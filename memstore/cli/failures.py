"""What goes wrong becomes one line on stderr and an exit code."""

import contextlib
import errno
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from memstore.cli.secrets import Secrets, secrets_of
from memstore.errors import (
    BlobStoreDamaged,
    CorruptBlob,
    EmbedderMismatch,
    EmbeddingError,
    FactNotFound,
    InvalidInput,
    MemStoreError,
    StoreDamaged,
    StoreError,
    StoreTooNew,
)

FOUND_PROBLEMS = 1
INVALID = 2
NOT_FOUND = 3
UNAVAILABLE = 4
UNUSABLE = 5
UNEXPECTED = 70
INTERRUPTED = 130
PIPE_CLOSED = 141

EXIT_CODES = {
    0: "Done.",
    FOUND_PROBLEMS: "The command ran, and found problems: damage that is not mended, or an error of the set-up.",
    INVALID: "An argument, an option, a file or a setting is not valid, or what was asked for was not confirmed.",
    NOT_FOUND: "There is no such fact, owner, store or KV cache.",
    UNAVAILABLE: (
        "The store does not answer, refuses the user, is busy, read-only or full, or the disk of the output is full. "
        "It may help to repeat."
    ),
    UNUSABLE: "The store or its KV cache is damaged or of another release, or its vectors are not of this embedder.",
    UNEXPECTED: "A defect of this program: MEMSTORE_DEBUG=1 shows where.",
    INTERRUPTED: "Ended by Ctrl-C.",
    PIPE_CLOSED: "Whoever read the output went away.",
}

# Typer has its own copy of click in some releases, and imports click in others.
_UsageError: Any = typer.BadParameter.__mro__[1]

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class NotFound(MemStoreError):
    """What a command was asked about does not exist."""


def no_such_owner(owner: str) -> NotFound:
    """Return the error for an owner of whom the store holds nothing."""
    return NotFound(f"there is no owner {owner!r} in this store")


class Root(TyperGroup):
    """The outermost command group; every failure of a command ends here."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command and exit; see `EXIT_CODES`."""
        arguments = list(sys.argv[1:] if args is None else args)
        secrets = secrets_of(arguments, os.environ)

        def run() -> Any:
            # Not standalone: errors come out as exceptions, exit codes are returned.
            return super(Root, self).main(arguments, prog_name, complete_var, False, windows_expand_args, **extra)

        with _warnings_shown(secrets):
            code = _exit_code_of(run, secrets)
        sys.exit(code)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names, groups first."""
        return sorted(super().list_commands(ctx), key=lambda name: not isinstance(self.commands[name], TyperGroup))


def _settle_output() -> None:
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        discard_output()


def discard_output() -> int:
    """Keep Python from writing to a closed pipe again when it exits; return the exit code."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED


def _exit_code_of(run: Callable[[], Any], secrets: Secrets) -> int:
    try:
        code = run()
        sys.stdout.flush()
        return int(code or 0)
    except BrokenPipeError:
        return discard_output()
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except Exception as error:
        code = _told(error, secrets)
        _settle_output()
        return code


def _told(error: Exception, secrets: Secrets) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error, file=sys.stderr)
        return INVALID
    if os.environ.get("MEMSTORE_DEBUG"):
        print(secrets.hidden("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    code, message = _meaning(error)
    print(f"memstore: {secrets.hidden(' '.join(message.split()))}", file=sys.stderr)
    return code


def _meaning(error: Exception) -> tuple[int, str]:
    message = str(error)
    match error:
        case _UsageError():
            return INVALID, f"{error.format_message().rstrip('.')}: see --help"
        case ValidationError():
            # Only where and why: the values may be secret.
            return INVALID, "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors())
        case FactNotFound() | NotFound():
            return NOT_FOUND, message
        case InvalidInput():
            return INVALID, message
        case (
            StoreDamaged() | StoreTooNew() | EmbedderMismatch() | EmbeddingError() | CorruptBlob() | BlobStoreDamaged()
        ):
            return UNUSABLE, message
        case StoreError():
            return UNAVAILABLE, message
        case OSError():
            where = "" if error.filename is None else f"{error.filename}: "
            return UNAVAILABLE if error.errno in _NO_SPACE else INVALID, f"{where}{error.strerror or message}"
        case _:
            hint = "this is a defect; MEMSTORE_DEBUG=1 shows where"
            return UNEXPECTED, f"{type(error).__name__}: {message} ({hint})"


class _Warnings(logging.Handler):
    """Shows what the package logs in one line each, without tracebacks."""

    def __init__(self, secrets: Secrets) -> None:
        super().__init__(logging.WARNING)
        self._secrets = secrets

    def emit(self, record: logging.LogRecord) -> None:
        print(f"memstore: {self._secrets.hidden(record.getMessage())}", file=sys.stderr)


@contextlib.contextmanager
def _warnings_shown(secrets: Secrets) -> Iterator[None]:
    handler, logger = _Warnings(secrets), logging.getLogger("memstore")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
