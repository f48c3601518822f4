"""The passes, one a file; ``dapple_tf.compiler`` has their order."""
