"""The bench of the memory store: `MemStore` on SQLite and on Redis beside mem0ai on FAISS."""
