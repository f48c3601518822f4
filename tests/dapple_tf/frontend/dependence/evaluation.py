"""Find the kind of a tensor, and compare what its kind says with values on the whole batch and on micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf.frontend.capture import capture
from dapple_tf.frontend.captured import Captured
from dapple_tf.frontend.dependence.decide import find_dependence
from dapple_tf.frontend.dependence.kinds import Form, Kind
from dapple_tf.frontend.dependence.result import BatchDependence
from dapple_tf.frontend.dependence.undecided import Experiments
from dapple_tf.frontend.names import tensor_name
from dapple_tf.frontend.rows import ROWS_NAME, use_rows, whole_name
from dapple_tf.frontend.write_graph import write_graph
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value

N = 9
CUTS = ((0, 9), (0, 2, 6, 9), (0, 1, 8, 9))
"""Bounds of uneven micro-batches of N samples."""

_NO_VALUE = ("resource", "variant")


@dataclass(frozen=True)
class Batch:
    """The arguments and variables of a small loss.

    ``x``: float64 [N, 4]. ``z``: x times the trained variable ``w`` [4]. ``y``: int32 labels [N] below 4. ``mask``:
    bool [N]. ``u``: an untrained variable [4].
    """

    x: Any
    y: Any
    mask: Any
    z: Any
    w: Any
    u: Any

    @property
    def n(self) -> Any:
        """The number of samples, an int32 scalar."""
        return tf.shape(self.x)[0]


Compute = Callable[[Batch], Any]


def data() -> tuple[Any, Any, Any]:
    """Return x, y and the mask."""
    random = np.random.default_rng(3)
    mask = random.random(N) < 0.5
    mask[:2] = True, False
    return random.normal(size=(N, 4)), random.integers(0, 4, N).astype(np.int32), mask


def make_loss(compute: Compute, *, as_aux: bool = False) -> Callable[..., Any]:
    """Return a loss: what ``compute`` returns, or a mean over z with it as its aux output."""
    w = tf.Variable([0.5, -1.0, 2.0, 1.5], dtype=tf.float64, name="w")
    u = tf.Variable([1.0, 2.0, 3.0, 4.0], dtype=tf.float64, name="u", trainable=False)

    # AutoGraph would find nothing to convert, but takes most of the time of a trace.
    @tf.autograph.experimental.do_not_convert
    def loss(x: Any, y: Any, mask: Any) -> Any:
        batch = Batch(x, y, mask, x * w, w, u)
        return (tf.reduce_mean(batch.z), compute(batch)) if as_aux else compute(batch)

    return loss


def analyse(loss: Callable[..., Any]) -> tuple[Captured, BatchDependence]:
    """Return the trace of a loss of x, y and the mask, and how it depends on the batch."""
    captured = capture(loss, data())
    return captured, depend(captured)


def depend(captured: Captured) -> BatchDependence:
    """Return how a traced loss depends on the batch."""
    return find_dependence(captured, N, Experiments(captured, {}))


def decide(compute: Compute) -> BatchDependence:
    """Return the decision about the loss that ``compute`` returns."""
    return analyse(make_loss(compute))[1]


def kind_of(compute: Compute) -> Kind:
    """Return the kind of the tensor that ``compute`` returns."""
    captured, dependence = analyse(make_loss(compute, as_aux=True))
    return dependence.kinds[captured.graph.outputs[1]]


def assert_coupled(compute: Compute, why: str) -> None:
    """The tensor that ``compute`` returns is coupled, for a reason that holds one of the parts of ``why``."""
    kind = kind_of(compute)
    assert kind.coupled, kind
    assert any(part in kind.why for part in why.split("|")), kind.why


class Evaluation:
    """Evaluates a graph on some rows of the batch; what runs once a step is computed from the whole batch."""

    def __init__(self, captured: Captured, graph: Graph, once: Sequence[str]) -> None:
        self.graph = graph
        self.session = tf.compat.v1.Session(graph=_imported(graph))
        self.given = {
            tensor_name(Value(node.name)): captured.variables[node.inputs[0].node].numpy()
            for node in graph.nodes
            if node.op == "ReadVariableOp"
        }
        self.given |= {f"{name}:0": value.numpy() for name, value in captured.constants.items()}
        whole = [whole_name(name) if whole_name(name) in graph.by_name else name for name in once]
        values = [value for name in whole for value in graph.node(name).values()]
        values = [
            v for v in values if graph.type_of(v).dtype.name not in _NO_VALUE and tensor_name(v) not in self.given
        ]
        found = self.run(values, 0, N)
        self.given |= {tensor_name(value): result for value, result in zip(values, found, strict=True)}

    def run(self, values: Sequence[Value], first: int, end: int) -> list[Any]:
        """Return the values for the samples [first, end)."""
        inputs = zip(self.graph.inputs, data(), strict=True)
        feed: dict[str, Any] = {f"{name}:0": array[first:end] for name, array in inputs}
        if ROWS_NAME in self.graph.by_name:
            feed[f"{ROWS_NAME}:0"] = np.array([first, end, N])
        return self.session.run([tensor_name(value) for value in values], {**feed, **self.given})


def _imported(graph: Graph) -> tf.Graph:
    result = tf.Graph()
    with result.as_default():
        tf.graph_util.import_graph_def(write_graph(graph), name="")
    return result


def assert_kind_is_true(compute: Compute) -> Kind:
    """The tensor that ``compute`` returns is for uneven micro-batches what its kind says; return the kind."""
    captured, dependence = analyse(make_loss(compute, as_aux=True))
    value = captured.graph.outputs[1]
    kind = dependence.kinds[value]
    evaluation = Evaluation(captured, use_rows(captured.graph, dependence), sorted(dependence.once))
    (whole,) = evaluation.run([value], 0, N)
    for cuts in CUTS:
        bounds = list(itertools.pairwise(cuts))
        parts = [evaluation.run([value], *pair)[0] for pair in bounds]
        found = _together(kind, parts, bounds)
        if found is not None:
            np.testing.assert_allclose(found, whole, rtol=1e-12, atol=1e-12, err_msg=f"{kind} for {cuts}")
    return kind


def _together(kind: Kind, parts: Sequence[Any], bounds: Sequence[tuple[int, int]]) -> Any | None:
    """Return what the values of the micro-batches make up, or None where the kind says nothing about it."""
    match kind.form:
        case Form.SHARED:
            for part in parts:
                np.testing.assert_allclose(part, parts[0], rtol=1e-12)
            return parts[0]
        case Form.SUM if not kind.mixed:
            return sum(np.asarray(part) for part in parts)
        case Form.MEAN:
            return sum(np.asarray(part) * (b - a) / N for part, (a, b) in zip(parts, bounds, strict=True))
        case Form.ROWS if kind.outer and kind.inner > 0:
            return _joined(kind, parts, bounds)
    return None


def _joined(kind: Kind, parts: Sequence[Any], bounds: Sequence[tuple[int, int]]) -> Any:
    pieces = []
    for part, (first, _) in zip(parts, bounds, strict=True):
        moved = part + np.asarray(kind.slope, part.dtype) * first if kind.slope else part
        split = [kind.outer, moved.shape[kind.axis] // kind.outer]
        pieces.append(np.reshape(moved, [*moved.shape[: kind.axis], *split, *moved.shape[kind.axis + 1 :]]))
    joined = np.concatenate(pieces, kind.axis + 1)
    return np.reshape(joined, [*joined.shape[: kind.axis], -1, *joined.shape[kind.axis + 2 :]])


def node_of(captured: Captured, op: str) -> Node:
    """Return the only node of this op."""
    (node,) = (node for node in captured.graph.nodes if node.op == op)
    return node
