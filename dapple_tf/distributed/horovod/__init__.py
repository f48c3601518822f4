"""Horovod's build against the TensorFlow of this environment: ``python -m dapple_tf.distributed.horovod``."""
