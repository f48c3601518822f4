"""Trace a loss, and find out how micro-batches compute what one device computes from the whole batch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from dapple_tf.errors import CaptureError, ExactnessError, warn_user
from dapple_tf.exactness import BatchLoss, BatchNorm, Exactness, Inexact, Inexactness
from dapple_tf.frontend.after_gradients import take_inputs_of
from dapple_tf.frontend.batch import batch_signature
from dapple_tf.frontend.batch_norms import mark_joins
from dapple_tf.frontend.capture import capture
from dapple_tf.frontend.captured import Captured, SeveralPhasesError, Traced, plain_function
from dapple_tf.frontend.composite import unknown_lengths
from dapple_tf.frontend.deferred_statistics import defer_statistics, statistics_writes
from dapple_tf.frontend.dependence.decide import find_dependence, find_uncut_dependence
from dapple_tf.frontend.dependence.kinds import Kind
from dapple_tf.frontend.dependence.result import BatchDependence
from dapple_tf.frontend.dependence.undecided import Experiments, example_rows
from dapple_tf.frontend.dependence.weigh import weigh_terms
from dapple_tf.frontend.open_lengths import ServedLengths, fit_sizes, has_open_lengths, open_signature, with_unknown
from dapple_tf.frontend.rows import use_rows
from dapple_tf.frontend.shapes import probe_shapes
from dapple_tf.graph_passes.analysis.layers import SHAPE_OPS, layer_of, live_nodes
from dapple_tf.graph_passes.analysis.loss_head import mark_loss_head
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value
from dapple_tf.graph_passes.passes.combine_statistics import COMBINES
from dapple_tf.graph_passes.passes.function_parts import JOIN

# --- Join the statistics of batch norm over replicas: mark where, and check that no other values need to be joined


def _join_statistics(captured: Captured) -> Captured:
    """Return the captured loss in which the nodes are marked at which replicas join the statistics of batch norm.

    Raises CaptureError for a layer that computes other statistics of a micro-batch than mean and variance of its input,
    and for a layer whose call is hidden in another node of the loss.
    """
    graph = mark_joins(captured.graph)
    joins = {node.integer("batch_norm"): node.name for node in graph.nodes if node.has(JOIN) and node.has("batch_norm")}
    for write in statistics_writes(captured, "sync"):
        if write.integer("batch_norm") not in joins:
            raise _own_statistics(write)
    calls: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if node.has("batch_norm"):
            calls.setdefault(node.integer("batch_norm"), []).append(node)
    users, live = graph.consumers(), live_nodes(graph)
    used = {name: [user.name for user in nodes if user.name in live] for name, nodes in users.items()}
    for number, join in joins.items():
        _check_joined(graph, calls[number], join, captured.decisions.kinds, used)
    return dataclasses.replace(captured, graph=graph)


def _check_joined(
    graph: Graph, call: Sequence[Node], join: str, kinds: Mapping[Value, Kind], used: Mapping[str, Sequence[str]]
) -> None:
    """Raise CaptureError if a value that the ``call`` computes from several samples is used for more than ``join``.

    ``used``: by the name of a node, the names of the nodes that take its outputs.
    """
    before = {join}
    for node in reversed(call):
        if not before.isdisjoint(used[node.name]):
            before.add(node.name)
    after, of_samples, coupled = {join}, set[str](), set[str]()
    for node in call:
        sources = {value.node for value in node.inputs}
        if after & sources:
            after.add(node.name)
        if of_samples & sources or any(kinds[value].rows for value in node.inputs if value in kinds):
            of_samples.add(node.name)  # not what is read of moving statistics, which each micro-batch writes
        combines = node.name in of_samples - after and any(kinds[v].coupled for v in node.values() if v in kinds)
        if node.name == join or not (combines or sources & coupled) or node.op in SHAPE_OPS:
            continue
        coupled.add(node.name)
        if any(user not in before and graph.node(user).op not in SHAPE_OPS for user in used[node.name]):
            raise _own_statistics(node)


def _own_statistics(node: Node) -> CaptureError:
    layer = layer_of(node)
    return CaptureError(
        f"batch_norm='sync': layer {layer!r} computes statistics in a way of its own ({node.name!r}, {node.op}), and "
        "replicas join only the mean and variance of its input: take batch_norm='micro-batch'"
    )


# --- Trace a loss, and find out how micro-batches compute what one device computes from the whole batch


_REWRITES: Mapping[BatchNorm, Callable[[Captured], Captured]] = MappingProxyType(
    {"micro-batch": lambda captured: captured, "deferred": defer_statistics, "sync": _join_statistics}
)


def trace_loss(
    loss_fn: Traced,
    batch: Sequence[Any],
    batch_size: int,
    inexact: Inexact = "error",
    batch_loss: BatchLoss = False,
    batch_norm: BatchNorm = "micro-batch",
    *,
    trains: bool = True,
    signature: Sequence[tf.TensorSpec] | None = None,
) -> Captured:
    """Return the captured loss, rewritten so that the results of its micro-batches give those of the whole batch.

    ``batch_size``: any number of samples that the model accepts; shapes are inferred with it. ``batch_loss``: whether
    the end of the loss that combines samples is cut off as a loss head (see ``dependence.decide``). ``batch_norm``: see
    ``BatchNorm``. ``trains``, ``signature``: see ``capture``. Where the signature leaves inner lengths unknown, the
    result says which lengths it serves (``serves``): those at which it would be rewritten alike.

    Raises what ``capture``, ``defer_statistics`` and ``_join_statistics`` raise, and ExactnessError where a step would
    differ from one device's and ``inexact`` is "error".
    """
    captured = capture(loss_fn, batch, batch_norm=batch_norm, trains=trains, signature=signature)
    experiments = Experiments(captured, example_rows(captured, batch))
    find = partial(find_dependence, batch_size=batch_size, experiments=experiments, batch_loss=batch_loss)

    def accepts(captured: Captured) -> bool:
        return bool(probe_shapes(captured, batch_size)[1])

    def analyse(captured: Captured) -> Captured:
        return dataclasses.replace(captured, dependence=fit_sizes(captured, find(captured), find, accepts))

    analysed = [analyse(_take_apart(captured, find))]
    decisions = analysed[0].decisions
    if decisions.mixed and not decisions.exactness.undocumented:
        analysed.append(analyse(weigh_terms(analysed[0], decisions)))
    captured, dependence = analysed[-1], analysed[-1].decisions
    _report(captured, dependence, inexact, trains=trains)
    graph = use_rows(_mark(captured.graph, dependence), dependence)
    if dependence.loss_head:
        graph = mark_loss_head(graph, dependence.loss_head.own, dependence.loss_head.head_inputs)
    return _REWRITES[batch_norm](dataclasses.replace(_served(analysed, find), graph=graph))


def _take_apart(captured: Captured, find: Callable[[Captured], BatchDependence]) -> Captured:
    """Return the captured loss of a training step with outputs that can be put together from those of micro-batches.

    Any other output is left out, and the part after the gradients computes it from its inputs: for a root of a mean the
    graph of the loss has the mean as output, and the part after the gradients takes the root.
    """
    while captured.after is not None and len(captured.after.whole) > 1:
        dependence = find(captured)
        kinds = [dependence.kinds[value] for value in captured.after.whole[1:]]
        unknown = [
            value
            for value, kind, merge in zip(captured.after.whole[1:], kinds, dependence.aux, strict=True)
            if merge is None and not (kind.coupled and kind.documented)
        ]
        after = take_inputs_of(captured.after, unknown)
        if after.whole == captured.after.whole:
            break
        captured = dataclasses.replace(captured, graph=captured.graph.replace(outputs=after.whole), after=after)
    return captured


def trace_uncut(loss_fn: Traced, batch: Sequence[Any], batch_size: int, *, trains: bool = True) -> Captured:
    """Return the captured loss as it is, for steps of one micro-batch on one replica: these are what one device runs.

    The trace is for batches of ``batch_size`` samples only where it needs to know that number. Raises what ``capture``
    raises.
    """
    signature = with_unknown(batch_signature(batch), unknown_lengths(batch))
    captured = capture(loss_fn, batch, trains=trains, signature=signature, sized=True)
    find = partial(find_uncut_dependence, batch_size=batch_size)
    captured = dataclasses.replace(captured, dependence=find(captured))
    return dataclasses.replace(_served([captured], find), graph=_mark(captured.graph, captured.decisions))


def _served(analysed: Sequence[Captured], find: Callable[[Captured], BatchDependence]) -> Captured:
    """Return the last of the analysed losses, with the lengths that it serves."""
    last = analysed[-1]
    served = ServedLengths(tuple(analysed), find, {last.example: True})
    return dataclasses.replace(last, serves=served.serves if has_open_lengths(last.signature) else None)


def trace_batch(
    loss_fn: Traced,
    batch: Sequence[Any],
    batch_size: int,
    inexact: Inexact,
    batch_loss: BatchLoss,
    batch_norm: BatchNorm,
    *,
    trains: bool = True,
    earlier: Sequence[Sequence[tf.TensorSpec]] = (),
    compiled: bool = False,
) -> Captured:
    """Return what ``trace_loss`` does, with the inner lengths unknown that TensorFlow would leave unknown.

    ``earlier``: the signatures of traces of this loss that differ in inner lengths only and do not serve the batch;
    ``compiled``: XLA compiles the stages, so lengths that differ from earlier ones stay known. The loss is traced for
    the lengths of the batch where it is exact only so, or where an earlier trace has the same unknown lengths. Other
    parameters: see ``trace_loss``.
    """
    known = batch_signature(batch)
    opened = open_signature(plain_function(loss_fn), known, () if compiled else earlier)
    opened = with_unknown(opened, unknown_lengths(batch))

    def trace(inexact: Inexact, signature: Sequence[tf.TensorSpec]) -> Captured:
        return trace_loss(
            loss_fn, batch, batch_size, inexact, batch_loss, batch_norm, trains=trains, signature=signature
        )

    if opened == known or opened in earlier:
        return trace(inexact, known)
    for signature in (opened, known):
        with contextlib.suppress(ExactnessError):
            return trace("error", signature)
    return trace(inexact, opened)  # inexact either way: it raises, warns or goes on as the user wants


def _mark(graph: Graph, dependence: BatchDependence) -> Graph:
    """Return the graph in which nodes that run once, add to a variable, or combine from parts have an attribute."""
    nodes = []
    for node in graph.nodes:
        if node.name in dependence.once:
            node = node.with_attrs(once=True)
        if node.name in dependence.adds:
            node = node.with_attrs(adds=True)
        if lists := dependence.captured_lists.get(node.name):
            node = node.with_attrs(captures=tuple(dict.fromkeys(value.node for value in lists)))
        if node.name in dependence.partials:
            node = node.with_attrs(**{COMBINES: dependence.partials[node.name]})
        nodes.append(node)
    return graph.replace(nodes=tuple(nodes))


def report_exactness(name: str, reasons: Sequence[Inexactness], inexact: Inexact, places: str = "") -> None:
    """React to undocumented ``reasons`` for which a step of the loss ``name`` would differ from one device's.

    ``places``: the files and lines of a training step that they are about. Raises ExactnessError, warns, or does
    nothing, as ``inexact`` says.
    """
    prefix = f"{places}: " if places else ""
    table = Exactness(tuple(reasons))
    if reasons and inexact == "error":
        raise ExactnessError(f"{prefix}a pipelined step of {name} would not equal one device's step:\n{table}")
    if reasons and inexact == "warn":
        warn_user(f"{prefix}a pipelined step of {name} does not equal one device's step:\n{table}")


def _report(captured: Captured, dependence: BatchDependence, inexact: Inexact, *, trains: bool) -> None:
    name, reasons, after = captured.graph.name, dependence.exactness.undocumented, captured.after
    if reasons and inexact == "error" and captured.several:
        raise SeveralPhasesError(captured.apart, joined=False)  # each target by itself may be exact
    found = [] if after is None else [after.place_of(reason.node or reason.layer) for reason in reasons]
    report_exactness(name, reasons, inexact, ", ".join(dict.fromkeys(found)))
    if dependence.grows and trains and after is None:
        message = f"the loss of {name} is a sum over the batch: its gradient grows with the batch size"
        warn_user(message)
