"""The benchmark behind `scripts/bench_sessions`."""
