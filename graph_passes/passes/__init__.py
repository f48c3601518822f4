"""Rewrites of a graph, one a file; each is a pure function from a valid graph to a valid graph."""
