"""Trace functions, give their draws rows, and compare micro-batches with one device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.frontend.draw_layouts import DRAW_INPUTS
from dapple_tf.frontend.read_graph import read_graph, read_value
from dapple_tf.frontend.row_draws import RowDraw, draw_rows
from dapple_tf.frontend.write_graph import import_graph
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value, tensor
from dapple_tf.graph_passes.ir.verify import verify

ROWS = Node("rows", "capture", outputs=(tensor("int64", 3),))
CUTS = ((0, 11), (0, 4, 8, 11), (0, 1, 2, 9, 11))


@dataclass(frozen=True)
class Layout:
    """Where the batch is in a draw: ``shape`` gives the draw's shape for a number of samples."""

    shape: Callable[[Any], list[Any]]
    axis: int
    outer: int = 1
    inner: int = 1


LAYOUTS = {
    "rows of 3 elements": Layout(lambda n: [n, 3], 0),
    "rows of 8 elements": Layout(lambda n: [n, 2, 4], 0),
    "one element": Layout(lambda n: [n], 0),
    "behind an axis of length 1": Layout(lambda n: [1, n, 3], 1),
    "several rows a sample": Layout(lambda n: [n * 3, 5], 0, inner=3),
    "time-major": Layout(lambda n: [5, n, 3], 1),
    "last axis": Layout(lambda n: [2, 3, n], 2),
    "heads, then batch": Layout(lambda n: [2 * n, 3], 0, outer=2),
    "batch in the middle of an axis": Layout(lambda n: [4, 2 * n * 3], 1, outer=2, inner=3),
}


def trace(function: Callable[..., Any], *specs: tf.TensorSpec) -> tuple[Any, Graph]:
    """Trace a function; the graph has its arguments as ``arg/0`` ..., what it captures as ``capture/0`` ...."""
    concrete = tf.function(function, autograph=False).get_concrete_function(*specs)
    names = [f"arg/{i}" for i in range(len(specs))] + [f"capture/{i}" for i in range(len(concrete.captured_inputs))]
    inputs = {t.op.name: Node(name, name.split("/")[0]) for t, name in zip(concrete.graph.inputs, names, strict=True)}
    outputs = tuple(read_value(output, inputs) for output in concrete.graph.outputs)
    return concrete, read_graph(concrete.graph, inputs, "traced").replace(outputs=outputs)


def with_rows(graph: Graph, draws: Sequence[RowDraw]) -> Graph:
    rewritten = draw_rows(graph.replace(nodes=(*graph.nodes, ROWS)), draws, Value("rows"))
    verify(rewritten)
    return rewritten


def runner(graph: Graph, captured: Sequence[tf.Tensor] = ()) -> Callable[..., list[np.ndarray[Any, Any]]]:
    """Return a function of the arguments and of ``rows`` that runs the graph."""

    def run(*inputs: tf.Tensor) -> list[tf.Tensor]:
        given = dict(zip(("rows", *(f"arg/{i}" for i in range(len(inputs) - 1))), inputs, strict=True))
        building = tf.compat.v1.get_default_graph()
        given |= {f"capture/{i}": internals.capture_of(building, t) for i, t in enumerate(captured)}
        return import_graph(graph, given, "imported")

    traced = tf.function(run, autograph=False, reduce_retracing=True)
    return lambda *inputs: [output.numpy() for output in traced(*inputs)]


def join(pieces: Sequence[np.ndarray[Any, Any]], axis: int, outer: int, inner: int) -> np.ndarray[Any, Any]:
    """Put the draws of the micro-batches together in the order of one device."""
    parts = []
    for piece in pieces:
        samples = piece.shape[axis] // (outer * inner)
        parts.append(piece.reshape(*piece.shape[:axis], outer, samples, inner, *piece.shape[axis + 1 :]))
    joined = np.concatenate(parts, axis + 1)
    return joined.reshape(*joined.shape[:axis], -1, *joined.shape[axis + 3 :])


def assert_rows_are_the_whole_draws(
    function: Callable[..., Any], layouts: Sequence[Layout], *arguments: np.ndarray[Any, Any], cuts: Any = CUTS
) -> Graph:
    """Compare a function, whose i-th output is a draw of the i-th layout, with its micro-batches.

    ``cuts``: the first samples of the micro-batches and the number of samples, for each division of the batch. Returns
    the rewritten graph.
    """
    specs = [tf.TensorSpec((None, *a.shape[1:]), a.dtype) for a in arguments]
    concrete, graph = trace(function, *specs)
    nodes = draws_of(graph)
    assert len(nodes) == len(layouts)
    draws = [RowDraw(node.name, at.axis, at.outer, at.inner) for node, at in zip(nodes, layouts, strict=True)]
    rewritten = with_rows(graph, draws)
    run = runner(rewritten, concrete.captured_inputs)
    whole = [output.numpy() for output in concrete(*map(tf.constant, arguments))]
    for cut in cuts:
        pieces = [
            run(np.array([a, b, cut[-1]]), *(argument[a:b] for argument in arguments))
            for a, b in itertools.pairwise(cut)
        ]
        for i, at in enumerate(layouts):
            joined = join([piece[i] for piece in pieces], at.axis, at.outer, at.inner)
            assert joined.shape == whole[i].shape
            assert joined.tobytes() == whole[i].tobytes(), f"draw {i} at {at}, cut at {cut}, is not one device's"
    return rewritten


def draws_of(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op in DRAW_INPUTS]


def samples_of(x: tf.Tensor) -> tf.Tensor:
    return tf.shape(x)[0]
