"""The commands of ``dapple``: one module each. None imports TensorFlow before it has to."""
