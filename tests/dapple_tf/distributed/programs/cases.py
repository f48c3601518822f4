"""Training cases to compare with one device: layouts, and every kind of value that may cross between stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.examples.gpt import gpt
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from dapple_tf.plans import Plan, StagePlan
from tests.dapple_tf.distributed.programs.embedding_cases import clipping_adam, embedding, id_batches
from tests.dapple_tf.distributed.programs.text_cases import (
    batches_of_lengths,
    looked_up,
    of_open_lengths,
    of_ragged_and_sparse,
    ragged_and_sparse_batches,
    word_batches,
)
from tests.dapple_tf.distributed.programs.writing_cases import totals
from tests.equality.one_device import TOLERANCE, Problem

WIDTH = 4
WIDE = 730  # a matrix fills a bucket of gradients by itself
CUTS: Mapping[int, Any] = {1: 1, 2: ["layer2"], 3: ["layer1", "layer3"], 4: ["layer1", "layer2", "layer3"]}
Batches = Sequence[tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """A problem, its batches, and the options of ``dapple.pipeline``.

    ``tolerance``: of relative errors. ``in_turn``: see ``one_device``. ``not_equal``: words in the names of values that
    differ from one device's; with ``equals_one_device = False`` all do. ``unused``: variables of the optimizer that no
    step uses.
    """

    make_problem: Callable[[], Problem]
    batches: Callable[[], Batches]
    options: Mapping[str, Any]
    tolerance: float = TOLERANCE["float64"]
    in_turn: int = 1
    not_equal: tuple[str, ...] = ()
    equals_one_device: bool = True
    unused: frozenset[str] = frozenset()

    @property
    def ranks(self) -> int:
        plan = self.options.get("plan")
        return sum(self.options["replicas"]) if plan is None else plan.device_count


def layout(*replicas: int, micro_batches: int | Sequence[float] = 2, **more: Any) -> dict[str, Any]:
    """Return options of ``dapple.pipeline``; a chain is cut so that every stage has a matrix of its own."""
    return {"stages": CUTS[len(replicas)], "replicas": list(replicas), "micro_batches": micro_batches, **more}


def shared(schedule: str, *replicas: int, micro_batches: int = 2, stages: int = 4, **more: Any) -> dict[str, Any]:
    """Return options under which each rank runs several stages; ``replicas``: of each worker."""
    return layout(*replicas, micro_batches=micro_batches, schedule=schedule, **{"stages": CUTS[stages], **more})


SHARDED: Mapping[str, Any] = {"shard_optimizer": True}
V_SHAPED = "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1; 1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1"
WITH_WEIGHTS = "0F0 2F0 2B0 2W0 0B0 0W0; 1F0 3F0 3B0 3W0 1B0 1W0"


def overlapped(
    *replicas: int,
    micro_batches: int,
    ends: Sequence[int],
    samples: int = 11,
    schedule: str = "dapple-a",
    recompute: bool | tuple[int, ...] = False,
) -> dict[str, Any]:
    """Return the option of a plan whose stages end with these layers, and overlap AllReduce with the last backward.

    ``replicas``: of each worker of the ``schedule``.
    """
    starts = (0, *(end + 1 for end in ends))
    count = itertools.count()
    devices = [tuple(itertools.islice(count, r)) for r in replicas]
    stages = tuple(
        StagePlan(first, last, devices[worker])
        for first, last, worker in zip(
            starts, ends, ScheduleSpec.parse(schedule).worker_map(len(ends)).worker_of, strict=False
        )
    )
    size = -(-samples // micro_batches)
    plan = Plan("chain", "by hand", samples, size, micro_batches, schedule, recompute, stages, overlap=True)
    return {"plan": plan}


def with_shares(options: dict[str, Any], *shares: tuple[float, ...] | None) -> dict[str, Any]:
    """Return the option of the same plan whose stages share rows so."""
    stages = zip(options["plan"].stages, shares, strict=True)
    return {"plan": replace(options["plan"], stages=tuple(replace(stage, shares=own) for stage, own in stages))}


def batches(sizes: Sequence[int] = (11, 11, 11), dtype: str = "float64", width: int = WIDTH) -> Callable[[], Batches]:
    """Return a function that makes a batch of inputs x and targets y of each size."""

    def make() -> Batches:
        random = np.random.default_rng(1)
        return [tuple(tf.constant(random.normal(size=(n, width)), dtype) for _ in range(2)) for n in sizes]

    return make


def overflowing() -> Batches:
    """Six batches; an input of the third is infinite: only the gradient of the first matrix is not finite then."""
    made = batches([11] * 6)()
    x = made[2][0].numpy()
    x[4, 1] = np.inf
    return [*made[:2], (tf.constant(x), made[2][1]), *made[3:]]


# --- optimizers


def adam() -> Any:
    return keras.optimizers.Adam(0.01, global_clipnorm=0.5)  # small enough to clip


def plain_adam() -> Any:
    return keras.optimizers.Adam(0.01)


def momentum() -> Any:
    schedule = keras.optimizers.schedules.CosineDecay(0.02, 5, warmup_steps=2, warmup_target=0.05)
    return keras.optimizers.SGD(schedule, momentum=0.9)


def loss_scaling() -> Any:
    return keras.optimizers.LossScaleOptimizer(adam(), dynamic_growth_steps=2)


# A LossScaleOptimizer has a step counter and a learning rate besides those of the optimizer inside.
OUTER = frozenset({"slot iteration", "slot learning_rate"})


def accumulating() -> Any:
    """Every condition that Keras's optimizers have but that of a scaled loss."""
    averages = {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 2}
    return keras.optimizers.Adam(0.01, global_clipnorm=0.5, gradient_accumulation_steps=2, **averages)


