"""Optimizers that are given in another form than as one of Keras 3 are converted, or refused with what to give."""

from __future__ import annotations

import importlib.util
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import DappleWarning, PlanError, warn_user
from dapple_tf.frontend.optimizers import as_keras_optimizer
from tests.processes import needs_horovod

needs_tf_keras = pytest.mark.skipif(
    importlib.util.find_spec("tf_keras") is None, reason="tf_keras is not installed: pip install tf_keras"
)


def test_names_and_configurations_are_those_of_compile() -> None:
    assert isinstance(as_keras_optimizer("adam"), keras.optimizers.Adam)
    given = as_keras_optimizer({"class_name": "SGD", "config": {"learning_rate": 0.25}})
    assert isinstance(given, keras.optimizers.SGD)
    assert float(given.learning_rate.numpy()) == 0.25
    with pytest.raises(PlanError, match=r"optimizer='Adma' is not known to Keras: the nearest are 'adamax', 'adam'"):
        as_keras_optimizer("Adma")
    with pytest.raises(PlanError, match="optimizer='zzz' is not known to Keras: Could not"):
        as_keras_optimizer("zzz")
    with pytest.raises(PlanError, match=r"optimizer is the class Adam: call it, as in Adam\(learning_rate\)"):
        as_keras_optimizer(keras.optimizers.Adam)
    own = keras.optimizers.SGD()
    assert as_keras_optimizer(own) is own


def test_a_step_takes_the_name_of_an_optimizer() -> None:
    w = tf.Variable([[1.0]])
    step = dapple.pipeline(lambda x: tf.reduce_mean(x @ w), optimizer="sgd", stages=1, micro_batches=2)
    step(tf.ones([4, 1]))
    np.testing.assert_allclose(w.numpy(), [[0.99]], rtol=1e-6)


class OfSonnet:
    """As Sonnet's optimizers, which derive from nothing that TensorFlow or Keras has."""

    __module__ = "sonnet.src.optimizers.adam"


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (None, r"optimizer is None: give a keras.optimizers.Optimizer"),
        (OfSonnet(), r"optimizer is Sonnet's OfSonnet: give a Keras 3 optimizer, .* of Sonnet's modules too"),
        (tf.compat.v1.train.AdamOptimizer(), r"a AdamOptimizer of tf.compat.v1: give a Keras 3 optimizer"),
        (3, r"optimizer is a int, not a keras.optimizers.Optimizer: give a Keras 3 optimizer"),
    ],
)
def test_others_are_refused_with_what_to_give(optimizer: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        as_keras_optimizer(optimizer)


def test_a_warning_is_given_at_the_line_of_the_user() -> None:
    with pytest.warns(DappleWarning, match="told") as told:
        warn_user("told")
    assert told[0].filename == __file__


@needs_tf_keras
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_optimizer_of_keras_2_is_converted_or_refused() -> None:
    import tf_keras

    old = tf_keras.optimizers
    decay = old.schedules.ExponentialDecay(0.5, 2, 0.5)
    for make in (
        lambda of, rate: of.Adam(rate, beta_1=0.8, clipnorm=0.5),
        lambda of, rate: of.AdamW(rate, weight_decay=0.1),
        lambda of, rate: of.SGD(rate, momentum=0.9),
    ):
        for rates in ((0.25, 0.25), (decay, keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5))):
            with pytest.warns(DappleWarning, match=r"of Keras 2 \(tf_keras\): a new keras.optimizers.* in its place"):
                found = as_keras_optimizer(make(old, rates[0]))
            values = []
            for optimizer in (found, make(keras.optimizers, rates[1]), make(old, rates[0])):
                w = tf.Variable([1.0, -2.0])
                for _ in range(3):
                    optimizer.apply_gradients([(tf.constant([0.5, 0.25]), w)])
                values.append(w.numpy())
            np.testing.assert_array_equal(values[0], values[1])
            np.testing.assert_allclose(values[0], values[2], rtol=1e-6)

    class Own(old.SGD):  # type: ignore[misc]  # tf_keras is not typed
        pass

    used = old.SGD(0.1)
    used.apply_gradients([(tf.constant([1.0]), tf.Variable([1.0]))])
    for optimizer, message in (
        (old.legacy.Adam(0.1), "which Keras 3 does not have in this form: give a Keras 3 optimizer"),
        (Own(0.1), r"Own of Keras 2 \(tf_keras\), which Keras 3 does not have"),
        (old.Adam(0.1, use_ema=True), "with use_ema, which Keras 3 handles in another way"),
        (used, "that has trained already"),
    ):
        with pytest.raises(PlanError, match=message):
            as_keras_optimizer(optimizer)


@needs_tf_keras
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_of_keras_2_is_refused_with_the_alternative() -> None:
    import tf_keras

    model = tf_keras.Sequential([tf_keras.layers.InputLayer((2,)), tf_keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(dapple.errors.UsageError, match=r"Keras 2 \(tf_keras\).* train by dapple.pipeline\(loss_fn"):
        dapple.keras.pipeline(model, stages=1)


@needs_horovod
def test_an_optimizer_is_taken_out_of_horovods_or_refused_with_the_option() -> None:
    import horovod.tensorflow.keras as hvd

    hvd.init()
    given = hvd.DistributedOptimizer(keras.optimizers.SGD(0.25, momentum=0.5))
    with pytest.warns(DappleWarning, match=r"SGD is taken out of hvd.DistributedOptimizer: the pipeline sums"):
        found = as_keras_optimizer(given)
    assert found is given
    assert type(found) is keras.optimizers.SGD
    assert [variable.name for variable in found.variables] == ["iteration", "learning_rate"]
    for options, message in (
        (
            {"backward_passes_per_step": 2},
            r"with backward_passes_per_step, .*: give the optimizer gradient_acc",
        ),
        ({"compression": hvd.Compression.fp16}, r"with compression, which a pipeline does not do in its way: give SGD"),
        ({"sparse_as_dense": True}, r'with sparse_as_dense, .*: give the pipeline sparse_gradients="dense"'),
        ({"groups": 2}, "with groups, which"),
        ({"op": hvd.Sum}, "with op, which"),
        ({"gradient_predivide_factor": 2.0}, "with gradient_predivide_factor, which"),
    ):
        with pytest.raises(PlanError, match=message):
            as_keras_optimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(), **options))


@needs_horovod
def test_a_model_that_is_compiled_with_horovods_optimizer_trains_as_with_the_plain_one() -> None:
    import horovod.tensorflow.keras as hvd

    hvd.init()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.25)), "mse")
    with pytest.warns(DappleWarning, match=r"SGD is taken out of hvd.DistributedOptimizer"):
        dapple.keras.pipeline(model, stages=1, micro_batches=2)
    model.fit(np.ones((4, 2), np.float32), np.ones((4, 1), np.float32), batch_size=4, verbose=0)
    np.testing.assert_allclose(model.layers[0].kernel.numpy(), 0.5)  # 1 - 0.25 * 2 * (2 - 1)
