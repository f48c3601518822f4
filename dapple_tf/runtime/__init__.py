"""What holds the state of a pipeline and runs it."""