def all_conditions() -> Any:
    return keras.optimizers.LossScaleOptimizer(accumulating(), dynamic_growth_steps=2)


# --- chains of dense layers, with tied weights, skip connections and auxiliary outputs


@dataclass(frozen=True)
class Chain:
    """``layers`` matrices; ``tied`` gives a layer the matrix of another, ``skips`` adds what entered another to it.

    ``aux``: the loss function returns auxiliary outputs too. ``regularized``: the loss has a term for every matrix.
    """

    layers: int = 4
    dtype: str = "float64"
    tied: Mapping[int, int] = field(default_factory=dict)
    skips: Mapping[int, int] = field(default_factory=dict)
    aux: bool = False
    regularized: bool = False
    make_optimizer: Callable[[], Any] = adam
    width: int = WIDTH

    def __call__(self) -> Problem:
        random = np.random.default_rng(0)
        owners = sorted({self.tied.get(i, i) for i in range(self.layers)})
        matrices = {
            i: tf.Variable(random.normal(size=(self.width,) * 2) / self.width**0.5, dtype=self.dtype, name=f"w{i}")
            for i in owners
        }

        def loss_fn(x: Any, y: Any) -> Any:
            entered = []
            h = x
            for i in range(self.layers):
                with tf.name_scope(f"layer{i}"):
                    entered.append(h)
                    h = tf.tanh(h @ matrices[self.tied.get(i, i)])
                    if i in self.skips:
                        h += entered[self.skips[i]]
                    if i == 0:
                        early = tf.reduce_sum(h, 1)
            loss = tf.reduce_mean(tf.reduce_sum(tf.square(h - y), 1))
            if self.regularized:
                loss += tf.add_n([0.1 * tf.nn.l2_loss(matrix) for matrix in matrices.values()])
            if not self.aux:
                return loss
            positive = tf.reduce_sum(tf.cast(y > 0, tf.int32))
            return loss, {"predictions": h, "early": early, "mean": tf.reduce_mean(h), "positive": positive}

        return Problem(loss_fn, {f"w{i}": matrix for i, matrix in matrices.items()}, self.make_optimizer)


def gradient_that_is_a_constant() -> Problem:
    """The only gradient of its dtype is always zero: TensorFlow can compute it while it optimizes the graph."""
    random = np.random.default_rng(0)
    w = tf.Variable(random.normal(size=(WIDTH, WIDTH)), name="w")
    idle = tf.Variable(random.normal(size=(WIDTH, WIDTH)), dtype=tf.float32, name="idle")

    def ignore(value: Any) -> Any:
        return tf.reduce_sum(value) * 0, lambda upstream: tf.zeros(value.shape, value.dtype)

    def loss_fn(x: Any, y: Any) -> Any:
        with tf.name_scope("first"):
            h = x @ w
        return tf.reduce_mean(tf.reduce_sum(tf.square(h - y), 1)) + tf.cast(tf.custom_gradient(ignore)(idle), h.dtype)

    return Problem(loss_fn, {"w": w, "idle": idle}, momentum)


def weights_of_odd_sizes() -> Problem:
    """Weights with a prime number of elements, one element, and none, of two dtypes; gradients are sums of products."""
    random = np.random.default_rng(0)
    shapes = {"w": (WIDTH, 257), "v": (257, WIDTH), "bias": (257,), "scale": (), "shift": (1,), "nothing": (0, 3)}
    weights = {name: tf.Variable(random.normal(size=shape) * 0.3, name=name) for name, shape in shapes.items()}
    single = {"gain": tf.Variable(random.normal(size=[3]), dtype=tf.float32, name="gain")}

    def loss_fn(x: Any, y: Any) -> Any:
        h = tf.tanh(x @ weights["w"] + weights["bias"]) @ weights["v"]
        h = h * weights["scale"] + weights["shift"] + tf.reduce_sum(weights["nothing"])
        h += tf.cast(tf.reduce_sum(tf.square(single["gain"])), h.dtype) * x
        return tf.reduce_mean(tf.reduce_sum(tf.square(h - y), 1))

    return Problem(loss_fn, {**weights, **single}, lambda: keras.optimizers.SGD(0.01, momentum=0.9))


