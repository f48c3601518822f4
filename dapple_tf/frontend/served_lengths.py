"""Decide for which inner lengths a trace with unknown inner lengths may be used again.

The analysis of a loss is made at the lengths of one batch, and the loss is rewritten as it decides. Before the
rewritten loss runs a batch of other lengths, the analysis is made at these too: where it decides the same, the result
is that of one device. The sizes of the whole batch that the loss computes with may differ from length to length (see
``affine_sizes``).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf.frontend.affine_sizes import Analyse, evaluate_sizes
from dapple_tf.frontend.capture import Captured
from dapple_tf.frontend.dependence.kinds import Kind
from dapple_tf.frontend.dependence.result import BatchDependence


@dataclass(frozen=True)
class Analysed:
    """A captured loss and the result of its analysis, in which sizes are functions of the unknown lengths."""

    captured: Captured
    dependence: BatchDependence


@dataclass(frozen=True, eq=False)
class ServedLengths:
    """The inner lengths for which a trace may be used.

    ``analysed``: the captured loss, and the weighted loss where its terms had to be weighted (see ``weigh_terms``).
    ``known``: answers that were given, by the specs of a batch.
    """

    analysed: tuple[Analysed, ...]
    analyse: Analyse
    known: dict[tuple[tf.TensorSpec, ...], bool] = field(default_factory=dict)

    def serves(self, specs: tuple[tf.TensorSpec, ...]) -> bool:
        """Return whether the loss may run batches of these specs, which the trace accepts (axis 0 unknown)."""
        if specs not in self.known:
            self.known[specs] = all(self._decides_the_same(one, specs) for one in self.analysed)
        return self.known[specs]

    def _decides_the_same(self, one: Analysed, specs: tuple[tf.TensorSpec, ...]) -> bool:
        captured = dataclasses.replace(one.captured, example=specs)
        return _same_decisions(evaluate_sizes(one.dependence, captured), self.analyse(captured))


def _same_decisions(expected: BatchDependence, found: BatchDependence) -> bool:
    """Return whether all decisions are equal, and all kinds but for their lengths (``outer``, ``inner``, ``slope``)."""
    kinds = {value: _without_lengths(kind) for value, kind in expected.kinds.items()}
    names = [item.name for item in dataclasses.fields(BatchDependence) if item.name != "kinds"]
    return kinds == {value: _without_lengths(kind) for value, kind in found.kinds.items()} and all(
        _same(getattr(expected, name), getattr(found, name)) for name in names
    )


def _without_lengths(kind: Kind) -> Kind:
    element = None if kind.element is None else _without_lengths(kind.element)
    return dataclasses.replace(kind, outer=0, inner=0, slope=(), element=element)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if dataclasses.is_dataclass(one) and type(one) is type(other):
        names = [item.name for item in dataclasses.fields(one)]
        return all(_same(getattr(one, name), getattr(other, name)) for name in names)
    return bool(one == other)
