"""Searches for cuts, devices and micro-batches: DAPPLE's dynamic program, the annealer of "best", and their costs."""
