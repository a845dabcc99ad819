"""Record stores: the contract and its backends."""

from memstore.records.base import (
    Applied,
    Batch,
    Draft,
    Finding,
    IdempotencyKey,
    Insertion,
    OwnerHead,
    OwnerStats,
    Problem,
    PurgeCounts,
    RecordStore,
    Replacement,
    RestoredFact,
    StoredVectors,
    VectorUpdate,
)
from memstore.records.sqlite import SQLiteRecords

__all__ = [
    "Applied",
    "Batch",
    "Draft",
    "Finding",
    "IdempotencyKey",
    "Insertion",
    "OwnerHead",
    "OwnerStats",
    "Problem",
    "PurgeCounts",
    "RecordStore",
    "Replacement",
    "RestoredFact",
    "SQLiteRecords",
    "StoredVectors",
    "VectorUpdate",
]
