"""Losses that combine the samples of a batch, with ``batch_loss``: equal to plain training on the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import ExactnessError, LossError, PlanError, ScheduleError
from tests.equality.one_device import TOLERANCE, Problem, compare
from tests.equality.small_models import WIDTH

Tensors = tuple[Any, Any]


def tower(name: str) -> keras.Model:
    layers = [keras.layers.Dense(WIDTH, "tanh", dtype="float64", name=f"{name}_{i}") for i in range(3)]
    return keras.Sequential([keras.Input((WIDTH,), dtype="float64"), *layers], name=name)


def adam() -> Any:
    return keras.optimizers.Adam(0.03)


def problem(loss: Callable[..., Any], *, towers: int = 1, temperature: bool = False) -> Problem:
    """A loss of the outputs for x and for y, by one or two towers; the last argument is a trained temperature."""
    keras.utils.set_random_seed(3)
    models = [tower(f"tower{i}") for i in range(towers)]
    variables: dict[str, Any] = {v.path: v for model in models for v in model.variables}
    extra: list[Any] = []
    if temperature:
        extra = [tf.Variable(0.4, dtype=tf.float64, name="temperature")]
        variables["temperature"] = extra[0]
    return Problem(lambda x, y: loss(models[0](x), models[-1](y), *extra), variables, adam)


def labelled(loss: Callable[..., Any]) -> Problem:
    """A loss of the labels y, which are used as they are, and the outputs for x."""
    keras.utils.set_random_seed(3)
    model = tower("tower")
    return Problem.of_model(model, lambda x, y: loss(y, model(x)), adam)


def cross_entropy(labels: Any, scores: Any) -> Any:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=scores)


def nt_xent(a: Any, b: Any, temperature: Any) -> Any:
    """SimCLR: each view must find the other one among all others."""
    z = tf.concat([tf.math.l2_normalize(a, 1), tf.math.l2_normalize(b, 1)], 0)
    n = tf.shape(a)[0]
    scores = z @ tf.transpose(z) * tf.exp(temperature) - 1e9 * tf.eye(2 * n, dtype=z.dtype)
    return tf.reduce_mean(cross_entropy(tf.concat([tf.range(n, 2 * n), tf.range(n)], 0), scores))


def clip(a: Any, b: Any, temperature: Any) -> Any:
    scores = tf.math.l2_normalize(a, 1) @ tf.transpose(tf.math.l2_normalize(b, 1)) * tf.exp(temperature)
    labels = tf.range(tf.shape(a)[0])
    return tf.reduce_mean(cross_entropy(labels, scores) + cross_entropy(labels, tf.transpose(scores))) / 2


def batch_hard(y: Any, z: Any) -> Any:
    """The farthest sample of the same class against the nearest of another one."""
    same = tf.equal(tf.argmax(y, 1)[:, None] % 2, tf.argmax(y, 1)[None] % 2)
    distances = tf.reduce_sum(tf.square(z[:, None] - z[None]), 2)
    farthest = tf.reduce_max(tf.where(same, distances, tf.zeros_like(distances)), 1)
    nearest = tf.reduce_min(tf.where(same, tf.fill(tf.shape(distances), tf.constant(1e9, z.dtype)), distances), 1)
    return tf.reduce_mean(tf.nn.relu(farthest - nearest + 1.0))


def dice(y: Any, z: Any) -> Any:
    p, wanted = tf.sigmoid(z), tf.cast(y > 0, z.dtype)
    return 1 - (2 * tf.reduce_sum(p * wanted) + 1) / (tf.reduce_sum(p) + tf.reduce_sum(wanted) + 1)


def pearson(y: Any, z: Any) -> Any:
    y, z = y - tf.reduce_mean(y, 0), z - tf.reduce_mean(z, 0)
    return -tf.reduce_mean(tf.reduce_sum(y * z, 0) / tf.norm(y, axis=0) / tf.norm(z, axis=0))


def root_mean_square(y: Any, z: Any) -> Any:
    return tf.sqrt(tf.reduce_mean(tf.square(y - z)))


def softmax_over_batch(y: Any, z: Any) -> Any:
    return tf.reduce_sum(tf.nn.softmax(z, 0) * tf.square(y - z))


PROBLEMS: Mapping[str, Callable[[], Problem]] = {
    "nt_xent": lambda: problem(nt_xent, temperature=True),
    "clip": lambda: problem(clip, towers=2, temperature=True),
    "batch_hard": lambda: labelled(batch_hard),
    "dice": lambda: labelled(dice),
    "pearson": lambda: labelled(pearson),
    "root_mean_square": lambda: labelled(root_mean_square),
    "softmax_over_batch": lambda: labelled(softmax_over_batch),
}
LAYOUTS: tuple[tuple[int, int, list[int] | None], ...] = (
    (1, 1, None),
    (1, 4, None),
    (2, 1, None),
    (2, 3, None),
    (3, 2, None),
    (3, 4, None),
    (1, 2, [2]),
    (2, 2, [1, 2]),
    (2, 3, [2, 1]),
)


def batches(*sizes: int) -> list[Tensors]:
    random = np.random.default_rng(5)

    def random_rows(n: int) -> tf.Tensor:
        return tf.constant(random.normal(size=(n, WIDTH)))

    return [(random_rows(n), random_rows(n)) for n in sizes]


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in PROBLEMS for layout in LAYOUTS])
def test_the_loss_is_that_of_the_whole_batch(name: str, layout: tuple[int, int, list[int] | None]) -> None:
    stages, micro_batches, replicas = layout
    options = {"stages": stages, "micro_batches": micro_batches, "replicas": replicas, "batch_loss": True}
    found = compare(PROBLEMS[name](), batches(11, 11, 9), **options)
    found.check(TOLERANCE["float64"])
    assert not found.model.interface.exactness.reasons
    assert found.step.plan.schedule == "gpipe"


def with_aux(a: Any, b: Any) -> Any:
    scores = a @ tf.transpose(b)
    right = tf.equal(tf.argmax(scores, 1), tf.range(tf.shape(a, tf.int64)[0]))
    aux = {
        "accuracy": tf.reduce_mean(tf.cast(right, a.dtype)),
        "scores": scores,
        "outputs": a,
        "size": tf.shape(a)[0],
        "mean": tf.reduce_mean(b),
    }
    return tf.reduce_mean(cross_entropy(tf.range(tf.shape(a)[0]), scores)), aux


def test_aux_outputs_of_the_whole_batch_and_of_samples() -> None:
    compare(problem(with_aux), batches(10, 7), stages=2, micro_batches=3, batch_loss=True).check(TOLERANCE["float64"])


def test_what_the_loss_writes_about_the_whole_batch_is_written_once() -> None:
    count = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="largest")
    keras.utils.set_random_seed(3)
    model = tower("tower")

    def loss_fn(x: Any, y: Any) -> Any:
        loss = root_mean_square(y, model(x))
        count.assign(0.5 * count + loss)
        return loss

    variables = {v.path: v for v in model.variables} | {"largest": count}
    options = {"stages": 2, "micro_batches": 3, "batch_loss": True}
    compare(Problem(loss_fn, variables, adam), batches(9, 9), **options).check(TOLERANCE["float64"])


def largest_five(y: Any, z: Any) -> Any:
    return tf.reduce_mean(tf.math.top_k(tf.reduce_sum(tf.square(y - z), 1), 5).values)


def test_the_loss_may_need_more_samples_than_a_micro_batch_has() -> None:
    """The largest losses of the batch, and a threshold that the labels have."""

    def above(y: Any, z: Any) -> Any:
        threshold = tf.sort(y[:, 0], direction="DESCENDING")[5]
        return largest_five(y, tf.where(y[:, :1] >= threshold, z, 2 * z))

    for micro_batches in (3, 9):
        found = compare(labelled(above), batches(9, 9), stages=2, micro_batches=micro_batches, batch_loss=True)
        found.check(TOLERANCE["float64"])


def test_micro_batches_of_fewer_samples_than_they_need_are_refused() -> None:
    made = labelled(largest_five)
    options: dict[str, Any] = {"stages": 2, "micro_batches": 3, "inexact": "allow"}
    with pytest.raises(LossError, match="cannot run on a micro-batch of 3 samples"):
        dapple.pipeline(made.loss_fn, optimizer=adam(), **options)(*batches(9)[0])


@pytest.mark.parametrize("options", [{"batch_loss": True}, {"batch_loss": "auto"}, {"replicas": [2, 1]}], ids=str)
def test_a_running_mean_is_written_before_the_loss_reads_it(options: Mapping[str, Any]) -> None:
    """The lengths of paths in StyleGAN's generator, for example."""
    mean = tf.Variable(0.5, dtype=tf.float64, trainable=False, name="mean")
    keras.utils.set_random_seed(3)
    model = tower("tower")

    def loss_fn(x: Any, y: Any) -> Any:
        lengths = tf.norm(y - model(x), axis=1)
        mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(lengths))
        return tf.reduce_mean(tf.square(lengths - mean))

    variables = {v.path: v for v in model.variables} | {"mean": mean}
    wanted: dict[str, Any] = {"stages": 2, "micro_batches": 3, "batch_loss": "auto", **options}
    compare(Problem(loss_fn, variables, adam), batches(9, 8), **wanted).check(TOLERANCE["float64"])


