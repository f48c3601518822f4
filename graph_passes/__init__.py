"""The middle end: an immutable intermediate representation, and the passes that turn a model into a pipeline.

No module of this package imports TensorFlow, so the tests of a pass take milliseconds.
"""
