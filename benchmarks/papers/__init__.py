"""The tables and figures of the papers, from our own code: ``python -m benchmarks.papers``."""
