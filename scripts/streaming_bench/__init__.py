"""The benchmark behind `scripts/bench_streaming`."""
