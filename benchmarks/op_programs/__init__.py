"""Random programs of one or a few ops each: what the analysis decides about them is compared with plain TensorFlow."""
