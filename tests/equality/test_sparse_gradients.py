"""Embeddings equal plain Keras, whose optimizers get IndexedSlices with repeated rows: float64, three steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.checkpoint.checkpoints import Checkpoints
from dapple_tf.checkpoint.content import Position
from dapple_tf.errors import PlanError, StepError
from tests.equality.one_device import TOLERANCE, Problem, as_tf, compare, train_on_one_device

WIDTH, ROWS, POSITIONS = 4, 7, 3
optimizers = keras.optimizers

OPTIMIZERS: Mapping[str, Callable[[], Any]] = {
    "SGD": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: optimizers.Adam(0.01),
    "AdamW": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "Adagrad": lambda: optimizers.Adagrad(0.1),
    "RMSprop": lambda: optimizers.RMSprop(0.01),
    "clipnorm": lambda: optimizers.Adam(0.01, clipnorm=0.01),
    "clipvalue": lambda: optimizers.Adam(0.01, clipvalue=0.001),
    "global_clipnorm": lambda: optimizers.Adam(0.01, global_clipnorm=0.01),
}
# Each stage runs the backward of one micro-batch whole, and that of the other in two parts.
MIXED = "0F0 0F1 0I0 0B1 0W0; 1F0 1B0 1F1 1I1 1W1"
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "one stage": {"stages": 1, "micro_batches": 1},
    "2 stages": {"stages": ["dense_0"], "micro_batches": 3, "schedule": "dapple-a"},
    "2:1, zb-h1": {"stages": ["dense_0"], "micro_batches": 2, "replicas": [2, 1], "schedule": "zb-h1"},
    "2:1, mixed": {"stages": ["dense_0"], "micro_batches": 2, "replicas": [2, 1], "schedule": MIXED},
    "2:2": {"stages": ["dense_0"], "micro_batches": 2, "replicas": [2, 2]},
    "3 stages": {"stages": ["dense_0", "dense_1"], "micro_batches": 4, "schedule": "gpipe"},
    "3 stages, recompute": {"stages": ["dense_0", "dense_1"], "micro_batches": 2, "recompute": True},
}


def batches(*sizes: int, arrays: int = 1) -> list[Any]:
    """Batches of ids (``arrays`` arrays of them, each id often) and targets."""
    random = np.random.default_rng(0)
    return [
        (
            *(tf.constant(random.integers(0, 4, size=(n, POSITIONS))) for _ in range(arrays)),
            tf.constant(random.normal(size=(n, WIDTH))),
        )
        for n in sizes
    ]


def keras_model(make_optimizer: Callable[[], Any]) -> Problem:
    keras.utils.set_random_seed(1)
    ids = keras.Input((POSITIONS,), dtype="int64")
    h = keras.layers.Embedding(ROWS, WIDTH, dtype="float64", name="embedding")(ids)
    h = keras.layers.GlobalAveragePooling1D(dtype="float64", name="mean")(h)
    for i in range(3):
        h = keras.layers.Dense(WIDTH, "tanh", dtype="float64", name=f"dense_{i}")(h)
    model = keras.Model(ids, h)

    def loss_fn(x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.reduce_sum(tf.square(model(x) - y), 1))

    return Problem.of_model(model, loss_fn, make_optimizer)


@pytest.mark.parametrize(
    ("optimizer", "layout"), [(optimizer, layout) for optimizer in OPTIMIZERS for layout in LAYOUTS]
)
def test_an_embedding_with_repeated_ids_equals_plain_keras(optimizer: str, layout: str) -> None:
    comparison = compare(keras_model(OPTIMIZERS[optimizer]), batches(7, 7, 5), **LAYOUTS[layout])
    assert [part.variable for part in comparison.model.pass_facts.sparse] == ["embedding/embeddings"]
    assert "ResourceGather" in {node.op for node in comparison.step.graph.function("stage0/forward").graph.nodes}
    comparison.check(TOLERANCE["float64"])


# --- other ways to use rows


def variable(name: str, *shape: int) -> tf.Variable:
    return tf.Variable(np.random.default_rng(len(name)).normal(size=shape), name=name)


def layer(name: str, compute: Callable[..., Any], *tensors: Any) -> Any:
    with tf.name_scope(name):
        return compute(*tensors)


def problem(embed: Callable[..., Any], *, tables: Sequence[str] = ("table",), again: Callable[..., Any] | None = None):
    """Rows looked up by ``embed`` in a first layer, dense layers, and (``again``) in a last one."""
    own = {name: variable(name, ROWS, WIDTH) for name in tables}
    w, v = variable("w", WIDTH, WIDTH), variable("vv", WIDTH, WIDTH)

    def loss_fn(*arguments: Any) -> Any:
        *ids, y = arguments
        h = layer("embed", lambda: embed(*own.values(), *ids))
        h = layer("dense_0", lambda h: tf.tanh(h @ w), h)
        h = layer("dense_1", lambda h: tf.tanh(h @ v), h)
        if again is not None:
            h = layer("again", lambda h: again(h, *own.values(), *ids), h)
        return layer("loss", lambda h: tf.reduce_mean(tf.reduce_sum(tf.square(h - y), 1)), h)

    return Problem(loss_fn, own | {"w": w, "vv": v}, lambda: optimizers.Adam(0.01))


def mean_of_rows(table: Any, ids: Any, *others: Any) -> Any:
    return tf.reduce_mean(tf.gather(table, ids), 1)


def positions(table: Any, position: Any, ids: Any) -> Any:
    """A table of positions, whose rows do not depend on the batch: one device has a gradient of each of them once."""
    return tf.reduce_mean(tf.tanh(tf.gather(table, ids) + tf.gather(position, tf.range(tf.shape(ids)[1]))), 1)


def unique_rows(table: Any, ids: Any) -> Any:
    """Each row is looked up once, whatever the number of samples that use it."""
    unique, place = tf.unique(tf.reshape(ids, [-1]))
    rows = tf.gather(tf.gather(table, unique), place)
    return tf.reduce_mean(tf.reshape(rows, [-1, POSITIONS, WIDTH]), 1)


def masked_rows(table: Any, ids: Any) -> Any:
    """As many rows as there are ids above 1."""
    mask = ids > 1
    rows = tf.gather(table, tf.boolean_mask(ids, mask))
    return tf.reduce_sum(tf.scatter_nd(tf.where(mask), rows, [tf.shape(ids, tf.int64)[0], POSITIONS, WIDTH]), 1)


def sparse_tensor(table: Any, ids: Any) -> Any:
    weights = tf.sparse.from_dense(ids + 1)
    ragged = tf.SparseTensor(weights.indices, weights.values - 1, weights.dense_shape)
    found = tf.nn.embedding_lookup_sparse(table, ragged, None, combiner="mean")
    return tf.reshape(found, [tf.shape(ids)[0], WIDTH])


def two_columns(table: Any, ids: Any, others: Any) -> Any:
    return tf.reduce_mean(tf.gather(table, ids) * tf.tanh(tf.gather(table, others)), 1)


def time_major(table: Any, ids: Any) -> Any:
    return tf.reduce_mean(tf.gather(table, tf.transpose(ids)), 0)


USES: Mapping[str, Callable[[], tuple[Problem, int]]] = {
    "positions": lambda: (problem(positions, tables=("table", "position")), 1),
    "unique rows": lambda: (problem(unique_rows), 1),
    "masked rows": lambda: (problem(masked_rows), 1),
    "a sparse tensor": lambda: (problem(sparse_tensor), 1),
    "two columns, one table": lambda: (problem(two_columns), 2),
    "time-major": lambda: (problem(time_major), 1),
    "two stages, one table": lambda: (
        problem(mean_of_rows, again=lambda h, table, _, ids: tf.tanh(h * mean_of_rows(table, tf.cast(ids, tf.int32)))),
        2,
    ),
    "the same ids in two stages": lambda: (
        problem(mean_of_rows, again=lambda h, table, ids: tf.tanh(h + mean_of_rows(table, ids))),
        1,
    ),
}
MORE_LAYOUTS: Sequence[Mapping[str, Any]] = (
    {"stages": 1, "micro_batches": 3},
    {"stages": ["dense_1"], "micro_batches": 2, "replicas": [2, 1], "schedule": "zb-h1"},
    {"stages": ["dense_1"], "micro_batches": 2, "replicas": [1, 2], "schedule": MIXED},
    {"stages": ["dense_0", "dense_1"], "micro_batches": 2, "replicas": [1, 2, 1], "schedule": "gpipe"},
)


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in USES for layout in MORE_LAYOUTS])
def test_other_uses_of_rows_equal_plain_keras(name: str, layout: Mapping[str, Any]) -> None:
    case, arrays = USES[name]()
    # That these look up samples one by one is not known.
    inexact = "allow" if name in ("unique rows", "a sparse tensor") else "error"
    comparison = compare(case, batches(7, 7, 6, arrays=arrays), inexact=inexact, **layout)
    assert {part.variable for part in comparison.model.pass_facts.sparse} >= {"table"}
    comparison.check(TOLERANCE["float64"])


def test_rows_of_positions_that_two_stages_read_equal_plain_keras() -> None:
    """Both stages run the lookup, and each has a part of the gradient of the one use."""
    table, position, w = variable("table", ROWS, WIDTH), variable("position", POSITIONS, WIDTH), variable("w", 4, 4)

    def loss_fn(ids: Any, y: Any) -> Any:
        rows = tf.gather(position, tf.range(POSITIONS))
        h = layer("embed", lambda: tf.reduce_mean(tf.tanh(tf.gather(table, ids) + rows), 1))
        h = layer("dense_0", lambda h: tf.tanh(h @ w), h)
        h = layer("again", lambda h: tf.tanh(h + tf.reduce_sum(rows, 0)), h)
        return layer("loss", lambda h: tf.reduce_mean(tf.reduce_sum(tf.square(h - y), 1)), h)

    case = Problem(loss_fn, {"table": table, "position": position, "w": w}, lambda: optimizers.Adam(0.01))
    comparison = compare(case, batches(7, 7), stages=["again"], micro_batches=2, replicas=[2, 1])
    assert [part.stage for part in comparison.model.pass_facts.sparse if part.variable == "position"] == [0, 1]
    comparison.check(TOLERANCE["float64"])


def test_rows_up_to_the_longest_sample_equal_plain_keras() -> None:
    """The longest of the whole batch is found once a step, so all micro-batches look up the same rows."""
    table, position, w = variable("table", ROWS, WIDTH), variable("position", POSITIONS, WIDTH), variable("w", 4, 4)

    def loss_fn(ids: Any, lengths: Any, y: Any) -> Any:
        longest = tf.reduce_max(lengths)
        mask = tf.sequence_mask(lengths, longest, y.dtype)[:, :, None]
        rows = tf.gather(table, ids[:, :longest]) + tf.gather(position, tf.range(longest))
        h = layer("embed", lambda: tf.reduce_sum(mask * tf.tanh(rows), 1))
        h = layer("dense_0", lambda h: tf.tanh(h @ w), h)
        return layer("loss", lambda h: tf.reduce_mean(tf.reduce_sum(tf.square(h - y), 1)), h)

    case = Problem(loss_fn, {"table": table, "position": position, "w": w}, lambda: optimizers.Adam(0.01))
    made = [(ids, tf.constant([1, 1, 1, 1, 1, 1, 2]), y) for ids, y in batches(7, 7)]
    comparison = compare(case, made, stages=["dense_0"], micro_batches=3, replicas=[2, 1])
    combine = {part.variable: part.combine for part in comparison.model.pass_facts.sparse}
    assert combine == {"table": "concat", "position": "sum"}
    comparison.check(TOLERANCE["float64"])


def test_an_embedding_that_is_also_the_output_projection_is_dense_and_equals_plain_keras() -> None:
    case = problem(mean_of_rows, again=lambda h, table, ids: (h @ tf.transpose(table)) @ tf.identity(table))
    comparison = compare(case, batches(7, 7), stages=["dense_1"], micro_batches=2, replicas=[1, 2])
    assert comparison.model.pass_facts.sparse == ()
    comparison.check(TOLERANCE["float64"])


def test_a_model_of_embeddings_alone_equals_plain_keras() -> None:
    """No gradient is dense: nothing is accumulated or reduced."""
    first, second = variable("first", ROWS, WIDTH), variable("second", ROWS, WIDTH)

    def loss_fn(ids: Any, y: Any) -> Any:
        h = layer("one", lambda: tf.tanh(mean_of_rows(first, ids)))
        h = layer("two", lambda h: tf.tanh(h * mean_of_rows(second, ids)), h)
        return tf.reduce_mean(tf.reduce_sum(tf.square(h - y), 1))

    for make in (lambda: optimizers.Adam(0.01), lambda: optimizers.Adam(0.01, global_clipnorm=0.01)):
        case = Problem(loss_fn, {"first": first, "second": second}, make)
        compare(case, batches(7, 6), stages=["two"], micro_batches=2, replicas=[2, 1]).check(TOLERANCE["float64"])


@pytest.mark.parametrize(
    ("schedule", "last"),
    [
        ("dapple-a", "backward"),
        ("0F0 0F1 0I0 0B1 0W0; 1F0 1B0 1F1 1B1", "backward"),
        ("0F0 0F1 0B0 0I1 0W1; 1F0 1B0 1F1 1B1", "weights"),
    ],
)
def test_slices_of_a_stage_whose_dense_gradients_are_reduced_in_buckets_equal_plain_keras(
    schedule: str, last: str
) -> None:
    case, batch = keras_model(OPTIMIZERS["Adam"]), batches(7)[0]
    options = {"stages": ["dense_1"], "micro_batches": 2, "replicas": [2, 1]}
    made = dapple.pipeline(case.loss_fn, optimizer=optimizers.SGD(), example_batch=batch, **options).plan
    comparison = compare(case, batches(7, 7), plan=dataclasses.replace(made, schedule=schedule, overlap=True))
    assert f"last_{last}" in comparison.step.text
    comparison.check(TOLERANCE["float64"])


def test_a_checked_step_names_slices_that_are_not_finite() -> None:
    case = problem(mean_of_rows)
    step = dapple.pipeline(case.loss_fn, optimizer=case.make_optimizer(), stages=["dense_1"], micro_batches=2)
    step.check_numerics = True
    ids, y = batches(6)[0]
    step(ids, y)
    before = case.variables["table"].numpy()
    with pytest.raises(StepError, match="not finite"):
        step(ids, y * np.inf)
    np.testing.assert_array_equal(case.variables["table"].numpy(), before)


def test_training_goes_on_from_a_checkpoint_under_another_plan(tmp_path: Path) -> None:
    made = batches(7, 7, 7, 7)
    wanted = train_on_one_device(keras_model(OPTIMIZERS["Adam"]), made)
    losses = []
    for i, layout in enumerate(("2:1, zb-h1", "3 stages")):
        case = keras_model(OPTIMIZERS["Adam"])
        step = dapple.pipeline(case.loss_fn, optimizer=case.make_optimizer(), example_batch=made[0], **LAYOUTS[layout])
        checkpoints = Checkpoints(tmp_path, step)
        if i:
            assert checkpoints.restore() == Position(2, 2)
        losses += [step(*batch).numpy() for batch in made[2 * i : 2 * i + 2]]
        checkpoints.save(2 * i + 2)
    np.testing.assert_allclose(losses, wanted.losses, rtol=1e-12)


# --- the very slices, and other choices


class Recording(keras.optimizers.SGD):
    """Notes the indices and the slices that it gets of a variable."""

    def __init__(self, noted: Sequence[tf.Variable]) -> None:
        super().__init__(0.1)
        self.noted = noted

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate)
        if isinstance(gradient, tf.IndexedSlices):
            self.noted[0].assign(tf.cast(gradient.indices, tf.int64))
            self.noted[1].assign(gradient.values)


@pytest.mark.parametrize(
    ("name", "count"), [("two columns, one table", 2), ("two stages, one table", 2), ("the same ids in two stages", 2)]
)
def test_the_optimizer_gets_the_very_slices_of_one_device_in_the_same_order(name: str, count: int) -> None:
    size = 7
    case, arrays = USES[name]()
    noted = [
        (tf.Variable(np.zeros(count * size * POSITIONS, np.int64)), tf.Variable(np.zeros((count * size * 3, WIDTH))))
        for _ in range(2)
    ]
    (batch,) = batches(size, arrays=arrays)
    variables = [as_tf(v) for v in case.variables.values()]
    before = [v.numpy() for v in variables]

    @tf.function(autograph=False)
    def plain(*arguments: Any) -> None:
        with tf.GradientTape() as tape:
            loss = case.loss_fn(*arguments)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    optimizer = Recording(noted[0])
    optimizer.build(variables)
    plain(*batch)
    for v, value in zip(variables, before, strict=True):
        v.assign(value)
    step = dapple.pipeline(
        case.loss_fn, optimizer=Recording(noted[1]), stages=["dense_1"], replicas=[2, 1], micro_batches=2
    )
    step(*batch)
    np.testing.assert_array_equal(noted[1][0].numpy(), noted[0][0].numpy())
    np.testing.assert_allclose(noted[1][1].numpy(), noted[0][1].numpy(), rtol=1e-12, atol=1e-15)


def test_dense_gradients_can_be_chosen() -> None:
    """Keras's sparse Adam squares each part of a row's gradient separately; a dense one squares their sum."""
    table = tf.Variable(np.ones((3, 2)), name="table")
    dense = tf.Variable(np.eye(2), name="dense")

    def loss_fn(ids: Any) -> Any:
        return tf.reduce_mean(tf.reduce_sum(tf.nn.embedding_lookup(table, ids) @ dense, 1))

    velocities = []
    for choice in ("dense", "exact"):
        adam = optimizers.Adam(0.1)
        step = dapple.pipeline(loss_fn, optimizer=adam, stages=2, micro_batches=2, sparse_gradients=choice)
        step(tf.constant([1, 1, 1, 2]))
        velocities += [v.numpy() for v in adam.variables if v.name.startswith("table") and "velocity" in v.name]
        table.assign(np.ones((3, 2)))
        dense.assign(np.eye(2))
    parts = np.array([[0, 0], [1 / 4, 1 / 4], [1 / 4, 1 / 4]])
    counts = np.array([[0], [3], [1]])
    np.testing.assert_allclose(velocities[0], 0.001 * (counts * parts) ** 2, rtol=1e-6)
    np.testing.assert_allclose(velocities[1], 0.001 * counts * parts**2, rtol=1e-6)


@pytest.mark.parametrize("choice", ["sparse", True, None])
def test_another_choice_is_refused(choice: Any) -> None:
    with pytest.raises(PlanError, match=r"sparse_gradients=.*: give 'exact' \(.*\) or 'dense'"):
        dapple.pipeline(lambda x: x, optimizer=optimizers.SGD(), sparse_gradients=choice)
