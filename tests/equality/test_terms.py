"""Regularizers and other terms of the weights alone equal one device, and no weight leaves its stage for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import pytest
import tensorflow as tf

from dapple_tf.graph_passes.analysis.variable_use import find_variables
from tests.equality.one_device import TOLERANCE, Problem, compare, needs_keras_3_13
from tests.equality.small_models import WIDTH, chain, data, weights

Term = Callable[[Sequence[tf.Variable]], Any]

LAYOUTS = [(1, 1), (2, 1), (1, 2), (1, 1, 1)]
MORE_LAYOUTS = [(3, 2), (2, 3), (1, 2, 1)]
STARTS = {2: ["layer2"], 3: ["layer1", "layer2"]}


def clipped() -> Any:
    return keras.optimizers.Adam(0.01, global_clipnorm=0.05)  # a limit below the norm


def of_chain(term: Term) -> Problem:
    matrices = weights(3)
    loss = chain(matrices)
    variables = {f"w{i}": matrix for i, matrix in enumerate(matrices)}
    return Problem(lambda x, y: loss(x, y) + term(matrices), variables, clipped)


def of_keras(regularizers: Sequence[Any]) -> Problem:
    keras.utils.set_random_seed(4)
    layers = [
        keras.layers.Dense(WIDTH, "tanh", name=f"layer{i}", dtype="float64", kernel_regularizer=regularizer)
        for i, regularizer in enumerate(regularizers)
    ]
    model = keras.Sequential([keras.Input((WIDTH,), dtype="float64"), *layers])
    return Problem.of_model(
        model,
        lambda x, y: tf.reduce_mean(tf.reduce_sum(tf.square(model(x) - y), 1)) + sum(model.losses),
        clipped,
    )


def l2(matrices: Sequence[tf.Variable]) -> Any:
    return 0.1 * tf.add_n([tf.nn.l2_loss(matrix) for matrix in matrices])


def norms(matrices: Sequence[tf.Variable]) -> Any:
    return sum(0.1 * tf.sqrt(tf.reduce_sum(matrix * matrix)) for matrix in matrices)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "l2 and norms": lambda: of_chain(lambda matrices: l2(matrices) + norms(matrices)),
    "keras": lambda: of_keras([keras.regularizers.L1(0.05), keras.regularizers.L2(0.05), keras.regularizers.L1(0.03)]),
}


def check_term(problem: Problem, replicas: Sequence[int]) -> Any:
    """Check that a step equals one device and has every weight in one stage; return its staged model."""
    comparison = compare(
        problem, [data(7), data(7, 2)], stages=STARTS[len(replicas)], replicas=list(replicas), micro_batches=2
    )
    comparison.check(TOLERANCE["float64"])
    model = comparison.model
    users = dict(find_variables(comparison.step.graph).users)
    assert {name: len(users[name]) for name in model.model_variables} == dict.fromkeys(model.model_variables, 1)
    return model


@pytest.mark.parametrize("replicas", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["l2 and norms", pytest.param("keras", marks=needs_keras_3_13)])
def test_a_term_of_the_weights_equals_one_device(name: str, replicas: Sequence[int]) -> None:
    assert check_term(PROBLEMS[name](), replicas).pass_facts.shared


@pytest.mark.parametrize("replicas", MORE_LAYOUTS, ids=str)
def test_a_term_of_the_weights_equals_one_device_for_any_replicas(replicas: Sequence[int]) -> None:
    assert check_term(of_chain(l2), replicas).pass_facts.shared


OTHERS: dict[str, Term] = {
    "global norm": lambda matrices: 0.1 * tf.linalg.global_norm(matrices),
    "cut off": lambda matrices: 0.1 * tf.minimum(tf.cast(tf.cast(tf.norm(matrices[0]), tf.int32), tf.float64), 3.0),
    "constant": lambda matrices: tf.stop_gradient(tf.norm(matrices[0])),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_terms_equal_one_device(name: str) -> None:
    assert check_term(of_chain(OTHERS[name]), (2, 1)).pass_facts.shared


def test_a_term_with_a_strength_that_is_a_variable_equals_one_device() -> None:
    matrices = weights(3)
    strength = tf.Variable(0.3, dtype="float64", name="strength")
    loss = chain(matrices)
    problem = Problem(
        lambda x, y: loss(x, y) + sum(strength * tf.nn.l2_loss(matrix) for matrix in matrices),
        {"w0": matrices[0], "w1": matrices[1], "w2": matrices[2], "strength": strength},
        clipped,
    )
    assert check_term(problem, (1, 1, 1)).pass_facts.shared


def test_a_mean_of_a_weight_that_scales_later_layers_equals_one_device() -> None:
    matrices = weights(3)

    def loss_fn(x: Any, y: Any) -> Any:
        scale = 1.0 + tf.reduce_mean(matrices[0])
        for i, matrix in enumerate(matrices):
            with tf.name_scope(f"layer{i}"):
                x = tf.tanh(x @ matrix) * scale
        return tf.reduce_mean(tf.reduce_sum(tf.square(x - y), 1))

    problem = Problem(loss_fn, {f"w{i}": matrix for i, matrix in enumerate(matrices)}, clipped)
    assert check_term(problem, (1, 2, 1)).pass_facts.shared


def test_the_term_of_a_tied_weight_equals_one_device() -> None:
    first, second = weights(2)
    loss = chain([first, second, first])
    problem = Problem(lambda x, y: loss(x, y) + 0.1 * tf.nn.l2_loss(first), {"w0": first, "w1": second}, clipped)
    comparison = compare(problem, [data(7), data(7, 2)], stages=STARTS[3], replicas=[1, 2, 1], micro_batches=2)
    comparison.check(TOLERANCE["float64"])
    assert comparison.model.pass_facts.shared


def test_weight_normalization_is_computed_on_the_weights_stage_and_equals_one_device() -> None:
    matrices = weights(3)

    def loss_fn(x: Any, y: Any) -> Any:
        for i, matrix in enumerate(matrices):
            with tf.name_scope(f"layer{i}"):
                x = tf.tanh(x @ (matrix / tf.norm(matrix)))
        return tf.reduce_mean(tf.reduce_sum(tf.square(x - y), 1))

    problem = Problem(loss_fn, {f"w{i}": matrix for i, matrix in enumerate(matrices)}, clipped)
    assert not check_term(problem, (2, 1)).pass_facts.shared


def test_terms_as_aux_outputs_equal_one_device() -> None:
    matrices = weights(3)
    loss = chain(matrices)

    def loss_fn(x: Any, y: Any) -> Any:
        term = l2(matrices)
        return loss(x, y) + term, {"all": term, "first": tf.norm(matrices[0])}

    problem = Problem(loss_fn, {f"w{i}": matrix for i, matrix in enumerate(matrices)}, clipped)
    check_term(problem, (2, 1))
