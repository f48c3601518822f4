"""Facts read off a graph: layers and cuts, variables, what can be re-computed. Nothing is rewritten."""
