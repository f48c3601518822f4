"""Profiles (the cost of each layer of a model) and clusters (servers, devices and links), without TensorFlow."""
