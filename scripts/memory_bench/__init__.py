"""Benchmarks of memory beside the same facts as text, on one server: first token, throughput, encoding."""
