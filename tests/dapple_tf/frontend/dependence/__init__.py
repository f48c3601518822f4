"""Tests of the analysis of how tensors depend on the batch."""
