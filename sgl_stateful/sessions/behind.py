"""What a request of the server's own needs of a session that it is put behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .hold import Hold


class Behind(NamedTuple):
    """A session at one moment.

    Attributes
    ----------
    token_ids
        What it holds at ``data_version``; not to be changed.
    owner_epoch
        Counts the purges of its owner, while this process lives.
    weight_version
        Name of the model's weights; None while they are being updated.
    salt
        The cache salt of the request.
    hold
        What the scheduler is told.
    """

    data_version: int
    token_ids: Sequence[int]
    owner_epoch: int
    weight_version: str | None
    salt: str
    hold: Hold
