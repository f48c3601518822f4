"""Draws by rows: the micro-batches' draws together are bit by bit the draw of the whole batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.frontend.row_draws import RowDraw
from tests.dapple_tf.frontend.divided_draws import (
    CUTS,
    LAYOUTS,
    Layout,
    assert_rows_are_the_whole_draws,
    draws_of,
    runner,
    samples_of,
    trace,
    with_rows,
)
from tests.dapple_tf.frontend.test_draw_layouts import FLOATS, INTEGERS, LAST

# --- every op, dtype and place of the batch


def keyed(op: str, dtype: str, algorithm: int = 3) -> Callable[[list[Any]], tf.Tensor]:
    def draw(shape: list[Any]) -> tf.Tensor:
        options = {"dtype": tf.as_dtype(dtype)}
        if op == "StatelessRandomUniformIntV2":
            options = {"minval": tf.constant(-9, dtype), "maxval": tf.constant(1_000_003, dtype)}
        key, counter = np.array([77], np.uint64), np.array([LAST - 8, 5], np.uint64)
        return getattr(tf.raw_ops, op)(shape=shape, key=key, counter=counter, alg=algorithm, **options)

    return draw


def seeded(op: str, dtype: str) -> Callable[[list[Any]], tf.Tensor]:
    def draw(shape: list[Any]) -> tf.Tensor:
        options = {"dtype": tf.as_dtype(dtype)}
        if op == "StatelessRandomUniformInt":
            options = {"minval": tf.constant(-9, dtype), "maxval": tf.constant(1_000_003, dtype)}
        if op == "StatelessRandomGammaV2":
            options = {"alpha": tf.constant(0.7, dtype)}
        return getattr(tf.raw_ops, op)(shape=shape, seed=[3, 4], **options)

    return draw


DRAWS = {
    **{f"{op} {t}": keyed(op, t) for op in ("StatelessRandomUniformV2", "StatelessRandomNormalV2") for t in FLOATS},
    **{f"StatelessTruncatedNormalV2 {t}": keyed("StatelessTruncatedNormalV2", t) for t in FLOATS},
    **{f"StatelessRandomUniformFullIntV2 {t}": keyed("StatelessRandomUniformFullIntV2", t) for t in INTEGERS},
    **{f"StatelessRandomUniformIntV2 {t}": keyed("StatelessRandomUniformIntV2", t) for t in ("int32", "int64")},
    **{
        f"{op} {t}": seeded(op, t)
        for op in ("StatelessRandomUniform", "StatelessRandomNormal", "StatelessTruncatedNormal")
        for t in ("float32", "float64")
    },
    **{f"StatelessRandomUniformFullInt {t}": seeded("StatelessRandomUniformFullInt", t) for t in ("int32", "uint64")},
    **{f"StatelessRandomUniformInt {t}": seeded("StatelessRandomUniformInt", t) for t in ("int32", "int64")},
    "StatelessRandomGammaV2 float32": seeded("StatelessRandomGammaV2", "float32"),
}


X = np.zeros((11, 2), np.float32)


def draws_at(draw: Callable[[list[Any]], tf.Tensor], layouts: Sequence[Layout]) -> Callable[[tf.Tensor], Any]:
    return lambda x: [draw(at.shape(samples_of(x))) for at in layouts]


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_micro_batches_draw_what_one_device_draws(draw: Callable[[list[Any]], tf.Tensor]) -> None:
    layouts = [LAYOUTS[name] for name in ("rows of 3 elements", "rows of 8 elements", "time-major")]
    assert_rows_are_the_whole_draws(draws_at(draw, layouts), layouts, X)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", ["StatelessRandomUniformV2 float32", "StatelessTruncatedNormalV2 float64"])
def test_the_batch_may_be_anywhere_in_a_draw(layout: Layout, name: str) -> None:
    assert_rows_are_the_whole_draws(draws_at(DRAWS[name], [layout]), [layout], X)


def test_the_length_of_a_row_may_be_known_only_in_the_run() -> None:
    uniform = keyed("StatelessRandomUniformV2", "float32")

    def function(x: tf.Tensor) -> list[tf.Tensor]:
        lengths, zero = [3, 7, 3], tf.cast(tf.reduce_sum(x), tf.int32)
        ranked = [samples_of(x), *(length + zero for length in lengths)]
        unranked = tf.concat([[samples_of(x)], tf.unique(lengths + zero)[0]], 0)
        return [uniform(ranked), uniform(unranked)]

    graph = assert_rows_are_the_whole_draws(function, [LAYOUTS["rows of 3 elements"]] * 2, X)
    assert [graph.type_of(value).shape.dims for value in graph.outputs] == [(None, None, None, None), None]


def test_shapes_may_be_64_bit_integers() -> None:
    layouts = [LAYOUTS["rows of 3 elements"], LAYOUTS["time-major"]]
    uniform = keyed("StatelessRandomUniformV2", "float32")

    def function(x: Any) -> Any:
        return [uniform(tf.cast(at.shape(samples_of(x)), tf.int64)) for at in layouts]

    assert_rows_are_the_whole_draws(function, layouts, X)


def test_a_micro_batch_may_be_empty() -> None:
    layouts = list(LAYOUTS.values())
    function = draws_at(DRAWS["StatelessRandomUniformV2 float32"], layouts)
    assert_rows_are_the_whole_draws(function, layouts, X, cuts=[(0, 0, 5, 5, 11, 11)])


def test_a_draw_by_an_algorithm_that_only_the_run_knows_is_drawn_whole() -> None:
    def function(x: tf.Tensor) -> list[tf.Tensor]:
        chosen = tf.where(tf.reduce_any(x > 1e9), 2, 1)
        return [keyed("StatelessRandomUniformV2", "float32", chosen)([samples_of(x), 4])]

    graph = assert_rows_are_the_whole_draws(function, [LAYOUTS["rows of 8 elements"]], X)
    assert "TensorScatterUpdate" in {node.op for node in graph.nodes}


@given(data=st.data())
def test_any_shape_division_and_place_of_the_batch(data: st.DataObject) -> None:
    length = st.integers(1, 5)
    before, after = (data.draw(st.lists(length, max_size=2)) for _ in range(2))
    outer, inner = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    layout = Layout(lambda n: [*before, outer * n * inner, *after], len(before), outer, inner)
    samples = data.draw(st.integers(1, 40))
    cut = (0, *sorted(data.draw(st.lists(st.integers(0, samples), max_size=4))), samples)
    draw = DRAWS[data.draw(st.sampled_from(sorted(DRAWS)))]
    assert_rows_are_the_whole_draws(draws_at(draw, [layout]), [layout], np.zeros((samples, 1), np.float32), cuts=[cut])


# --- draws with parameters


def gamma(shape: list[Any], alpha: Any) -> tf.Tensor:
    return tf.random.stateless_gamma(shape, [5, 6], alpha)


def truncated(shape: list[Any], **parameters: Any) -> tf.Tensor:
    own = {"means": 0.0, "stddevs": 1.0, "minvals": -1.0, "maxvals": 2.0, **parameters}
    return tf.random.stateless_parameterized_truncated_normal(shape, [5, 6], *own.values())


ROW = Layout(lambda n: [n], 0)
PARAMETERS: dict[str, tuple[Layout, Callable[[tf.Tensor, Any], tf.Tensor]]] = {
    "gamma, one alpha": (ROW, lambda x, n: gamma([n, 3], 0.4)),
    "gamma, an alpha a column": (ROW, lambda x, n: gamma([n, 3], [0.4, 1.0, 3.0])),
    "gamma, an alpha an element": (ROW, lambda x, n: gamma([n, 3], x)),
    "gamma, an alpha a sample": (ROW, lambda x, n: gamma([n], x[:, 0])),
    "gamma, several draws of each alpha": (Layout(lambda n: [n], 1), lambda x, n: gamma([4, n, 3], x)),
    "gamma, an alpha a row of several": (
        Layout(lambda n: [n], 0, inner=3),
        lambda x, n: gamma([3 * n, 2], tf.reshape(x, [-1])[:, None] * [1.0, 2.0]),
    ),
    "older gamma": (ROW, lambda x, n: tf.raw_ops.StatelessRandomGammaV2(shape=[n, 3], seed=[5, 6], alpha=x)),
    "binomial": (ROW, lambda x, n: tf.random.stateless_binomial([n, 3], [5, 6], 9.0, 0.4)),
    "binomial, rows": (ROW, lambda x, n: tf.random.stateless_binomial([n, 3], [5, 6], 20 * x, 0.4)),
    "binomial, one row for all": (
        ROW,
        lambda x, n: tf.random.stateless_binomial([n, 3], [5, 6], 20 * x, [[0.2, 0.5, 0.7]]),
    ),
    "Poisson": (ROW, lambda x, n: tf.random.stateless_poisson([n, 3], [5, 6], 4.0)),
    "Poisson, time-major rows": (
        Layout(lambda n: [n], 1),
        lambda x, n: tf.random.stateless_poisson([4, n, 3], [5, 6], 30 * x),
    ),
    "truncated normal between limits": (ROW, lambda x, n: truncated([n, 3])),
    "truncated normal, rows": (ROW, lambda x, n: truncated([n, 3], means=x, maxvals=x + 1, minvals=x - 1)),
    "categorical": (ROW, lambda x, n: tf.random.stateless_categorical(tf.math.log(x), 5, [5, 6])),
    "categorical, a draw a sample": (
        Layout(lambda n: [n], 1),
        lambda x, n: tf.random.stateless_categorical([[0.1, 0.7, 0.2], [0.5, 0.2, 0.3]], n, [5, 6]),
    ),
    "categorical, heads": (
        Layout(lambda n: [n], 0, outer=2),
        lambda x, n: tf.random.stateless_categorical(tf.math.log(tf.concat([x, 2 - x], 0)), 2, [5, 6]),
    ),
}


@pytest.mark.parametrize(("layout", "draw"), PARAMETERS.values(), ids=PARAMETERS)
def test_rows_of_parameters_draw_what_they_draw_on_one_device(
    layout: Layout, draw: Callable[[tf.Tensor, Any], tf.Tensor]
) -> None:
    rows = np.random.default_rng(1).uniform(0.2, 1.9, (11, 3)).astype(np.float32)
    assert_rows_are_the_whole_draws(lambda x: [draw(x, samples_of(x))], [layout], rows)


# --- layers of Keras

LAYERS: dict[str, tuple[Callable[[], keras.Layer], tuple[int, ...], int]] = {
    "Dropout": (lambda: keras.layers.Dropout(0.3, seed=1), (6,), 0),
    "Dropout in bfloat16": (lambda: keras.layers.Dropout(0.3, seed=1, dtype="mixed_bfloat16"), (5, 7), 0),
    "Dropout of whole steps": (lambda: keras.layers.Dropout(0.5, noise_shape=(None, None, 1), seed=1), (9, 3), 0),
    "SpatialDropout1D": (lambda: keras.layers.SpatialDropout1D(0.4, seed=1), (5, 7), 0),
    "SpatialDropout2D": (lambda: keras.layers.SpatialDropout2D(0.4, seed=1), (3, 3, 7), 0),
    "GaussianNoise": (lambda: keras.layers.GaussianNoise(0.5, seed=1), (5,), 0),
    "GaussianDropout": (lambda: keras.layers.GaussianDropout(0.5, seed=1), (5,), 0),
    "AlphaDropout": (lambda: keras.layers.AlphaDropout(0.5, seed=1), (5,), 0),
}


@pytest.mark.parametrize(("make", "shape", "axis"), LAYERS.values(), ids=LAYERS)
def test_layers_of_keras_draw_the_masks_of_one_device(
    make: Callable[[], keras.Layer], shape: tuple[int, ...], axis: int
) -> None:
    layer = make()
    x = np.random.default_rng(1).normal(size=(11, *shape)).astype(np.float32)
    layer.build(x.shape)
    state = layer.seed_generator.state
    concrete, graph = trace(lambda x: [layer(x, training=True)], tf.TensorSpec((None, *shape)))
    (node,) = draws_of(graph)
    rewritten = with_rows(graph, [RowDraw(node.name, axis)])
    assert "TensorScatterUpdate" not in {n.op for n in rewritten.nodes}  # rows alone are drawn, not the whole batch's
    run = runner(rewritten, concrete.captured_inputs)
    seed = state.numpy()
    expected = layer(x, training=True).numpy()
    for cut in CUTS:
        pieces = []
        for a, b in itertools.pairwise(cut):
            state.assign(seed)
            pieces += run(np.array([a, b, cut[-1]]), x[a:b])
        assert np.concatenate(pieces).tobytes() == expected.tobytes()
