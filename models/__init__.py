"""Ordinary TensorFlow and Keras models with data; nothing in them is about pipelines."""
