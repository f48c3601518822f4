"""Turn a pipelined graph into a TensorFlow function, and run it."""
