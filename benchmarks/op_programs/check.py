"""Compare what micro-batches of a rewritten loss add up to with plain TensorFlow, without stages."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.op_programs.program import Program, make_batch
from dapple_tf.errors import CaptureError, DappleWarning, ExactnessError
from dapple_tf.frontend.captured import Captured
from dapple_tf.frontend.names import tensor_name
from dapple_tf.frontend.rows import ROWS_NAME
from dapple_tf.frontend.trace import trace_loss
from dapple_tf.frontend.write_graph import write_graph
from dapple_tf.graph_passes.analysis.layers import CAPTURED_INPUTS, find_once
from dapple_tf.graph_passes.ir.graph import ancestors

SAMPLES = 6
SIZES = (SAMPLES, 3)
"""Batch sizes: the one that the loss is traced with, and a smaller one."""


_RELATIVE, _ABSOLUTE = 1e-4, 1e-5  # of float32: what is wrong is off by far more
_CALLS = ("PartitionedCall", "StatefulPartitionedCall", "StatelessIf", "If", "StatelessWhile", "While")


INVALID_ERRORS = (ValueError, TypeError, LookupError, tf.errors.OpError, RecursionError, OverflowError)
"""The errors of plain TensorFlow for operands that do not fit together."""


class Outcome(Enum):
    """The outcome of a check."""

    EQUAL = "equal"
    REFUSED = "refused"
    WRONG = "wrong"
    ERROR = "raw error"
    INVALID = "plain TensorFlow fails"


@dataclass(frozen=True)
class Found:
    """The outcome of a program, and where it is not equal, why."""

    outcome: Outcome
    why: str = ""


def check(program: Program) -> Found:
    """Return whether micro-batches add up to the loss and gradients of plain TensorFlow, for several cuts and sizes."""
    loss_fn, variables = program.loss()
    try:
        wanted = run_plain(loss_fn, variables)
    except INVALID_ERRORS as error:
        return Found(Outcome.INVALID, first_line(error))
    if not all(np.isfinite(part).all() for parts in wanted for part in parts):
        return Found(Outcome.INVALID, "not finite")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DappleWarning)
            captured = trace_loss(tf.function(loss_fn, autograph=False), make_batch(SAMPLES), SAMPLES)
    except (ExactnessError, CaptureError) as error:
        return Found(Outcome.REFUSED, " ".join(str(error).split()))
    except Exception as error:  # whatever it is, it is a fault to report
        return Found(Outcome.ERROR, f"{type(error).__name__}: {first_line(error)}")
    if any(
        node.op != "ReadVariableOp" and value.node in captured.variables
        for node in captured.graph.nodes
        for value in node.inputs
    ):
        return Found(Outcome.INVALID, "reads a variable by its handle, which a session cannot be fed")
    if captured.dependence is not None and captured.dependence.exactness.reasons:
        return Found(Outcome.REFUSED, "documented")
    for size, plain in zip(SIZES, wanted, strict=True):
        try:
            evaluation = Evaluation(captured, [variable.name for variable in variables], size)
            for cuts in cuts_of(size):
                for ours, theirs in zip(evaluation.add_up(cuts), plain, strict=False):
                    if not is_close(ours, theirs):
                        why = f"{size} samples cut at {cuts}: {np.ravel(ours)[:3]} for {np.ravel(theirs)[:3]}"
                        return Found(Outcome.WRONG, why)
        except (tf.errors.OpError, ValueError) as error:
            return Found(Outcome.ERROR, f"{size} samples: {type(error).__name__}: {first_line(error)}")
    return Found(Outcome.EQUAL)


def is_close(ours: Any, theirs: Any) -> bool:
    """Return whether results are equal up to the rounding of float32."""
    return bool(np.allclose(ours, theirs, rtol=_RELATIVE, atol=_ABSOLUTE))


def cuts_of(size: int) -> list[tuple[int, ...]]:
    """Return the bounds of one micro-batch, two, three of uneven sizes, and one for each sample."""
    return [(0, size), (0, size // 2 + 1, size), (0, 1, size - 1, size), tuple(range(size + 1))]


def first_line(error: BaseException) -> str:
    """Return the last line of an error's text, which says what is wrong."""
    return next((line for line in reversed(str(error).splitlines()) if line.strip()), "")[:300]


