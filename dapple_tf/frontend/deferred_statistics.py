"""Moving statistics of batch norm that are written once a step, from the sums of all micro-batches and replicas.

The writes of batch norm layers that normalise each micro-batch are removed from forward, which returns the sums of
their statistics instead. A function of its own writes the moving statistics from the sums of the whole batch; it is
traced from Keras's own code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.errors import CaptureError
from dapple_tf.exactness import BatchNorm
from dapple_tf.frontend.batch_norms import BatchNormCall, join_sums
from dapple_tf.frontend.captured import Captured
from dapple_tf.frontend.dependence.elementwise import is_integer
from dapple_tf.frontend.dependence.kinds import Form, Kind
from dapple_tf.frontend.read_graph import read_graph
from dapple_tf.graph_passes.analysis.layers import layer_of, live_nodes
from dapple_tf.graph_passes.analysis.loss_head import mark_statistics
from dapple_tf.graph_passes.ir.extract import extract_function
from dapple_tf.graph_passes.ir.graph import Effect, Function, Graph, Node, Role, Value, ancestors, attributes
from dapple_tf.graph_passes.ir.names import at
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.partition import StageGraph


def defer_statistics(captured: Captured) -> Captured:
    """Return the captured loss whose batch norm layers give sums in place of writes that each micro-batch would do.

    Raises CaptureError for a layer that writes other statistics than the mean and the variance of its input, and for
    one whose call is not seen in the loss.
    """
    graph = captured.graph
    sums = {node.integer("batch_norm"): call for call in captured.batch_norms if (node := _find_node(captured, call))}
    dropped = statistics_writes(captured, "deferred")
    for node in dropped:
        _check_known(captured, node, sums.get(node.integer("batch_norm")))
    numbers = sorted({node.integer("batch_norm") for node in dropped})
    names = frozenset(node.name for node in dropped)
    marked = mark_statistics(
        drop_nodes(graph, names), {Value(sums[i].sums.op.name): f"batch_norm/{i}" for i in numbers}
    )
    return dataclasses.replace(captured, graph=marked, dropped=names)


def _find_node(captured: Captured, call: BatchNormCall) -> Node | None:
    """Return the node of a call's sums, if it is a layer's call in the trace itself.

    TensorFlow traces a function that makes variables (of layers not built yet) once before, in another graph.
    """
    node = captured.graph.by_name.get(call.sums.op.name) if call.sums.graph is captured.func_graph else None
    return node if node is not None and node.has("batch_norm") else None


def _check_known(captured: Captured, node: Node, call: BatchNormCall | None) -> None:
    """Raise CaptureError unless ``node`` writes moving statistics whose sums are known from ``call``."""
    others = set() if call is None else {*node.strings("writes")} - _moving_names(captured, call)
    if call is None or others:
        what = f"writes {', '.join(sorted(others))} too" if others else "computes its statistics in a way of its own"
        layer = layer_of(node)
        raise CaptureError(
            f"batch_norm='deferred': layer {layer!r} {what}, and only a moving mean and variance of its input can be "
            "deferred: take batch_norm='micro-batch'"
        )


def _moving_names(captured: Captured, call: BatchNormCall) -> set[str]:
    """Return the names of a layer's moving mean and variance."""
    wanted = {id(call.layer.moving_mean.value), id(call.layer.moving_variance.value)}
    return {name for name, variable in captured.variables.items() if id(variable) in wanted}


def drop_nodes(graph: Graph, names: frozenset[str]) -> Graph:
    """Return the graph without these nodes, whose outputs nothing takes, and without the control edges from them."""
    return graph.replace(
        nodes=tuple(
            dataclasses.replace(node, controls=tuple(c for c in node.controls if c.source not in names))
            for node in graph.nodes
            if node.name not in names
        )
    )


@dataclass(frozen=True)
class TracedStatistics:
    """The functions that write moving statistics at the end of a step.

    ``functions``: of the stages; they take sums and variables. ``constants`` and ``library``: what they need besides,
    as ``StagedModel`` has it. ``traces``: the FuncGraphs that they were read from.
    """

    functions: tuple[Function, ...] = ()
    constants: Mapping[str, tf.Tensor] = field(default_factory=dict)
    library: Mapping[str, bytes] = field(default_factory=dict)
    traces: tuple[Any, ...] = ()


def trace_statistics(captured: Captured, stages: StageGraph, owner: Mapping[str, int]) -> TracedStatistics:
    """Return the functions that write the moving statistics from the sums of the whole batch.

    ``owner``: the stage of each variable that stage functions use. A layer's statistics are written on the stage that
    uses its moving mean for something else, or on the first stage that calls the layer.
    """
    calls = {call.sums.op.name: call for call in captured.batch_norms}
    stage_of = {id(captured.variables[name].handle): stage for name, stage in owner.items()}
    by_stage: dict[int, dict[str, BatchNormCall]] = {}
    for name, value in stages.statistics.items():
        call = calls[value.node]
        handle = id(call.layer.moving_mean.value.handle)
        stage = stage_of.setdefault(handle, stages.stage_of(value.node) or 0)
        by_stage.setdefault(stage, {})[name] = call
    parts = [_trace_stage(captured, stage, by_stage[stage]) for stage in sorted(by_stage)]
    return TracedStatistics(
        tuple(function for part in parts for function in part.functions),
        {name: value for part in parts for name, value in part.constants.items()},
        {name: body for part in parts for name, body in part.library.items()},
        tuple(trace for part in parts for trace in part.traces),
    )


