"""Cache salts: what keeps the KV of one owner apart from everybody else's."""

from __future__ import annotations

import hashlib
import hmac
import secrets


class Salts:
    """Salts that nobody outside this process can compute."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(16)

    def named(self, name: str) -> str:
        """The salt of one of the server's own purposes."""
        mac = hmac.new(self._secret, name.encode(), hashlib.sha256)
        return f"sgl_stateful:{mac.hexdigest()[:32]}"

    def of(self, owner: str, epoch: int) -> str:
        """The salt of an owner, until the next purge."""
        return self.named(f"{epoch}:{owner}")
