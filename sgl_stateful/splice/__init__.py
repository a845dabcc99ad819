"""Splicing without an engine: virtual token ids and the arena that holds encoded facts."""

from .arena import ArenaFull, FactArena
from .virtual_ids import VIRTUAL_BIT, virtual_ids

__all__ = ["VIRTUAL_BIT", "ArenaFull", "FactArena", "virtual_ids"]