def integers_and_booleans() -> Problem:
    """Indices and a mask cross: computed in the first layer, they select values in the last."""
    random = np.random.default_rng(0)
    w, table = (tf.Variable(random.normal(size=(WIDTH, WIDTH)), name=name) for name in ("w", "table"))

    def loss_fn(x: Any, y: Any) -> Any:
        with tf.name_scope("first"):
            h = tf.tanh(x @ w)
            best, mask, small = tf.argmax(h, 1), h > 0.1, tf.cast(h * 100, tf.int8)
        with tf.name_scope("second"):
            rows = tf.gather(table, best)
            chosen = tf.where(mask, h * rows, h - rows) + tf.cast(small, h.dtype) * 0.01
            return tf.reduce_mean(tf.reduce_sum(tf.square(chosen - y), 1))

    return Problem(loss_fn, {"w": w, "table": table}, adam)


def as_type(dtype: str) -> Callable[[], Problem]:
    """The activation crosses as ``dtype``, and its gradient returns in the same dtype."""

    def make() -> Problem:
        random = np.random.default_rng(0)
        w, v = (tf.Variable(random.normal(size=(WIDTH, WIDTH)), name=name) for name in ("w", "v"))

        def loss_fn(x: Any, y: Any) -> Any:
            with tf.name_scope("first"):
                h = tf.cast(tf.tanh(x @ w), dtype)
            with tf.name_scope("second"):
                h = tf.math.real(h) if h.dtype.is_complex else h
                return tf.reduce_mean(tf.reduce_sum(tf.square(tf.cast(h, tf.float64) @ v - y), 1))

        return Problem(loss_fn, {"w": w, "v": v}, adam)

    return make


def of_type(dtype: str) -> Callable[[], Problem]:
    """Weights and their gradients have ``dtype``, in both halves; the loss is float64."""

    def make() -> Problem:
        random = np.random.default_rng(0)
        values = [random.normal(size=(WIDTH, WIDTH)) * 0.5 + 0.3j * random.normal(size=(WIDTH, WIDTH)) for _ in "wv"]
        complex_ = tf.as_dtype(dtype).is_complex
        w, v = (tf.Variable(tf.cast(value if complex_ else value.real, dtype)) for value in values)

        def loss_fn(x: Any, y: Any) -> Any:
            with tf.name_scope("first"):
                h = tf.cast(x, dtype) @ w
            with tf.name_scope("second"):
                h = h @ v
                parts = (tf.math.real(h), tf.math.imag(h)) if complex_ else (h,)
                total = tf.add_n([tf.square(tf.cast(part, tf.float64) - y) for part in parts])
                return tf.reduce_mean(tf.reduce_sum(total, 1))

        return Problem(loss_fn, {"w": w, "v": v}, lambda: keras.optimizers.SGD(0.1))

    return make


def cut_to_the_longest() -> Problem:
    """Sequences cut to the longest of their micro-batch cross: both axes are unknown, and differ."""
    random = np.random.default_rng(0)
    w, v = (tf.Variable(random.normal(size=(1, 1)), name=name) for name in ("w", "v"))

    def loss_fn(x: Any, y: Any, lengths: Any) -> Any:
        with tf.name_scope("first"):
            longest = tf.reduce_max(lengths)
            mask = tf.sequence_mask(lengths, longest, x.dtype)
            h = tf.tanh(x[:, :longest] * w) * mask
        with tf.name_scope("second"):
            return tf.reduce_mean(tf.square(tf.reduce_sum(tf.tanh(h * v) * mask, 1) - y[:, 0]))

    return Problem(loss_fn, {"w": w, "v": v}, adam)


def with_lengths() -> Batches:
    lengths = [[1, 2, 1, 2, 3, 6, 4, 5], [6, 5, 4, 3, 1, 1, 1, 1]]
    made = batches((8, 8), width=6)()
    return [(*batch, tf.constant(length)) for batch, length in zip(made, lengths, strict=True)]


def nothing_in_a_row() -> Problem:
    """A tensor without columns crosses beside another: its bytes do not tell its number of rows."""
    w = tf.Variable(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)), name="w")

    def loss_fn(x: Any, y: Any) -> Any:
        with tf.name_scope("first"):
            h = tf.tanh(x @ w)
            none = tf.cast(h[:, :0], tf.float32)
        with tf.name_scope("second"):
            wide = tf.cast(tf.reduce_sum(none, 1), h.dtype)
            return tf.reduce_mean(tf.reduce_sum(tf.square(h - y), 1) + wide)

    return Problem(loss_fn, {"w": w}, adam)


