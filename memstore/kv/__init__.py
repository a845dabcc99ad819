"""KV encodings of facts in LMDB: a cache beside the records."""