def _trace_stage(captured: Captured, stage: int, calls: Mapping[str, BatchNormCall]) -> TracedStatistics:
    def write(*sums: Any) -> None:
        with tf.name_scope("statistics"):  # so that no op has the name of a variable
            for call, of_call in zip(calls.values(), sums, strict=True):
                write_moving_statistics(call, *join_sums(of_call))

    specs = [tf.TensorSpec(call.sums.shape, tf.float64) for call in calls.values()]
    func_graph = tf.function(write, autograph=False).get_concrete_function(*specs).graph
    inputs: dict[str, Node] = {}
    constants: dict[str, tf.Tensor] = {}
    for name, tensor in zip(calls, func_graph.inputs, strict=False):
        inputs[tensor.op.name] = Node(f"sums/{name}", "arg", attrs=attributes({"port": name}))
    names = {id(variable.handle): name for name, variable in captured.variables.items()}
    for outside, placeholder in func_graph.captures:
        if id(outside) in names:
            inputs[placeholder.op.name] = Node(names[id(outside)], "variable")
        else:
            node = Node(f"statistics/{stage}/capture/{len(constants)}", "capture")
            inputs[placeholder.op.name], constants[node.name] = node, outside
    graph = read_graph(func_graph, inputs, "statistics")
    moving = {name for call in calls.values() for name in _moving_names(captured, call)}
    function = _extract(at(stage, what=OpName.WRITE_STATISTICS), graph, moving)
    return TracedStatistics((function,), constants, dict(graph.library), (func_graph,))


def write_moving_statistics(call: BatchNormCall, mean: Any, variance: Any) -> None:
    """Let Keras write what a layer writes where its input has this ``mean`` and ``variance``."""

    def moments(layer: Any, inputs: Any, mask: Any, compute: Any) -> tuple[Any, Any]:
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)

    shape = [1] * call.rank
    shape[call.layer.axis] = int(mean.shape[0])
    with internals.replace_moments(moments):
        call.layer.call(tf.zeros(shape, call.dtype), training=True)


def _extract(name: str, graph: Graph, variables: Collection[str]) -> Function:
    """Return the function that writes ``variables`` as the graph does."""
    writes = (node for node in graph.nodes if node.effect is Effect.WRITE)
    members = ancestors(graph, [node.name for node in writes if set(node.strings("writes")) <= set(variables)])

    def port_of(value: Value) -> tuple[Role, str] | None:
        source = graph.node(value.node)
        match source.op:
            case "arg":
                return "statistic", source.string("port")
            case "variable":
                return "variable", source.name
        return None

    return extract_function(name, graph, members, port_of, ())


# --- Refuse calls of batch norm layers whose statistics cannot be found in the graph of a loss


def statistics_writes(captured: Captured, choice: BatchNorm) -> list[Node]:
    """Return the nodes by which batch norm layers write moving statistics of each micro-batch.

    Raises CaptureError if another node writes such statistics, since the layer is then called inside that node. Raises
    CaptureError too if such a layer computes with the number of its samples: a call has only the samples of one
    micro-batch on one replica, and the statistics are taken over more. ``choice``: the value of ``batch_norm``, for the
    message.
    """
    once = captured.decisions.once
    writes = [node for node in captured.graph.nodes if node.effect is Effect.WRITE and node.name not in once]
    _check_seen(captured, writes, choice)
    found = [node for node in writes if node.has("batch_norm")]
    _check_sizes(captured.graph, captured.decisions.kinds, found, choice)
    return found


def _check_seen(captured: Captured, writes: Sequence[Node], choice: BatchNorm) -> None:
    """Raise CaptureError if a node that is no batch norm layer's own op writes such a layer's moving statistics."""
    others = {name: node for node in writes if not node.has("batch_norm") for name in node.strings("writes")}
    layers = {id(layer.moving_mean.value): layer for layer in internals.batch_norm_layers()} if others else {}
    for name, node in others.items():
        layer = layers.get(id(captured.variables.get(name)))
        if layer is not None:
            raise CaptureError(
                f"batch_norm={choice!r}: {node.name!r} ({node.op}) writes the statistics of layer {layer.name!r}: the "
                "layer is called in a nested tf.function, a loop or a condition, or not by its __call__. Call it in "
                "the loss itself, or take batch_norm='micro-batch'"
            )


def _check_sizes(graph: Graph, kinds: Mapping[Value, Kind], writes: Sequence[Node], choice: BatchNorm) -> None:
    """Raise CaptureError if a layer with one of the ``writes`` computes a float from the length of a batch axis."""
    calls, live = {node.integer("batch_norm") for node in writes}, live_nodes(graph)
    for node in graph.nodes:
        if node.name not in live or not node.has("batch_norm") or node.integer("batch_norm") not in calls:
            continue
        numbers = [value for value in node.values() if not is_integer(graph.type_of(value))]
        if any(kinds[value].form is Form.SIZE for value in numbers):
            raise CaptureError(
                f"batch_norm={choice!r}: layer {layer_of(node)!r} computes with the number of its samples "
                f"({node.name!r}, {node.op}): it sees those of one micro-batch on one replica, and its statistics are "
                "taken over more. Take batch_norm='micro-batch', or a layer that does not use that number"
            )
