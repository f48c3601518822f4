"""Which stage functions XLA compiles, and why it cannot compile the others."""
