"""What each stage's device holds during a step: predicted from the graph, and measured while it runs."""
