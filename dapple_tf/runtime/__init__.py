"""The training step at run time: compile it, run it, and record its times and memory."""
