"""Records in one SQLite database in a directory."""

from memstore.records.sqlite.store import FILE_NAME, SQLiteRecords

__all__ = ["FILE_NAME", "SQLiteRecords"]
