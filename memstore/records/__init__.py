"""Record stores: the contract and its backends."""

from memstore.records.base import Draft, Insertion, RecordStore, StoredVectors
from memstore.records.sqlite import SQLiteRecords

__all__ = ["Draft", "Insertion", "RecordStore", "SQLiteRecords", "StoredVectors"]
