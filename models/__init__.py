"""Ordinary TensorFlow and Keras models with data; nothing in them is about pipelines.

They are installed as ``dapple_tf.examples``: ``dapple train dapple_tf.examples:gpt --stages 2``.
"""

from dapple_tf.examples.gpt import gpt
from dapple_tf.examples.resnet import resnet
from dapple_tf.examples.vgg import vgg

__all__ = ["gpt", "resnet", "vgg"]
