"""The middle end: an immutable graph IR and the passes that turn a model into a pipeline.

Nothing in this package imports TensorFlow, so a pass is tested in milliseconds.
"""
