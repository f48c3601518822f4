"""Tests of what the benchmarks work out before they compare."""
