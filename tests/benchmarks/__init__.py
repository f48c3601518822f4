"""Tests of what the benchmarks compute before they measure."""
