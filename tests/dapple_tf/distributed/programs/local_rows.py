"""Train with each rank given only the rows that it needs, and compare with whole batches and with one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.distributed.membership import Job, current
from dapple_tf.errors import BatchError, UsageError
from tests.equality.one_device import Problem, named_variables, relative_error, train_on_one_device

WIDTH, BATCH, SAMPLES = 4, 11, 27
CUTS: Mapping[int, Sequence[str]] = {2: ["layer2"], 3: ["layer1", "layer2"]}
Batch = tuple[Any, ...]


def run(*names: str) -> dict[str, Any]:
    """Return by name what this rank found in the cases."""
    job = current()
    assert not job.is_alone, "start it with mpirun"
    cases: Mapping[str, Callable[[], Any]] = {
        "1:1:1": lambda: train(job, (1, 1, 1)),
        "1:2": lambda: train(job, (1, 2)),
        "1:2, shares": lambda: train(job, (1, 2), shares=(None, (3.0, 1.0))),
        "1:2, sizes": lambda: train(job, (1, 2), micro_batches=[3, 3, 5]),
        "1:2, largest": lambda: train(job, (1, 2), masked_by_the_largest),
        "whole batches": compare_with_whole_batches,
        "lengths": lambda: train_lengths(job),
        "other calls": lambda: run_other_calls(job),
    }
    return {name: cases[name]() for name in names}


def count_of(mask: Any) -> Any:
    """Return the sum of the mask, which can be combined from parts."""
    return tf.reduce_sum(mask)


def masked_by_the_largest(mask: Any) -> Any:
    """Return the sum of the four largest entries, which cannot be combined from parts."""
    return tf.reduce_sum(tf.sort(mask)[-4:])


def masked_problem(divisor: Callable[[Any], Any] = count_of) -> Problem:
    """A chain of layers; the loss is a weighted sum of the samples' losses, divided by a statistic of the weights."""
    random = np.random.default_rng(0)
    matrices = [tf.Variable(random.normal(size=(WIDTH, WIDTH)) / 2, name=f"w{i}") for i in range(3)]

    def loss_fn(x: Any, targets: Mapping[str, Any]) -> Any:
        for i, matrix in enumerate(matrices):
            with tf.name_scope(f"layer{i}"):
                x = tf.tanh(x @ matrix)
        losses = tf.reduce_sum(tf.square(x - targets["y"]), 1) * targets["mask"]
        return tf.reduce_sum(losses) / divisor(targets["mask"])

    variables = {matrix.name.removesuffix(":0"): matrix for matrix in matrices}
    return Problem(loss_fn, variables, lambda: keras.optimizers.Adam(0.01))


def arrays() -> Batch:
    random = np.random.default_rng(1)
    x, y = random.normal(size=(2, SAMPLES, WIDTH))
    return x, {"mask": random.integers(0, 2, SAMPLES).astype(np.float64), "y": y}


def rows_of(batch: Any, chosen: Any) -> Any:
    return tf.nest.map_structure(lambda array: tf.constant(array[chosen]), batch)


def whole_batches() -> list[Batch]:
    return [rows_of(arrays(), slice(begin, begin + BATCH)) for begin in range(0, SAMPLES, BATCH)]


def empty_batch() -> Batch:
    """A batch of zeros, to build a step from: no rank needs data for that."""
    return tf.nest.map_structure(tf.zeros_like, whole_batches()[0])


class Files:
    """Arrays behind the numbers of their rows, as files are behind their names. ``read``: rows by argument."""

    def __init__(self) -> None:
        self.read: dict[str, list[int]] = {"x": [], "mask": [], "y": []}

    def batches(self, step: Any) -> Iterable[Batch]:
        """The rows that this rank needs of a data set of numbers, read behind ``shard``."""
        needed = any(step.needs.rows().values())

        def name_rows(number: Any) -> Any:
            number = tf.ensure_shape(tf.numpy_function(touch, [number], tf.int64), [])
            return number, {"mask": number, "y": number}

        def touch(number: Any) -> Any:
            assert needed, "this rank needs no rows, and reads the data set"
            return number

        numbers = tf.data.Dataset.range(SAMPLES).map(name_rows)
        return dapple.shard(numbers, step).map(lambda x, targets: self._look_up(x, targets) if needed else (x, targets))

    def _look_up(self, x: Any, targets: Any) -> Any:
        data, _ = arrays()
        found = {"x": self._rows("x", data, x)}
        found |= {name: self._rows(name, arrays()[1][name], targets[name]) for name in targets}
        return found.pop("x"), found

    def _rows(self, name: str, array: Any, numbers: Any) -> Any:
        def read_rows(chosen: Any) -> Any:
            self.read[name] += map(int, chosen)
            return array[chosen]

        if numbers is None:
            return None
        return tf.ensure_shape(tf.numpy_function(read_rows, [numbers], tf.float64), [None, *array.shape[1:]])


