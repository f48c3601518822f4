"""Measurements behind every figure that this project states; run them with ``python -m benchmarks [NAME ...]``."""
