"""Choose the stage functions that XLA compiles, and name those that it cannot compile, with the reason."""