def test_auto_writes_the_running_means_of_layers_once() -> None:
    class Centred(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="mean")

        def call(self, x: Any) -> Any:
            centred = x - self.mean
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x, axis=0))
            return centred

    keras.utils.set_random_seed(3)
    inputs = keras.Input((WIDTH,), dtype="float64")
    hidden = Centred(dtype="float64")(keras.layers.Dense(WIDTH, "tanh", dtype="float64")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(WIDTH, dtype="float64")(hidden))
    wanted = Problem.of_model(model, lambda x, y: tf.reduce_mean(tf.square(y - model(x))), adam)
    compare(wanted, batches(9, 8), stages=2, micro_batches=3, batch_loss="auto").check(TOLERANCE["float64"])


def test_a_lookup_by_repeated_ids_in_the_loss_head_stays_sparse() -> None:
    keras.utils.set_random_seed(3)
    model = tower("tower")
    table = tf.Variable(np.random.default_rng(1).normal(size=(6, WIDTH)), name="table")

    def loss_fn(x: Any, y: Any) -> Any:
        scores = model(x) @ tf.transpose(tf.gather(table, [1, 1, 4]))
        return tf.sqrt(tf.reduce_mean(tf.square(scores))) + root_mean_square(y, model(x))

    variables = {v.path: v for v in model.variables} | {"table": table}
    options = {"stages": 2, "micro_batches": 2, "batch_loss": True}
    compare(Problem(loss_fn, variables, adam), batches(8, 8), **options).check(TOLERANCE["float64"])


