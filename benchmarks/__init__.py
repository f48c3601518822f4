"""Measurements behind every figure this project states. ``python -m benchmarks [NAME ...]`` runs them."""
