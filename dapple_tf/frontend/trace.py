"""Trace a loss, and find out how micro-batches compute what one device computes from the whole batch."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from dapple_tf.errors import DappleWarning, ExactnessError
from dapple_tf.exactness import BatchLoss, Exactness, Inexact
from dapple_tf.frontend.capture import Captured, capture
from dapple_tf.frontend.dependence.decide import find_dependence
from dapple_tf.frontend.dependence.result import BatchDependence
from dapple_tf.frontend.dependence.weigh import weigh_terms
from dapple_tf.frontend.rows import use_rows
from dapple_tf.frontend.shapes import probe_shapes
from graph_passes.analysis.tail import mark_tail


def trace_loss(
    loss_fn: Callable[..., Any],
    batch: Sequence[Any],
    batch_size: int,
    inexact: Inexact = "error",
    batch_loss: BatchLoss = False,
    *,
    trains: bool = True,
) -> Captured:
    """Return the captured loss, rewritten so that its micro-batches make up the whole batch.

    ``batch_size``: one that the model accepts. ``batch_loss``: whether the end of the loss that combines samples is cut
    off as a tail (see ``dependence.cut_tail``). ``trains``: see ``capture``. Raises what ``capture`` raises, and
    ExactnessError where a step would differ from one device's and ``inexact`` is "error".
    """
    captured = capture(loss_fn, batch, trains=trains)
    dependence = _find(captured, batch_size, batch_loss)
    if dependence.mixed and not dependence.exactness.undocumented:
        captured = weigh_terms(captured, dependence)
        dependence = _find(captured, batch_size, batch_loss)
    _report(captured.graph.name, dependence, inexact, trains=trains)
    nodes = (node.with_attrs(once=True) if node.name in dependence.once else node for node in captured.graph.nodes)
    graph = use_rows(captured.graph.replace(nodes=tuple(nodes)), dependence)
    if dependence.tail:
        graph = mark_tail(graph, dependence.tail.own, dependence.tail.frontier)
    return dataclasses.replace(captured, graph=graph, dependence=dependence)


def _find(captured: Captured, batch_size: int, batch_loss: BatchLoss) -> BatchDependence:
    probe, shapes = probe_shapes(captured, batch_size)
    return find_dependence(captured, shapes, probe, batch_loss)


def _report(name: str, dependence: BatchDependence, inexact: Inexact, *, trains: bool) -> None:
    reasons = dependence.exactness.undocumented
    if reasons and inexact == "error":
        raise ExactnessError(f"a step of {name} would not equal one device's:\n{Exactness(reasons)}")
    if reasons and inexact == "warn":
        message = f"a step of {name} does not equal one device's:\n{Exactness(reasons)}"
        warnings.warn(message, DappleWarning, stacklevel=9)
    if dependence.grows and trains:
        message = f"the loss of {name} is a sum over the batch: its gradient grows with the batch size"
        warnings.warn(message, DappleWarning, stacklevel=9)
