"""``dapple.shard``: a data set of the rows that this rank needs of each batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf.errors import BatchError
from dapple_tf.frontend.batch import argument_paths, as_arguments
from dapple_tf.graph_passes.analysis.input_needs import InputNeeds, Use
from dapple_tf.runtime.step import PipelinedStep


def shard(dataset: tf.data.Dataset, step: PipelinedStep) -> tf.data.Dataset:
    """Return a data set of this rank's rows of each batch, for ``step(*rows, local=True)``.

    ``dataset``: its elements are single samples of equal shapes, each a tuple of the arguments of the loss without
    their batch axis. As with ``tf.data.Dataset.shard``, put expensive maps after this function:
    ``dapple.shard(numbers, step).map(read)``, where each element of ``numbers`` has, for example, a file name for each
    argument.

    All ranks must give the same samples in the same order, so seed every shuffle. Each consecutive
    ``step.plan.global_batch_size`` samples are a batch; the last batch may be smaller. An element of the result has,
    for each argument, the rows that this rank needs (``step.needs``) in the order in which the step takes them, or None
    if it needs none. If a rank needs no argument, it gets the first argument without rows, since an element must have
    a tensor; it does not read ``dataset``, unless the number of samples is unknown. In one process the elements are
    whole batches.

    Raises UsageError if ``step`` has not been built (give ``example_batch``), BatchError if the samples do not have the
    arguments for which it was built.
    """
    needs, size = step.needs, step.plan.global_batch_size
    structure = as_arguments(dataset.element_spec)
    if argument_paths(structure) != needs.arguments:
        raise BatchError(
            f"each sample of the data set has {_list(argument_paths(structure))}, but the step was built for "
            f"{_list(needs.arguments)}: give a data set of tuples of the arguments of the loss"
        )
    return take_rows(dataset, needs, size)


def beside_steps(dataset: Any) -> Any:
    """Return a tf.data.Dataset that is read while steps run, without tuning and in threads of its own.

    Any other object is returned unchanged. A program that drops an iterator waits for the thread that tunes, which
    sleeps 10 ms, 20 ms, 40 ms ... up to a minute: ``dapple train`` ended up to 28 s after its last line. Without tuning
    AUTOTUNE is the number of cores. In TensorFlow's own threads (one a core), the functions of
    a data set wait until an op of a stage ends, each time that they go on.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    if dataset.options().threading.private_threadpool_size is None:
        options.threading.private_threadpool_size = 0  # as many as there are cores
    return dataset.with_options(options)


def take_rows(dataset: tf.data.Dataset, needs: InputNeeds, size: int) -> tf.data.Dataset:
    """Return the rows that ``needs`` names of each batch of ``size`` samples; see ``shard``."""
    structure = as_arguments(dataset.element_spec)
    needed = [i for i, use in enumerate(needs.inputs.uses) if use is not Use.NONE]
    if not needed:
        return _without_rows(dataset, structure, size)
    leaves_of = _pick(needed)
    cuts = [_cut(needs, needs.arguments[i], size) for i in needed]

    def arrange(*rows: Any) -> Any:
        leaves: list[Any] = [None] * len(needs.arguments)
        for i, cut, tensor in zip(needed, cuts, rows, strict=True):
            leaves[i] = cut(tensor)
        return tf.nest.pack_sequence_as(structure, leaves)

    return dataset.map(leaves_of).batch(size).map(arrange)


def _list(paths: Sequence[str]) -> str:
    return f"arguments {', '.join(paths)}"


def _pick(needed: Sequence[int]) -> Callable[..., tuple[Any, ...]]:
    def leaves_of(*sample: Any) -> tuple[Any, ...]:
        leaves = tf.nest.flatten(sample)
        return tuple(leaves[i] for i in needed)

    return leaves_of


def _cut(needs: InputNeeds, argument: str, size: int) -> Callable[[Any], Any]:
    """Return a function that takes the whole batch's tensor of an argument, and returns the rows the rank needs."""
    if needs.inputs.replicas == 1 or needs.inputs.uses[needs.arguments.index(argument)] is Use.ALL:
        return lambda tensor: tensor

    def numbers(samples: Any) -> Any:
        return np.concatenate([np.arange(*bounds) for bounds in needs.rows(int(samples))[argument]])

    of_full_batch = numbers(size)

    def cut(tensor: Any) -> Any:
        samples = tf.shape(tensor, tf.int64)[0]
        chosen = tf.cond(
            samples == size, lambda: tf.constant(of_full_batch), lambda: tf.numpy_function(numbers, [samples], tf.int64)
        )
        return tf.gather(tensor, tf.ensure_shape(chosen, [None]))

    return cut


def _without_rows(dataset: tf.data.Dataset, structure: Any, size: int) -> tf.data.Dataset:
    """Return an element without rows for each batch."""
    samples = int(dataset.cardinality())
    if samples == tf.data.INFINITE_CARDINALITY:
        batches = tf.data.Dataset.range(1).repeat()
    elif samples == tf.data.UNKNOWN_CARDINALITY:
        batches = dataset.map(lambda *sample: 0).batch(size)
    else:
        batches = tf.data.Dataset.range(-(-samples // size))
    first, *others = tf.nest.flatten(structure)
    dims = [] if first.shape.rank is None else [dim or 0 for dim in first.shape]

    def empty(_: Any) -> Any:
        rows = tf.zeros([0, *dims], first.dtype)
        return tf.nest.pack_sequence_as(structure, [rows, *(None for _ in others)])

    return batches.map(empty)
