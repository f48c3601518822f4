"""Steps of several threads that share variables run one after the other."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence

import keras
import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.runtime import exclusive as module
from dapple_tf.runtime.exclusive import exclusive
from tests.dapple_tf.builders import step_of


def run_all(work: Sequence[Callable[[], object]]) -> None:
    """Run all at once; they have a minute."""
    threads = [threading.Thread(target=one, daemon=True) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_two_steps_that_share_a_variable_compute_in_two_threads_what_they_compute_in_one() -> None:
    """Each step multiplies the weight by a power of two, so the order does not matter, but every step must count."""
    weight = tf.Variable(tf.ones((1,), tf.float64) * 2.0**900, name="weight")

    def loss(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(x * weight * weight / 2)

    steps = [step_of(loss, optimizer=keras.optimizers.SGD(rate), stages=1) for rate in (0.5, 0.75)]
    batch = tf.ones((4, 1), tf.float64)
    counts = (150, 100)

    def train(step: Callable[..., object], count: int) -> None:
        for _ in range(count):
            step(batch)

    run_all([lambda s=s, c=c: train(s, c) for s, c in zip(steps, counts, strict=True)])  # type: ignore[misc]  # mypy cannot infer such lambdas
    np.testing.assert_array_equal(weight.numpy(), [2.0 ** (900 - 150 - 2 * 100)])


def test_threads_that_take_variables_in_any_order_do_not_wait_for_each_other_forever() -> None:
    variables = [tf.Variable(0) for _ in range(5)]

    def take(order: Sequence[tf.Variable]) -> None:
        for _ in range(300):
            with exclusive(order), exclusive(order[:2]):
                before = variables[0].numpy()
                variables[0].assign(before + 1)

    run_all([lambda: take(variables), lambda: take(variables[::-1])])
    assert variables[0].numpy() == 600


def test_a_lock_goes_with_its_variable() -> None:
    gc.collect()
    before = len(module._LOCKS)
    variable = tf.Variable(0)
    with exclusive([variable]):
        assert len(module._LOCKS) == before + 1
    del variable
    gc.collect()
    assert len(module._LOCKS) == before


@pytest.mark.parametrize(
    ("own", "building"),
    [
        ((700, 10, 10), (10_000, 20, 20)),
        ((50_000, 5, 50), (50_000, 20, 50)),  # a user's own thresholds are not lowered
        ((0, 10, 10), (0, 10, 10)),  # a collector that is turned off stays so
    ],
)
def test_garbage_is_collected_more_rarely_while_a_step_is_built(
    own: tuple[int, int, int], building: tuple[int, int, int]
) -> None:
    found = []
    weight = tf.Variable(1.0)

    def loss(x: tf.Tensor) -> tf.Tensor:
        found.append(gc.get_threshold())
        return tf.reduce_mean(x * weight)

    before = gc.get_threshold()
    try:
        gc.set_threshold(*own)
        step_of(loss, stages=1)(tf.ones((4, 1)))
        after = gc.get_threshold()
    finally:
        gc.set_threshold(*before)
    assert set(found) == {building}
    assert after == own