# --- Keras layers with state


class Unchanged(keras.layers.Layer):
    """Returns its inputs, which then depend on a trained variable."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(name="scale")

    def call(self, inputs: Any) -> Any:
        return inputs + 0.0 * self.scale


def normalized() -> Problem:
    """Batch norm in both halves, behind weights: statistics of the arguments would be the whole batch's."""
    keras.utils.set_random_seed(5)
    layers = keras.layers
    made = [
        Unchanged(dtype="float64"),
        layers.BatchNormalization(momentum=0.5, dtype="float64", name="first"),
        layers.Dense(WIDTH, "tanh", dtype="float64", name="dense_0"),
        layers.Dense(WIDTH, "tanh", dtype="float64", name="dense_1"),
        layers.BatchNormalization(momentum=0.9, dtype="float64", name="last"),
        layers.Dense(WIDTH, dtype="float64", name="dense_2"),
    ]
    return _squares(keras.Sequential([keras.Input((WIDTH,), dtype="float64"), *made]))


def mixed() -> Problem:
    """Layers in float16, whose scale doubles every step until gradients overflow, and around that from then on."""
    keras.utils.set_random_seed(5)
    made = [keras.layers.Dense(WIDTH, "tanh", dtype="mixed_float16", name=f"dense_{i}") for i in range(3)]
    model = keras.Sequential([keras.Input((WIDTH,)), *made])

    def loss_fn(x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.reduce_sum(tf.square(tf.cast(model(x), tf.float32) - y), 1))

    def make_optimizer() -> Any:
        inner = keras.optimizers.SGD(0.05, momentum=0.9)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**13, dynamic_growth_steps=1)

    return Problem.of_model(model, loss_fn, make_optimizer)


def dropped() -> Problem:
    """Dropout in both halves; its seeds are state variables."""
    keras.utils.set_random_seed(5)
    layers = keras.layers
    drops = [layers.Dropout(0.5, seed=i, dtype="float64", name=f"drop_{i}") for i in range(2)]
    dense = [layers.Dense(WIDTH, "tanh", dtype="float64", name=f"dense_{i}") for i in range(3)]
    order = itertools.chain(*itertools.zip_longest(dense, drops))
    model = keras.Sequential([keras.Input((WIDTH,), dtype="float64"), *(layer for layer in order if layer)])
    problem = _squares(model)
    seeds = {f"seed of {drop.name}": drop.seed_generator.state for drop in drops}
    return Problem(problem.loss_fn, {**problem.variables, **seeds}, adam)


def recurrent() -> Problem:
    """A GRU, which is a loop: the names of its parts depend on what the process has traced before."""
    keras.utils.set_random_seed(3)
    layers = keras.layers
    made = [
        layers.Dense(WIDTH, "tanh", dtype="float64", name="dense_0"),
        layers.RepeatVector(3, dtype="float64"),
        layers.GRU(WIDTH, dtype="float64", name="gru"),
        layers.Dense(WIDTH, dtype="float64", name="dense_1"),
    ]
    problem = _squares(keras.Sequential([keras.Input((WIDTH,), dtype="float64"), *made]))
    # Without the seed of the GRU's dropout, which is off.
    return Problem(problem.loss_fn, {name: v for name, v in problem.variables.items() if v.trainable}, adam)


def _squares(model: keras.Model) -> Problem:
    def loss_fn(x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.reduce_sum(tf.square(model(x, training=True) - y), 1))

    return Problem.of_model(model, loss_fn, adam)


# --- a GPT


def _small_gpt() -> Any:
    return gpt(layers=2, width=16, heads=2, context=12, batch_size=6, tied=True, dtype="float64")


def gpt_problem() -> Problem:
    workload = _small_gpt()
    cells = [cell.cell_contents for cell in workload.loss_fn.__closure__]
    (model,) = [content for content in cells if isinstance(content, keras.Model)]
    return Problem.of_model(model, workload.loss_fn, lambda: keras.optimizers.Adam(1e-3))


def gpt_batches(steps: int) -> Callable[[], Batches]:
    return lambda: [tuple(batch) for batch in _small_gpt().dataset.repeat().take(steps)]


FLOAT32 = TOLERANCE["float32"]
# Tolerances of weights, from their machine epsilon: each micro-batch's gradient is rounded, then their sum.
WEIGHTS = {"bfloat16": 2**-6, "float16": 2**-9, "complex64": FLOAT32, "complex128": TOLERANCE["float64"]}
EVEN = (8, 8, 8)
LAYOUTS = [(1, 1), (2,), (2, 1), (1, 2), (1, 1, 1), (2, 2), (3, 1), (1, 2, 1), (1, 1, 1, 1), (4,)]