@pytest.mark.parametrize("options", [{"recompute": True}, {"schedule": "K=3,3"}, {"batch_loss": "auto"}], ids=str)
def test_other_options(options: Mapping[str, Any]) -> None:
    wanted = {"stages": 2, "micro_batches": 3, "batch_loss": True, **options}
    compare(PROBLEMS["nt_xent"](), batches(8, 8), **wanted).check(TOLERANCE["float64"])


def test_auto_sees_that_breadth_first_runs_all_forwards_before_a_backward() -> None:
    options: dict[str, Any] = {"stages": ["tower_1", "tower_2"], "micro_batches": 3, "schedule": "looped-bfs:v=3"}
    compare(labelled(dice), batches(7, 6), batch_loss="auto", **options).check(TOLERANCE["float64"])


def step_of(name: str, **options: Any) -> Any:
    made = PROBLEMS[name]()
    return dapple.pipeline(made.loss_fn, optimizer=adam(), stages=2, micro_batches=2, **options)


def test_without_it_the_loss_is_refused_and_the_remedy_names_it() -> None:
    with pytest.raises(ExactnessError, match="batch_loss=True"):
        step_of("dice")(*batches(6)[0])


def test_auto_does_not_change_a_schedule_that_was_asked_for() -> None:
    with pytest.raises(ExactnessError, match="batch_loss=True"):
        step_of("dice", batch_loss="auto", schedule="dapple-a")(*batches(6)[0])


