"""Digests: equal for what is traced anew under other numbers, and different where the code is."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.distributed.digest import digest_graphs, digest_tensors
from dapple_tf.frontend.capture import capture
from dapple_tf.graph_passes.analysis.layers import find_layers
from dapple_tf.staged_model import stage_model

X = np.ones((4, 3), np.float32)


def digest(steps: int = 3, swapped: bool = False) -> str:
    """Of a model with a loop, traced anew, as another process does that has traced more before."""
    w = tf.Variable(tf.eye(3), name="w")

    def body(k: Any, h: Any, g: Any) -> Any:
        return (k + 1, h @ w - g, g) if swapped else (k + 1, g @ w - h, g)

    def loss(x: Any) -> Any:
        _, h, _ = tf.while_loop(lambda k, h, g: k < steps, body, [0, x, tf.tanh(x)])
        return tf.reduce_mean(tf.square(h))

    captured = capture(loss, (X,))
    model = stage_model(captured, find_layers(captured.graph), [], keras.optimizers.SGD())
    return digest_graphs([model.graph], model.library)


def test_a_loop_that_is_traced_again_has_the_same_digest() -> None:
    first = digest()
    for _ in range(8):  # TensorFlow numbers what it traces, and arguments and nodes after that
        tf.function(lambda: tf.while_loop(lambda k: k < 2, lambda k: (k + 1,), [0])).get_concrete_function()
    assert digest() == first


@pytest.mark.parametrize("other", [{"steps": 4}, {"swapped": True}])
def test_another_loop_has_another_digest(other: dict[str, Any]) -> None:
    assert digest(**other) != digest()


def test_words_have_equal_digests_though_each_rank_has_its_own_objects() -> None:
    words = [{"text": np.array([f"{word} {i}".encode() for i in range(3)], object)} for word in ("a", "a", "b")]
    digests = [digest_tensors(each) for each in words]
    assert digests[0] == digests[1] != digests[2]