def _name(replicas: Sequence[int]) -> str:
    return (
        "straight 4" if replicas == (1, 1, 1, 1) else f"DP {replicas[0]}" if len(replicas) == 1 else _colons(replicas)
    )


def _colons(replicas: Sequence[int]) -> str:
    return ":".join(map(str, replicas))


CASES: dict[str, Case] = {
    **{f"{_name(r)} float64": Case(Chain(), batches(), layout(*r)) for r in LAYOUTS},
    **{
        f"{_name(r)} float32": Case(Chain(dtype="float32"), batches(dtype="float32"), layout(*r), FLOAT32)
        for r in LAYOUTS
    },
    "a lookup table, 1:1:1": Case(
        looked_up, word_batches, {"stages": ["second", "third"], "replicas": [1, 1, 1], "micro_batches": 3}
    ),
    "a lookup table, 1:2": Case(
        looked_up, word_batches, {"stages": ["second"], "replicas": [1, 2], "micro_batches": 3}
    ),
    **{
        f"lengths left open, {_colons(r)}": Case(
            of_open_lengths, batches_of_lengths, {"stages": ["second"], "replicas": list(r), "micro_batches": 2}
        )
        for r in ((1, 1), (2, 1))
    },
    "ragged and sparse, 1:1": Case(
        of_ragged_and_sparse, ragged_and_sparse_batches, {"stages": ["second"], "replicas": [1, 1], "micro_batches": 2}
    ),
    "one micro-batch": Case(Chain(), batches(), layout(1, 1, micro_batches=1)),
    "gpipe": Case(Chain(), batches(), layout(1, 1, micro_batches=4, schedule="gpipe")),
    "dapple-b": Case(Chain(), batches(), layout(1, 1, 1, micro_batches=5, schedule="dapple-b")),
    "momentum, scheduled": Case(Chain(make_optimizer=momentum), batches([11] * 6), layout(1, 1)),
    "momentum, scheduled, replicated": Case(Chain(make_optimizer=momentum), batches([11] * 6), layout(1, 2)),
    "a batch that nothing divides": Case(Chain(), batches((13, 13)), layout(1, 2, micro_batches=3)),
    "a short last batch": Case(Chain(), batches((12, 12, 5, 2, 12)), layout(2, 1, micro_batches=3)),
    "a last batch of one": Case(Chain(), batches((12, 1, 12)), layout(1, 1, micro_batches=3)),
    **{
        f"DP 2, overlap, M = {m}": Case(
            Chain(width=WIDE), batches(width=WIDE), overlapped(2, micro_batches=m, ends=[11])
        )
        for m in (1, 4)
    },
    "a gradient that is a constant, overlap": Case(
        gradient_that_is_a_constant, batches(), overlapped(2, micro_batches=1, ends=[5])
    ),
    **{f"weights of odd sizes, DP {r}": Case(weights_of_odd_sizes, batches(), layout(r), FLOAT32) for r in (2, 3)},
    "2:1, overlap": Case(Chain(width=WIDE), batches(width=WIDE), overlapped(2, 1, micro_batches=3, ends=[3, 11])),
    "tied, overlap": Case(
        Chain(width=WIDE, tied={3: 0}), batches(width=WIDE), overlapped(1, 2, micro_batches=3, ends=[3, 11])
    ),
    "1:1:1, zb-h1": Case(Chain(skips={3: 0}), batches(), layout(1, 1, 1, micro_batches=4, schedule="zb-h1")),
    "2:1, overlap, zb-h1": Case(
        Chain(width=WIDE, tied={3: 0}),
        batches(width=WIDE),
        overlapped(2, 1, micro_batches=3, ends=[3, 11], schedule="zb-h1"),
    ),
    "tied": Case(Chain(tied={3: 0}), batches(), layout(1, 1)),
    "tied, owner replicated": Case(Chain(tied={3: 0}), batches(), layout(2, 1)),
    "tied, user replicated": Case(
        Chain(tied={3: 0}), batches(), layout(1, 2, stages=["layer3"])
    ),  # which has no other variable
    "tied, both replicated": Case(Chain(tied={3: 0}), batches(), layout(2, 2)),
    "tied over three stages": Case(Chain(tied={2: 0, 3: 0}), batches(), layout(1, 1, 1)),
    "skips": Case(Chain(skips={1: 0, 3: 0}), batches(), layout(1, 1, 1)),
    "skips over two stages": Case(Chain(skips={3: 1, 2: 0}), batches(), layout(1, 2, 1)),
    "skips, tied": Case(Chain(skips={3: 0}, tied={2: 0}), batches(), layout(1, 1, 1, 1, micro_batches=4)),
    "compiled, 1:1": Case(Chain(skips={3: 0}), batches(), layout(1, 1, jit_compile=True)),
    "loss scaling": Case(Chain(make_optimizer=loss_scaling), overflowing, layout(1, 1), unused=OUTER),
    "given sizes": Case(Chain(skips={3: 0}), batches((11, 11, 7)), layout(1, 1, micro_batches=[2, 3, 6])),
    "given sizes, 2:1": Case(Chain(), batches((11, 11, 7)), layout(2, 1, micro_batches=[0.2, 0.2, 0.6])),
    "sliced": Case(Chain(skips={3: 0}), batches((12, 11, 7)), layout(1, 1, 1, micro_batches=4, slice=2)),
    "sliced, 1:2:1": Case(Chain(), batches((16, 13, 5)), layout(1, 2, 1, micro_batches=3, slice=3)),
    "loss scaling, 2:1": Case(Chain(tied={3: 0}, make_optimizer=loss_scaling), overflowing, layout(2, 1), unused=OUTER),
    "loss scaling, 1:2:1": Case(Chain(make_optimizer=loss_scaling), overflowing, layout(1, 2, 1), unused=OUTER),
    "loss scaling, DP 2": Case(Chain(make_optimizer=loss_scaling), overflowing, layout(2), unused=OUTER),
    "mixed_float16, 2:1": Case(
        mixed, batches([12] * 9, "float32"), layout(2, 1, stages=["dense_1"]), tolerance=2e-2, unused=OUTER
    ),
    "accumulation and averages": Case(Chain(make_optimizer=accumulating), batches([11] * 6), layout(1, 1)),
    "accumulation and averages, 1:2": Case(Chain(make_optimizer=accumulating), batches([11] * 6), layout(1, 2)),
    "every condition": Case(Chain(make_optimizer=all_conditions), overflowing, layout(1, 1, 1), unused=OUTER),
    "embedding, loss scaling": Case(
        embedding(again=True, make_optimizer=loss_scaling),
        id_batches,
        layout(1, 1, stages=["dense_1"]),
        unused=OUTER,
    ),
    "aux": Case(Chain(aux=True), batches(), layout(1, 1)),
    "aux, replicated": Case(Chain(aux=True), batches(), layout(2, 1)),
    "sums written by replicas": Case(lambda: totals(adam), batches(), layout(2, stages=1)),
    "aux, DP": Case(Chain(aux=True), batches(EVEN), layout(2)),
    "regularized": Case(Chain(regularized=True), batches(), layout(1, 1)),
    "regularized, 2:1": Case(Chain(regularized=True), batches(), layout(2, 1)),
    "regularized, 1:2:1": Case(Chain(regularized=True, skips={3: 0}), batches(), layout(1, 2, 1)),
    "integers and booleans": Case(integers_and_booleans, batches(), layout(1, 1, stages=["second"])),
    "integers and booleans, split": Case(integers_and_booleans, batches(), layout(1, 2, stages=["second"])),
    "integers and booleans, joined": Case(integers_and_booleans, batches(), layout(2, 1, stages=["second"])),
    **{
        f"{kind} crosses": Case(as_type(kind), batches(EVEN), layout(1, 1, stages=["second"]))
        for kind in ("bfloat16", "float16", "complex64", "complex128")
    },
    **{
        f"{kind} weights, {_colons(r)}": Case(of_type(kind), batches(EVEN), layout(*r, **cut), tolerance)
        for r, cut in (((2,), {}), ((2, 1), {"stages": ["second"]}))
        for kind, tolerance in WEIGHTS.items()
    },
    "sharded, DP 2": Case(Chain(make_optimizer=plain_adam), batches(), layout(2, **SHARDED)),
    "sharded, DP 2, global norm": Case(Chain(), batches(), layout(2, **SHARDED)),
    "sharded, DP 2, overlap": Case(
        Chain(width=WIDE), batches(width=WIDE), {**overlapped(2, micro_batches=3, ends=[11]), **SHARDED}
    ),
    "sharded, odd sizes, DP 2": Case(weights_of_odd_sizes, batches(), layout(2, **SHARDED), FLOAT32),
    "sharded, embedding, DP 2": Case(
        embedding(again=True, make_optimizer=clipping_adam), id_batches, layout(2, stages=1, **SHARDED)
    ),
    "sharded, batch norm, DP 2": Case(
        normalized, batches((12, 7, 12)), layout(2, batch_norm="sync", **SHARDED), in_turn=2
    ),
    "sharded, 2:1": Case(Chain(tied={3: 0}, aux=True), batches(), layout(2, 1, **SHARDED)),
    "sharded, 1:2, tied": Case(Chain(tied={3: 0}), batches(), layout(1, 2, **SHARDED)),
    "sharded, DP 3, a constant": Case(weights_of_odd_sizes, batches(), layout(3, **SHARDED), FLOAT32),
    "sharded, 2:2, tied": Case(Chain(tied={3: 0}, regularized=True), batches(), layout(2, 2, **SHARDED)),
    "sharded, interleaved": Case(Chain(tied={3: 0}), batches(), shared("interleaved-1f1b", 2, 2, **SHARDED)),
    "sharded, every condition, 2:2": Case(
        Chain(make_optimizer=all_conditions), overflowing, layout(2, 2, **SHARDED), unused=OUTER
    ),
    "sharded, mixed_float16, 2:1": Case(
        mixed, batches([12] * 9, "float32"), layout(2, 1, stages=["dense_1"], **SHARDED), tolerance=2e-2, unused=OUTER
    ),
    "two unknown axes": Case(cut_to_the_longest, with_lengths, layout(1, 1, stages=["second"])),
    "two unknown axes, replicated": Case(cut_to_the_longest, with_lengths, layout(2, 2, stages=["second"])),
    "nothing in a row": Case(nothing_in_a_row, batches(), layout(1, 1, stages=["second"])),
    "batch norm": Case(normalized, batches(EVEN), layout(1, 1, stages=["dense_1"]), in_turn=2),
    "batch norm, replicated": Case(
        # Two samples would be normalized to plus and minus the same, and biases would have no gradient but rounding.
        normalized,
        batches((12, 12, 12)),
        layout(2, 2, stages=["dense_1"]),
        in_turn=4,
        not_equal=("moving",),
    ),
    "batch norm, deferred, replicated": Case(
        normalized, batches((12, 12, 12)), layout(2, batch_norm="deferred"), in_turn=4, not_equal=("moving",)
    ),
    "batch norm, sync, DP": Case(normalized, batches((12, 7, 12)), layout(2, batch_norm="sync"), in_turn=2),
    "batch norm, sync, 1:2": Case(
        normalized, batches(), layout(1, 2, stages=["dense_1"], batch_norm="sync", micro_batches=3), in_turn=3
    ),
    "batch norm, sync, 2:2, recompute": Case(
        normalized,
        batches((13, 13)),
        layout(2, 2, stages=["dense_1"], batch_norm="sync", recompute=True, schedule="gpipe"),
        in_turn=2,
    ),
    "batch norm, sync, DP 4, zb-h1": Case(
        normalized, batches((9, 16)), layout(4, batch_norm="sync", schedule="zb-h1", micro_batches=1)
    ),
    "a GRU": Case(recurrent, batches(EVEN), layout(1, 1, stages=["gru"])),
    "dropout": Case(dropped, batches(EVEN), layout(1, 1, stages=["dense_1"])),
    "dropout, replicated": Case(dropped, batches(EVEN), layout(1, 2, stages=["dense_1"]), equals_one_device=False),
    "dropout, recompute": Case(
        dropped, batches(EVEN), layout(1, 1, stages=["dense_1"], recompute=["dense_0", "drop_0", "drop_1"])
    ),
    "batch norm, recompute": Case(
        normalized, batches(EVEN), layout(1, 1, stages=["dense_1"], recompute=True), in_turn=2
    ),
    "2:1, overlap, recompute": Case(
        Chain(width=WIDE),
        batches(width=WIDE),
        overlapped(2, 1, micro_batches=3, ends=[3, 11], recompute=(0, 1, 2, 3, 6, 7)),
    ),
    "embedding, DP": Case(embedding(), id_batches, layout(2, micro_batches=3)),
    "embedding, zb-h1": Case(
        embedding(make_optimizer=clipping_adam), id_batches, layout(1, 1, stages=["dense_1"], schedule="zb-h1")
    ),
    "embedding in two stages, 2:1": Case(embedding(again=True), id_batches, layout(2, 1, stages=["again"])),
    "embedding in two stages, 1:2, clipped": Case(
        embedding(again=True, make_optimizer=clipping_adam), id_batches, layout(1, 2, stages=["dense_1"])
    ),
    "embedding in two stages, 2:2, gpipe": Case(
        embedding(again=True), id_batches, layout(2, 2, stages=["dense_0"], schedule="gpipe")
    ),
    "interleaved": Case(
        Chain(tied={3: 0}, skips={3: 0}), batches((11, 11, 5)), shared("interleaved-1f1b:v=2", 1, 1, micro_batches=4)
    ),
    "interleaved, 2:2": Case(
        Chain(tied={3: 0}), batches((12, 12, 5)), shared("interleaved-1f1b:v=2", 2, 2, micro_batches=3)
    ),
    "interleaved, 2:1": Case(Chain(skips={3: 0}), batches(), shared("interleaved-1f1b:v=2", 2, 1, micro_batches=3)),
    "interleaved, DP 2": Case(Chain(tied={3: 0}), batches(), shared("interleaved-1f1b:v=4", 2)),
    "looped, 2:2, loss scaling": Case(
        Chain(make_optimizer=loss_scaling), overflowing, shared("looped-bfs:v=2", 2, 2), unused=OUTER
    ),
    "looped, aux, regularized": Case(Chain(aux=True, regularized=True), batches(), shared("looped-bfs:v=2", 1, 1)),
    "V-shaped": Case(Chain(tied={3: 0}, skips={2: 0}), batches(), shared(V_SHAPED, 1, 1)),
    "V-shaped, 1:2": Case(Chain(tied={3: 0}), batches(), shared(V_SHAPED, 1, 2)),
    "interleaved, DP 2, overlap": Case(
        Chain(width=WIDE, tied={3: 0}),
        batches(width=WIDE),
        overlapped(2, micro_batches=3, ends=[3, 11], schedule="interleaved-1f1b:v=2"),
    ),
    "looped, DP 2, batch norm, sync": Case(
        normalized,
        batches((12, 7, 12)),
        layout(2, stages=["dense_1"], batch_norm="sync", schedule="looped-bfs:v=2"),
        in_turn=2,
    ),
    "looped, DP 2, embedding in two stages": Case(
        embedding(again=True, make_optimizer=clipping_adam),
        id_batches,
        layout(2, stages=["again"], schedule="looped-bfs:v=2"),
    ),
    "several stages, backward in two parts": Case(
        Chain(tied={2: 0}), batches(), shared(WITH_WEIGHTS, 1, 1, micro_batches=1)
    ),
    "unequal shares, DP 2, overlap": Case(
        Chain(width=WIDE),
        batches((11, 11, 5), width=WIDE),
        with_shares(overlapped(2, micro_batches=2, ends=[11]), (3.0, 1.0)),
    ),
    "unequal shares, DP 2, embedding": Case(
        embedding(), id_batches, with_shares(overlapped(2, micro_batches=1, ends=[11]), (1.0, 2.0))
    ),
    "unequal shares, DP 2, interleaved": Case(
        Chain(tied={3: 0}),
        batches(),
        with_shares(
            overlapped(2, micro_batches=2, ends=[3, 11], schedule="interleaved-1f1b:v=2"), (2.0, 1.0), (2.0, 1.0)
        ),
    ),
    "unequal shares, 2:1": Case(
        Chain(tied={3: 0}, skips={3: 0}, regularized=True),
        batches((11, 7, 11)),
        with_shares(overlapped(2, 1, micro_batches=2, ends=[5, 13]), (1.0, 4.0), None),
    ),
    "unequal shares, 2:2": Case(
        Chain(tied={3: 0}, skips={3: 0}, make_optimizer=adam),
        batches((16, 16, 9)),
        with_shares(overlapped(2, 2, micro_batches=2, ends=[3, 12], samples=16), (3.0, 1.0), (1.0, 2.0)),
    ),
    "unequal shares, 3:1, zb-h1": Case(
        Chain(skips={3: 0}),
        batches(),
        with_shares(overlapped(3, 1, micro_batches=2, ends=[3, 12], schedule="zb-h1"), (2.0, 1.0, 2.0), None),
    ),
    "many, 1:1": Case(Chain(skips={3: 0}, aux=True), batches((47, 43, 47)), layout(1, 1, micro_batches=20)),
    "many, given sizes": Case(Chain(), batches((67, 60)), layout(1, 1, micro_batches=[*[1, 2, 3] * 8, 19])),
    "many, dropout": Case(dropped, batches((47, 60)), layout(1, 1, stages=["dense_1"], micro_batches=20)),
    "many, interleaved": Case(
        Chain(tied={3: 0}), batches((67, 40)), shared("interleaved-1f1b:v=2", 1, 1, micro_batches=32)
    ),
    "many, batch norm, sync, DP 2": Case(
        normalized, batches((60, 60)), layout(2, batch_norm="sync", micro_batches=20), in_turn=20
    ),
    "many, embedding, zb-h1": Case(
        embedding(make_optimizer=clipping_adam),
        lambda: id_batches((47, 40)),
        layout(1, 1, stages=["dense_1"], schedule="zb-h1", micro_batches=20),
    ),
    "many, 2:1, recompute": Case(
        Chain(tied={3: 0}), batches((67, 60)), layout(2, 1, micro_batches=20, recompute=True, schedule="dapple-b")
    ),
    "many, 1:2": Case(Chain(skips={3: 0}), batches((67, 43)), layout(1, 2, micro_batches=20, **SHARDED)),
    "gpipe, 12 micro-batches": Case(Chain(), batches((47, 43)), layout(1, 1, schedule="gpipe", micro_batches=12)),
    "many, 1:1:1": Case(Chain(skips={3: 0}, regularized=True), batches((67,)), layout(1, 1, 1, micro_batches=24)),
    "gpt, 50 steps": Case(gpt_problem, gpt_batches(50), layout(1, 2, 1, stages=["block_0", "norm"])),
}
