"""Ordinary TensorFlow and Keras models, with data, that know nothing of pipelines."""
