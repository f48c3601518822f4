"""Ordinary TensorFlow and Keras models with data; nothing in them is about pipelines.

They are installed as ``dapple_tf.examples``: ``dapple train dapple_tf.examples:gpt --stages 2``.
"""

from dapple_tf.examples.amoebanet import amoebanet
from dapple_tf.examples.bert import bert
from dapple_tf.examples.gnmt import gnmt
from dapple_tf.examples.gpt import gpt
from dapple_tf.examples.gpt2 import gpt2
from dapple_tf.examples.llama import llama
from dapple_tf.examples.moe import moe
from dapple_tf.examples.resnet import resnet
from dapple_tf.examples.t5 import t5
from dapple_tf.examples.vgg import vgg
from dapple_tf.examples.vit import vit
from dapple_tf.examples.xlnet import xlnet

__all__ = ["amoebanet", "bert", "gnmt", "gpt", "gpt2", "llama", "moe", "resnet", "t5", "vgg", "vit", "xlnet"]
