"""Keeping credentials out of whatever is shown.

No message of the package has any. This is the second fence: what was typed in the wrong place, or what a library puts
into an error that nobody expected.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from urllib.parse import unquote

_VARIABLES = ("MEMSTORE_REDIS_PASSWORD", "MEMSTORE_SENTINEL_PASSWORD")
_MASK = "***"
# `--store=`, `redis://` and what people write for it.
_LEAD = re.compile(r"(?:--?[\w-]+=)?(?:[A-Za-z][\w+.-]*:)?/{0,3}")


class Secrets(NamedTuple):
    """What must not be shown, longest first."""

    values: tuple[str, ...]

    def hidden(self, text: str) -> str:
        """Return `text` without them."""
        for value in self.values:
            text = text.replace(value, _MASK)
        return text


def secrets_of(arguments: Iterable[str], environment: Mapping[str, str]) -> Secrets:
    """Return the passwords in the arguments and the environment of a process."""
    found = {environment.get(name, "") for name in _VARIABLES}
    for value in [*arguments, environment.get("MEMSTORE_URL", "")]:
        before_host = value.rpartition("@")[0]
        if ":" in before_host:
            user, colon, password = before_host[len(_LEAD.match(before_host)[0]) :].partition(":")  # type: ignore[index]
            found.add(password if colon else user)
    found |= {unquote(value) for value in found}
    return Secrets(tuple(sorted(found - {""}, key=len, reverse=True)))