def test_a_schedule_that_runs_backward_before_the_loss_is_refused() -> None:
    with pytest.raises(ScheduleError, match="use schedule 'gpipe'"):
        step_of("dice", batch_loss=True, schedule="dapple-a")(*batches(6)[0])


def test_another_value_is_refused() -> None:
    with pytest.raises(PlanError, match=r"batch_loss='yes'.*give False, True or 'auto'"):
        step_of("dice", batch_loss="yes")


def test_auto_leaves_a_mean_over_samples_as_it_is() -> None:
    keras.utils.set_random_seed(3)
    model = tower("tower")
    step = dapple.pipeline(
        lambda x, y: tf.reduce_mean(tf.square(model(x) - y)),
        optimizer=adam(),
        stages=2,
        micro_batches=2,
        batch_loss="auto",
    )
    step(*batches(6)[0])
    assert "loss_head" not in step.text


def test_the_report_says_what_memory_the_whole_batch_takes() -> None:
    step = step_of("nt_xent", batch_loss=True)
    step(*batches(6)[0])
    assert "the loss runs once, on the rows of all micro-batches" in str(step.report)
    assert [stage.predicted.tail > 0 for stage in step.report.stages] == [False, True]


def test_a_loss_of_keras_that_compares_all_samples_equals_one_device() -> None:
    circle = labelled(lambda labels, found: keras.losses.Circle()(labels, tf.math.l2_normalize(found, -1)))
    x, labels = tf.random.stateless_normal([7, WIDTH], [1, 2], dtype=tf.float64), tf.constant([0, 1, 2, 0, 1, 1, 2])
    compare(circle, [(x, labels)], stages=2, micro_batches=3, batch_loss=True).check(1e-6)


@pytest.mark.parametrize("options", [{"stages": 1, "micro_batches": 4}, {"stages": 2, "micro_batches": 3}], ids=str)
def test_rows_of_a_variable_are_kept_after_the_loss_head_has_written_it(options: Mapping[str, Any]) -> None:
    w = tf.Variable(np.random.default_rng(0).normal(size=(4, 4)), name="w")
    largest = tf.Variable(np.random.default_rng(1).normal(size=(3, 4)), trainable=False, name="largest")
    kept = tf.Variable(tf.zeros([8, 4], tf.float64), trainable=False, name="kept")

    def loss_fn(x: Any, y: Any) -> Any:
        z = x @ w
        largest.scatter_nd_update([[0]], tf.reduce_max(tf.stop_gradient(z), 0)[tf.newaxis])
        kept.scatter_nd_update(tf.range(tf.shape(x)[0])[:, tf.newaxis], tf.gather(largest, y))
        return tf.reduce_mean(tf.reduce_logsumexp(tf.matmul(z, z, transpose_b=True), 1))

    random = np.random.default_rng(2)
    batches = [(random.normal(size=(8, 4)), random.integers(0, 3, 8)) for _ in range(2)]
    problem = Problem(loss_fn, {"w": w, "largest": largest, "kept": kept}, lambda: keras.optimizers.SGD(0.1))
    compare(problem, batches, batch_loss=True, **options).check(TOLERANCE["float64"])
