"""Splicing without an engine: virtual token ids and the arena that holds encoded facts."""

from .arena import ArenaFullError, FactArena
from .virtual_ids import VIRTUAL_BIT, virtual_ids

__all__ = ["VIRTUAL_BIT", "ArenaFullError", "FactArena", "virtual_ids"]
