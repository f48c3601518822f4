"""The reference itself: values written out by hand, the printed formulas of section 3.3, and the order of 1F1B-RR."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.asynchronous.reference import (
    ByHand,
    Dense,
    Differentiated,
    Reference,
    assign,
    copies,
    forward_versions,
    mean,
    rows,
    squared_error,
    warm_ups,
)


def half_sgd() -> Any:
    return keras.optimizers.SGD(0.5)


def halving_sgd() -> Any:
    """The learning rate of iteration i is 2 ** -i."""
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5))


def scalars(*values: float) -> list[tf.Variable]:
    return [tf.Variable(value, dtype="float64", name=f"w{i}") for i, value in enumerate(values)]


def product(factors: Sequence[tf.Variable]) -> Differentiated:
    """Return f = x times all factors, averaged over samples; a factor is a stage."""

    def loss_fn(x: Any) -> Any:
        for factor in factors:
            x = x * factor
        return tf.reduce_mean(x)

    return Differentiated(loss_fn, [[factor] for factor in factors])


def column(*values: float) -> tuple[Any]:
    return (tf.constant(values, "float64"),)


# --- f = a b x by hand: the gradient of a is b x, that of b is a x, and the learning rate is 1/2


@pytest.mark.parametrize(
    ("weights", "versions", "losses", "after"),
    [
        # The minibatches read (a, b) = (1, 2), (1, 1.5), (0, 0.5), (-1.5, 0.5).
        # The updates give a = 0, -1.5, -2.5, -2 and b = 1.5, 0.5, 0.5, -1.
        ("stash", [[0, 0, 1, 2], [0, 1, 2, 3]], [2, 3, 0, 1.5], [-2, -1]),
        # They read (1, 2), (1, 2), (0, 1.5), (-2, 0.5); a = 0, -2, -5, -4.5 and b = 1.5, 0.5, 0.5, -1.5.
        ("vertical-sync", [[0, 0, 1, 2], [0, 0, 1, 2]], [2, 4, 0, 2], [-4.5, -1.5]),
        # In two stages, W(t + 1) = W(t) - v grad f(W(t - 1)) is the same.
        ("2bw", [[0, 0, 1, 2], [0, 0, 1, 2]], [2, 4, 0, 2], [-4.5, -1.5]),
    ],
)
def test_two_scalar_stages_take_the_values_computed_by_hand(
    weights: str, versions: list[list[int]], losses: list[float], after: list[float]
) -> None:
    factors = scalars(1, 2)
    reference = Reference(product(factors), half_sgd)
    window = reference.window(column(1, 2, 4, -2), 4, weights)
    assert window.versions == versions
    assert window.losses == losses
    assert copies(factors) == after
    assert reference.iterations == 4


def test_replicas_average_the_gradients_of_a_group_and_step_with_the_iteration_of_its_last_minibatch() -> None:
    """Stage 0 has two replicas: minibatches (0, 1), (2, 3), (4, 5) give an update each, at rates 1/2, 1/8, 1/32.

    a is 1 for minibatches 0 to 3, and 0 (the version after one update) for 4 and 5. Minibatch by minibatch:

    ==  ====  =======  ===  =====  =====  ====================  ========================
    m   a     b        x    b x    a x    b after               a after
    ==  ====  =======  ===  =====  =====  ====================  ========================
    0   1     2        1    2      1      2 - 1 = 1
    1   1     1        2    2      2      1 - 2/2 = 0           1 - 2/2 = 0
    2   1     0        1    0      1      0 - 1/4 = -1/4
    3   1     -1/4     -1   1/4    -1     -1/4 + 1/8 = -1/8     0 - 1/8 / 8 = -1/64
    4   0     -1/8     2    -1/4   0      -1/8
    5   0     -1/8     4    -1/2   0      -1/8                  -1/64 + 3/8 / 32 = -1/256
    ==  ====  =======  ===  =====  =====  ====================  ========================
    """
    factors = scalars(1, 2)
    reference = Reference(product(factors), halving_sgd)
    window = reference.window(column(1, 2, 1, -1, 2, 4), 6, replicas=[2, 1])
    assert window.versions == [[0, 0, 0, 0, 1, 1], [0, 1, 2, 3, 4, 5]]
    assert window.losses == [2, 2, 0, 1 / 4, 0, 0]
    assert copies(factors) == [-1 / 256, -1 / 8]
    assert reference.iterations == 6


def test_without_stashing_backward_uses_the_newest_weights_and_the_saved_activations() -> None:
    """The model is f = a b c x: its gradients are x b' c', a x c', a b x, with the newest b' and c' at backward.

    ==  ====  ====  =====  ====  =====  ===  ======  ====  =====  =======  ====  =====
    m   a     b     c      b'    c'     x    x b'c'  axc'  abx    a after  b     c
    ==  ====  ====  =====  ====  =====  ===  ======  ====  =====  =======  ====  =====
    0   1     2     1      2     1      1    2       1     2      0        1.5   0
    1   1     2     0      1.5   0      2    0       0     4      0        1.5   -2
    2   1     1.5   -2     1.5   -2     -1   3       2     -1.5   -1.5     0.5   -1.25
    3   0     1.5   -1.25  0.5   -1.25  1    -0.625  0     0      -1.1875  0.5   -1.25
    ==  ====  ====  =====  ====  =====  ===  ======  ====  =====  =======  ====  =====
    """
    factors = [tf.Variable([[value]], dtype="float64", name=f"w{i}") for i, value in enumerate((1.0, 2.0, 1.0))]
    model = ByHand(
        [[Dense(factor, tanh=False)] for factor in factors],
        lambda output, _: (tf.reduce_mean(output), tf.ones_like(output) / len(output)),
    )
    x = tf.constant([[1.0], [2.0], [-1.0], [1.0]], "float64")
    window = Reference(model, half_sgd).window((x, x), 4, "latest")
    assert window.versions == [[0, 0, 0, 1], [0, 0, 1, 2], [0, 1, 2, 3]]
    assert window.losses == [2, 0, 3, 0]
    assert [float(factor.numpy()[0, 0]) for factor in factors] == [-1.1875, 0.5, -1.25]


# --- the printed formulas


def gradient(w: Any, x: float) -> Any:
    """Return the gradient of f = (x w_1 ... w_n - 1) ** 2."""
    others = np.array([np.prod(np.delete(w, i)) for i in range(len(w))])
    return 2 * (x * np.prod(w) - 1) * x * others


# The number of updates in each of w_1 ... w_n in the gradient of the step from w(t) to w(t + 1); i counts from 1.
FORMULAS: dict[str, Callable[[int, int, int], int]] = {
    "stash": lambda t, n, i: t - n + i,
    "vertical-sync": lambda t, n, i: t - n + 1,
    "2bw": lambda t, n, i: t - 1,
    "vanilla": lambda t, n, i: t,
}


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_a_straight_pipeline_follows_the_printed_formula(formula: str, stages: int) -> None:
    random = np.random.default_rng(stages)
    start, xs = random.uniform(0.5, 1.2, stages), random.normal(size=9)
    w = [start]  # w[t][i - 1] is w_i after t minibatches
    for t, x in enumerate(xs):
        read = [max(0, FORMULAS[formula](t, stages, each)) for each in range(1, stages + 1)]
        w.append(w[t] - 0.125 * gradient(np.array([w[v][i] for i, v in enumerate(read)]), x))

    factors = scalars(*start)

    def loss_fn(x: Any) -> Any:
        for factor in factors:
            x = x * factor
        return tf.reduce_mean(tf.square(x - 1))

    reference = Reference(
        Differentiated(loss_fn, [[factor] for factor in factors]), lambda: keras.optimizers.SGD(0.125)
    )
    options: dict[str, Any] = {"depth": 1} if formula == "vanilla" else {"weights": formula}
    window = reference.window(column(*xs), 9, **options)
    np.testing.assert_allclose(copies(factors), w[-1], rtol=1e-13)
    wanted = [(x * np.prod([w[window.versions[s][t]][s] for s in range(stages)]) - 1) ** 2 for t, x in enumerate(xs)]
    np.testing.assert_allclose(window.losses, wanted, rtol=1e-12)


# --- warm-ups and versions


@pytest.mark.parametrize(
    ("replicas", "depth", "wanted"),
    [
        ([1, 1, 1, 1], None, [4, 3, 2, 1]),  # Figure 4
        ([2, 1], None, [2, 1]),  # Figure 8
        ([3, 1], None, [2, 1]),
        ([2, 1, 1], None, [2, 2, 1]),
        ([4, 2, 1], None, [2, 2, 1]),
        ([1, 2], None, [3, 1]),
        ([2, 2], None, [2, 1]),
        ([1, 1, 1, 1], 1, [1, 1, 1, 1]),
        ([1, 1, 1, 1], 4, [4, 3, 2, 1]),
        ([1, 1, 1, 1], 3, [3, 2, 1, 1]),
        ([1, 1, 1, 1], 7, [7, 5, 3, 1]),
        ([1, 1, 1, 1], 5, [5, 4, 3, 1]),
        ([1], 3, [1]),
    ],
)
def test_warm_ups(replicas: list[int], depth: int | None, wanted: list[int]) -> None:
    assert warm_ups(replicas, depth) == wanted


def test_minibatch_five_of_figure_9_uses_updates_of_minibatch_one_on_machine_one_and_of_two_on_machine_two() -> None:
    versions = forward_versions("stash", 8, [1, 1, 1, 1])
    assert [each[5 - 1] for each in versions] == [1, 2, 3, 4]  # the paper counts minibatches from 1


@pytest.mark.parametrize(
    ("replicas", "depth"),
    [
        ([1, 1, 1, 1], None),
        ([2, 1], None),
        ([3, 1], None),
        ([2, 1, 1], None),
        ([4, 2, 1], None),
        ([1, 2], None),
        ([1, 3, 2], None),
        ([1, 1, 1], 2),
        ([1, 1, 1, 1], 6),
    ],
)
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_each_version_is_the_newest_at_that_point_of_the_order_of_1f1b_rr(
    replicas: list[int], depth: int | None, groups: int
) -> None:
    """Run every stage's order: K_s forwards, then backward and forward in turn, an update after a group's backwards."""
    minibatches = groups * 12
    versions = forward_versions("stash", minibatches, replicas, depth)
    for s, (r, k) in enumerate(zip(replicas, warm_ups(replicas, depth), strict=True)):
        mine = minibatches // r  # of each replica, which all run the same order
        forwards, backwards, newest = 0, 0, []
        while forwards < mine:
            if forwards - backwards < k:
                newest.append(backwards)  # as many updates as backwards of this replica: it waits for each update
                forwards += 1
            else:
                backwards += 1
        assert versions[s] == [newest[m // r] for m in range(minibatches)]


def test_rows_of_a_minibatch() -> None:
    batch = (tf.range(7), {"b": tf.range(7) * 2})
    assert [rows(batch, m, 3)[0].numpy().tolist() for m in range(3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert rows(batch, 2, 3)[1]["b"].numpy().tolist() == [8, 10, 12]


def test_the_mean_of_sparse_gradients_keeps_their_rows_apart() -> None:
    sparse = [
        tf.IndexedSlices(tf.constant(values, "float64"), tf.constant(indices), tf.constant([3, 1]))
        for values, indices in (([[1.0], [2.0]], [0, 0]), ([[3.0], [5.0]], [0, 2]))
    ]
    found = mean(sparse)
    assert found.indices.numpy().tolist() == [0, 0, 0, 2]
    assert found.values.numpy().tolist() == [[0.5], [1.0], [1.5], [2.5]]
    assert tf.convert_to_tensor(found).numpy().tolist() == [[3.0], [0.0], [2.5]]
    assert mean([None, None]) is None


# --- against a plain loop


def dense_stages(sizes: Sequence[int]) -> tuple[ByHand, Differentiated]:
    """The same dense layers, differentiated by hand and by the tape."""
    random = np.random.default_rng(1)
    layers = [Dense(tf.Variable(random.normal(size=(3, 3)) * 0.5, name=f"w{i}")) for i in range(sum(sizes))]
    stages = [[layers[sum(sizes[:s]) + i] for i in range(size)] for s, size in enumerate(sizes)]

    def loss_fn(x: Any, y: Any) -> Any:
        for layer in layers:
            x = tf.tanh(tf.matmul(x, layer.variable))
        return tf.reduce_mean(tf.reduce_sum(tf.square(x - y), 1))

    return ByHand(stages, squared_error), Differentiated(loss_fn, [[each.variable for each in s] for s in stages])


def data(size: int) -> tuple[Any, Any]:
    random = np.random.default_rng(size)
    return tf.constant(random.normal(size=(size, 3))), tf.constant(random.normal(size=(size, 3)))


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.05, 9)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_with_one_minibatch_in_flight_it_is_a_plain_loop_of_one_optimizer(optimizer: str) -> None:
    _, model = dense_stages([2, 1])
    variables = [v for stage in model.stages for v in stage]
    before = copies(variables)
    plain, losses = OPTIMIZERS[optimizer](), []
    window, later = data(7), data(9)
    batches = [*(rows(window, m, 2) for m in range(2)), data(5), *(rows(later, m, 3) for m in range(3))]
    for x, y in batches:
        with tf.GradientTape() as tape:
            loss = model.loss_fn(x, y)
        plain.apply(tape.gradient(loss, variables), variables)
        losses.append(float(loss))
    wanted = copies(variables)
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)
    reference = Reference(model, OPTIMIZERS[optimizer])
    found = reference.window(window, 2, depth=1).losses
    found += [reference.synchronous_step(data(5)), *reference.window(later, 3, depth=1).losses]
    np.testing.assert_allclose(found, losses, rtol=1e-14)
    for got, want in zip(copies(variables), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-14)
    assert reference.iterations == int(plain.iterations.numpy()) == 6
    plain_slots = [v.numpy() for v in plain.variables if v.shape.rank]
    for got, want in zip(reference.slots().values(), plain_slots, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-14)


def test_derivatives_by_hand_equal_those_of_the_tape() -> None:
    ends, losses = [], []
    for model in dense_stages([2, 1, 1]):
        before = [copies(stage) for stage in model.stages]
        losses.append(Reference(model, OPTIMIZERS["adam"]).window(data(11), 5).losses)
        ends.append([copies(stage) for stage in model.stages])
        assign(model.stages, before)  # the two models have the same variables
    np.testing.assert_allclose(*losses, rtol=1e-13)
    for first, second in zip(*(tf.nest.flatten(end) for end in ends), strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-12)


def test_the_modes_differ_from_each_other_and_from_a_plain_loop() -> None:
    ends = {}
    for name, options in {
        "stash": {},
        "vertical-sync": {"weights": "vertical-sync"},
        "2bw": {"weights": "2bw"},
        "latest": {"weights": "latest"},
        "replicas": {"replicas": [2, 1, 1]},
        "plain": {"depth": 1},
        "depth": {"depth": 5},
    }.items():
        model, _ = dense_stages([2, 1, 1])
        Reference(model, half_sgd).window(data(16), 8, **options)
        ends[name] = np.concatenate([value.ravel() for stage in model.stages for value in copies(stage)])
    for name, end in ends.items():
        for other, value in ends.items():
            assert name == other or np.abs(end - value).max() > 1e-6, (name, other)