def by_needs(step: Any) -> Iterable[Batch]:
    """The rows of arrays that ``step.needs`` names."""
    data = arrays()
    for begin in range(0, SAMPLES, BATCH):
        rows = step.needs.rows(min(BATCH, SAMPLES - begin))
        leaves = [
            np.concatenate([array[begin + first : begin + end] for first, end in own]) if own else None
            for array, own in zip(tf.nest.flatten(data), rows.values(), strict=True)
        ]
        yield tf.nest.pack_sequence_as(data, leaves)


def make_step(problem: Problem, optimizer: Any, replicas: Sequence[int], **options: Any) -> Any:
    shares = options.pop("shares", None)
    options = {"stages": CUTS[len(replicas)], "replicas": list(replicas), "micro_batches": 2, **options}
    if shares is not None:
        options = _with_shares(problem, shares, options)
    return dapple.pipeline(problem.loss_fn, optimizer=optimizer, **options)


def _with_shares(problem: Problem, shares: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with a plan in place of stages and replicas, whose stages share rows so."""
    made = {**options, "example_batch": empty_batch()}
    plan = dapple.pipeline(problem.loss_fn, optimizer=keras.optimizers.SGD(), **made).plan
    stages = tuple(replace(stage, shares=own) for stage, own in zip(plan.stages, shares, strict=True))
    return {"example_batch": empty_batch(), "plan": replace(plan, stages=stages, predicted=None)}


def train(
    job: Job, replicas: Sequence[int], divisor: Callable[[Any], Any] = count_of, **options: Any
) -> dict[str, Any]:
    """Train on one device (on rank 0), then on each rank's rows, from the same values; return errors and needs."""
    problem, files = masked_problem(divisor), Files()
    one_device = job.run_on_rank_0(lambda: train_on_one_device(problem, whole_batches()))
    if job.rank:
        problem.make_optimizer()  # Keras numbers optimizers
    losses, values, step = train_pipeline(replicas, files.batches, local=True, divisor=divisor, **options)
    errors = compare((losses, values), (one_device.losses, one_device.values))
    return {"errors": errors, "needs": str(step.needs), "read": files.read}


def prompted_problem() -> Problem:
    """Sequences of unknown length: the sum of all squared errors, divided by the number of tokens behind the tenth."""
    random = np.random.default_rng(0)
    matrices = [tf.Variable(random.normal(size=(WIDTH, WIDTH)) / 2, name=f"w{i}") for i in range(3)]
    specs = [tf.TensorSpec([None, None, WIDTH], tf.float64), tf.TensorSpec([None, None], tf.float64)]

    @tf.function(input_signature=specs)
    def loss_fn(x: Any, y: Any) -> Any:
        for i, matrix in enumerate(matrices):
            with tf.name_scope(f"layer{i}"):
                x = tf.tanh(tf.einsum("btw,wv->btv", x, matrix))
        tokens = tf.maximum(tf.shape(y)[0] * (tf.shape(y)[1] - 10), 1)
        return tf.reduce_sum(tf.square(tf.reduce_sum(x, 2) - y)) / tf.cast(tokens, tf.float64)

    return Problem(loss_fn, {f"w{i}": matrix for i, matrix in enumerate(matrices)}, lambda: keras.optimizers.Adam(0.01))


def sequences(length: int) -> Batch:
    random = np.random.default_rng(length)
    return tf.constant(random.normal(size=(BATCH, length, WIDTH))), tf.constant(random.normal(size=(BATCH, length)))


def train_lengths(job: Job) -> dict[str, Any]:
    """Train on local rows of lengths that one build serves, and try those that it does not, on three ranks."""
    problem, lengths = prompted_problem(), (12, 15, 11)
    one_device = job.run_on_rank_0(lambda: train_on_one_device(problem, [sequences(n) for n in lengths]))
    if job.rank:
        problem.make_optimizer()
    other = prompted_problem()
    step = make_step(other, other.make_optimizer(), (1, 1, 1))
    step.build(*sequences(12))
    own = [lambda x, y: (x, None), lambda x, y: (None, None), lambda x, y: (None, y)][job.rank]
    losses = [float(step(*own(*sequences(n)), local=True)) for n in lengths]
    step.gather()
    values = {name: variable.numpy() for name, variable in other.variables.items()}
    wanted = {name: one_device.values[name] for name in values}
    messages = {}
    for case, (of_x, of_y) in {"of another form": (8, 8), "two lengths": (12, 15)}.items():
        try:
            step(*own(sequences(of_x)[0], sequences(of_y)[1]), local=True)
        except BatchError as error:
            messages[case] = str(error)
    return {"errors": compare((losses, values), (one_device.losses, wanted)), "messages": messages}


def compare_with_whole_batches() -> dict[str, float]:
    *local, _ = train_pipeline((2, 1), by_needs, local=True)
    *whole, _ = train_pipeline((2, 1), lambda step: whole_batches(), local=False)
    return compare(tuple(local), tuple(whole))


def train_pipeline(
    replicas: Sequence[int],
    batches: Callable[[Any], Iterable[Batch]],
    *,
    local: bool,
    divisor: Callable[[Any], Any] = count_of,
    **options: Any,
) -> tuple[list[float], dict[str, Any], Any]:
    """Train a new model; return the losses, the values of all variables, and the step."""
    problem = masked_problem(divisor)
    optimizer = problem.make_optimizer()
    step = make_step(problem, optimizer, replicas, example_batch=empty_batch(), **options)
    losses = [float(step(*batch, local=local)) for batch in batches(step)]
    step.gather()
    return losses, {name: v.numpy() for name, v in named_variables(problem, optimizer).items()}, step


def compare(found: tuple[Any, ...], wanted: tuple[Any, ...]) -> dict[str, float]:
    """Return the relative errors of losses and of the variables by name."""
    (losses, values), (wanted_losses, wanted_values) = found, wanted
    errors = {"losses": relative_error(losses, [float(loss) for loss in wanted_losses])}
    return errors | {name: relative_error(values[name], value) for name, value in wanted_values.items()}


def run_other_calls(job: Job) -> dict[str, Any]:
    """Make wrong calls, then steps that return gradients, are recorded, or are checked, all on local rows."""
    problem = masked_problem()
    with tf.GradientTape() as tape:
        loss = problem.loss_fn(*whole_batches()[0])
    wanted = dict(zip(problem.variables, tape.gradient(loss, list(problem.variables.values())), strict=True))
    step = make_step(problem, problem.make_optimizer(), (2, 1))
    messages = {"not built": message(UsageError, lambda: step(None, None, local=True))}
    step.build(*empty_batch())
    first, second, last = by_needs(step)
    for case, batch in wrong_batches(job.rank, *first).items():
        messages[case] = message(BatchError, lambda batch=batch: step(*batch, local=True))
    first = first if job.rank != 2 else ("this rank does not need it", first[1])
    loss_found, gradients = step.run_exposed(*first, local=True)
    errors = {name: relative_error(gradients[name], gradient) for name, gradient in wanted.items()}
    errors["loss"] = relative_error(loss_found, loss.numpy())
    recorded = float(step.record(*second, local=True))
    step.check_numerics = True
    checked = float(step(*last, local=True))
    return {"messages": messages, "errors": errors, "losses": [recorded, checked], "timed": len(step.timeline.events)}


def wrong_batches(rank: int, x: Any, targets: Any) -> dict[str, Batch]:
    """Return by case what this rank is called with, in place of its rows ``x`` and ``targets``."""
    cases: dict[str, dict[int, Callable[[], Batch]]] = {
        "too few arguments": {0: lambda: (x,)},
        "nested otherwise": {2: lambda: (x, [targets["mask"], targets["y"]])},
        "too few rows": {1: lambda: (x[1:], targets)},
        "none": {1: lambda: (None, targets), 2: lambda: (x, {**targets, "y": None})},
        "another dtype": {1: lambda: (x.astype(np.float32), targets)},
        "rows of another replica": {
            0: lambda: (x[:1], targets),
            1: lambda: (np.concatenate([x, x[:4]]), targets),
        },
        "empty": dict.fromkeys(range(3), lambda: first_rows(0, (x, targets))),
        "too few samples": {r: lambda r=r: first_rows(min(r, 1), (x, targets)) for r in range(3)},
    }
    return {case: by_rank[rank]() if rank in by_rank else (x, targets) for case, by_rank in cases.items()}


def first_rows(count: int, batch: Batch) -> Batch:
    result: Batch = tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[:count], batch)
    return result


def message(error: type[Exception], call: Callable[[], Any]) -> str:
    try:
        call()
    except error as raised:
        return str(raised)
    return "no error"
