"""Sessions: token prefixes that stay in the KV pool, advanced as data arrives, asked for the price of the question."""