def run_plain(loss_fn: Any, variables: Sequence[tf.Variable]) -> list[list[Any]]:
    """Return the loss and the gradients that one device computes, for each of the batch sizes."""

    def differentiate(*batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_fn(*batch)
        return loss, tape.gradient(loss, variables, unconnected_gradients="zero")

    specs = [tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in make_batch(SAMPLES)]
    concrete = tf.function(differentiate, autograph=False).get_concrete_function(*specs)
    found = [concrete(*make_batch(size)) for size in SIZES]
    return [[loss.numpy(), *(tf.convert_to_tensor(part).numpy() for part in parts)] for loss, parts in found]


class Evaluation:
    """Runs the rewritten loss and its gradients on parts of a batch of ``size`` samples."""

    def __init__(self, captured: Captured, names: Sequence[str], size: int) -> None:
        self.captured, self.size, self.batch = captured, size, [part.numpy() for part in make_batch(size)]
        # What no result uses may not even be valid for this number of samples.
        used = ancestors(captured.graph, [value.node for value in captured.graph.outputs])
        nodes = (node for node in captured.graph.nodes if node.name in used or node.op in CAPTURED_INPUTS)
        graph = captured.graph.replace(nodes=tuple(nodes))
        reads = {
            node.name: captured.variables[node.inputs[0].node] for node in graph.nodes if node.op == "ReadVariableOp"
        }
        self.given: dict[str, Any] = {f"{name}:0": variable.numpy() for name, variable in reads.items()}
        self.given |= {f"{name}:0": value.numpy() for name, value in captured.constants.items()}
        self.session = tf.compat.v1.Session(graph=tf.Graph())
        with self.session.graph.as_default():
            tf.graph_util.import_graph_def(write_graph(graph), name="")
            (loss, *_) = (self.session.graph.get_tensor_by_name(tensor_name(value)) for value in graph.outputs)
            self.results = [loss]
            # The gradient of a function that an imported graph calls is not to be had in a session.
            for name in () if any(node.op in _CALLS for node in graph.nodes) else names:
                own = [read for read, variable in reads.items() if variable.name == name]
                tensors = [self.session.graph.get_tensor_by_name(f"{read}:0") for read in own]
                found = tf.gradients(loss, tensors, unconnected_gradients="zero")
                self.results.append(
                    tf.add_n([tf.convert_to_tensor(gradient) for gradient in found]) if found else tf.zeros(())
                )
        assert captured.dependence is not None, "a traced loss has decisions"
        self.loss = captured.dependence.loss
        once = [value for name in sorted(find_once(graph)) for value in graph.node(name).values()]
        kept = [v for v in once if not graph.type_of(v).dtype.handle]
        found = self._run([tensor_name(value) for value in kept], 0, size)
        self.given |= {tensor_name(value): part for value, part in zip(kept, found, strict=True)}

    def add_up(self, cuts: Sequence[int]) -> list[Any]:
        """Return the loss and the gradients that the micro-batches between these bounds give."""
        totals: list[Any] = [0.0] * len(self.results)
        for first, end in itertools.pairwise(cuts):
            share = 1.0 if self.loss == "sum" else (end - first) / self.size
            parts = self._run(self.results, first, end)
            totals = [total + share * np.asarray(part) for total, part in zip(totals, parts, strict=True)]
        return totals

    def _run(self, results: Sequence[Any], first: int, end: int) -> list[Any]:
        feed = {f"{name}:0": part[first:end] for name, part in zip(self.captured.graph.inputs, self.batch, strict=True)}
        if ROWS_NAME in self.captured.graph.by_name:
            feed[f"{ROWS_NAME}:0"] = np.array([first, end, self.size])
        return list(self.session.run(list(results), {**feed, **self.given}))
