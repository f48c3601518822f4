"""A batch of Keras, (x, y, sample_weight) of any nesting, as the one argument of a pipelined function.

The argument is a dictionary of the tensors by name (``x``, ``x/1``, ``y/scores``, ``sample_weight``). What is None (no
targets, no weights, an optional input) has no entry.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.distributed.digest import digest_tensors
from dapple_tf.distributed.membership import Job
from dapple_tf.errors import BatchError

_PARTS = ("x", "y", "sample_weight")


def _nest_single() -> dict[tuple[str, ...], Any]:
    """Return the nesting of batches of single tensors, with and without targets and weights."""
    batches = [("x", y, weight) for y in ("", "y") for weight in ("", "sample_weight")]
    return {tuple(sorted(filter(None, batch))): batch for batch in batches}


@dataclass
class BatchNames:
    """Names the tensors of batches, and nests named tensors again as the batch with these names was nested."""

    example: ClassVar[str] = "{'x': x, 'y': y}"
    _nesting: dict[tuple[str, ...], Any] = field(default_factory=_nest_single)

    def name(self, data: Any, *, inputs_only: bool = False) -> dict[str, Any]:
        """Return the tensors of ``data``, a batch as ``fit`` gets it, by name.

        ``inputs_only``: leave targets and weights out. Raises BatchError for a batch without inputs.
        """
        parts = keras.utils.unpack_x_y_sample_weight(data)
        if inputs_only:
            parts = (parts[0], None, None)
        tensors, nesting = _name_leaves(parts, lambda path: [_PARTS[path[0]], *map(str, path[1:])])
        if not any(name == "x" or name.startswith("x/") for name in tensors):
            raise BatchError("the batch has no inputs: give (x,), (x, y) or (x, y, sample_weight)")
        self._nesting[tuple(sorted(tensors))] = nesting
        return tensors

    def nest(self, tensors: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Return x, y and sample_weight, nested as in the batch for which ``name`` returned ``tensors``.

        Raises BatchError for names that no batch had before, unless they are those of a batch of single tensors.
        """
        x, y, sample_weight = _nest_leaves(tensors, self._nesting)
        return x, y, sample_weight


@dataclass
class DataNames:
    """Names the tensors of what a ``train_step`` gets, of any nesting, and nests named tensors again."""

    example: ClassVar[str] = "{'data/0': x, 'data/1': y}"
    _nesting: dict[tuple[str, ...], Any] = field(default_factory=dict)

    def name(self, data: Any) -> dict[str, Any]:
        """Return the tensors of ``data``, as ``fit`` gets it, by name. Raises BatchError where there are none."""
        tensors, nesting = _name_leaves(data, lambda path: ["data", *map(str, path)])
        if not tensors:
            raise BatchError("the batch has no tensors")
        self._nesting[tuple(sorted(tensors))] = nesting
        return tensors

    def nest(self, tensors: dict[str, Any]) -> Any:
        """Return the data that ``name`` turned into ``tensors``. Raises BatchError for names that no batch had."""
        return _nest_leaves(tensors, self._nesting)


def _name_leaves(data: Any, name_of: Callable[[tuple[Any, ...]], list[str]]) -> tuple[dict[str, Any], Any]:
    """Return the tensors of ``data`` by name, and its nesting with names in their places; "" where there is None."""
    tensors: dict[str, Any] = {}
    names: list[str] = []
    for path, leaf in keras.tree.flatten_with_path(data):
        name = "/".join(name_of(path))
        names.append("" if leaf is None or isinstance(leaf, tf.experimental.Optional) else name)
        if names[-1]:
            tensors[name] = leaf
    return tensors, keras.tree.pack_sequence_as(data, names)


def _nest_leaves(tensors: dict[str, Any], nestings: Mapping[tuple[str, ...], Any]) -> Any:
    """Return the tensors in the places of their names in the one of the ``nestings`` that is for these names."""
    names = tuple(sorted(tensors))
    if names not in nestings:
        known = "; ".join(", ".join(map(repr, each)) for each in nestings)
        raise BatchError(
            f"the batch is a dictionary with {', '.join(map(repr, names))}; "
            + (f"the names can be: {known}" if known else "give the model a batch by fit first, or an example_batch")
        )
    return keras.tree.map_structure(lambda name: tensors[name] if name else None, nestings[names])


# --- Give all ranks of a job the same random numbers, and compare their batches


def align_randomness(job: Job) -> None:
    """Give every rank rank 0's state of Python's and NumPy's random numbers, and one seed to TensorFlow.

    Data sets are shuffled with these. A seed of ``tf.random.set_seed`` is kept. Every rank must call this. Raises
    JobError if the ranks were given different seeds.
    """
    own = random.getstate(), np.random.get_state(), int.from_bytes(os.urandom(3), "big")
    python, numpy, seed = job.broadcast(own)
    random.setstate(python)
    np.random.set_state(numpy)
    if job.agree("seed of tf.random.set_seed", internals.global_seed()) is None:
        tf.random.set_seed(seed)


_SEED = (
    "Every rank must read the same data in the same order: call keras.utils.set_random_seed(n) before the data are "
    "made, with the same n on all ranks, and give each shuffle a seed."
)


class BatchCheck:
    """Compares first batches between ranks: all must read the same data in the same order.

    It compares the first batch of each epoch, evaluation and prediction, and the learning rates of the ``optimizer``.
    """

    def __init__(self, job: Job, optimizer: Any) -> None:
        self._job = job
        self._optimizer = optimizer
        self._expected = True

    def expect(self) -> None:
        """Compare the next batch."""
        self._expected = True

    def __call__(self, tensors: dict[str, Any]) -> None:
        """Raise JobError on every rank where a batch is to be compared and differs; every rank must call this."""
        if self._expected:
            self._expected = False
            rates = [float(v.numpy()) for v in self._optimizer.variables if v.name == "learning_rate"]
            values = f"values of digest {digest_tensors(tensors)[:16]}"
            self._job.agree("first batch of the epoch", values, _SEED)
            self._job.agree("learning rate", rates, "Set the same one on every rank.")
