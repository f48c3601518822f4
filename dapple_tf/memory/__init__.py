"""Memory of each stage's device during a step: predicted from the graph, and measured while the step runs."""
