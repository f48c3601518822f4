"""Analyses of a graph: layers and cuts, variables, recomputation, costs of ops. They change no graph."""
