"""What is known of a model's layers before anything runs: bytes sent, kept and trained, and work by roofline.

The model is differentiated once, as one stage; TensorFlow names each backward op after the forward op whose
gradient it computes, which tells its layer.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dapple_tf.frontend.capture import Captured
from dapple_tf.frontend.gradients import differentiate
from dapple_tf.frontend.shapes import infer_shapes, mark_batch
from graph_passes.analysis.layers import SHAPE_OPS, Layers, find_layers, variables_of, written_variables
from graph_passes.analysis.op_costs import FREE_OPS, VIEW_OPS, flops, moved_bytes, value_bytes
from graph_passes.ir.graph import Effect, Function, Graph, Node, Shape, Value
from graph_passes.passes.backward import StageGradients, prune_gradients, split_backward
from graph_passes.passes.partition import partition
from profiler.measure import Floats
from profiler.peaks import Peak

_SMALL_OPS = SHAPE_OPS | {"BroadcastGradientArgs"}
_LISTS = "variant"  # what a While loop keeps for its backward, an iteration each


@dataclass(frozen=True)
class LayerFacts:
    """Figures of every layer for a batch of ``batch_size`` samples, in the order of ``layers``.

    ``activation_bytes``: what crosses the cut after the layer, skips over it included (the last layer sends nothing).
    ``stash_bytes``: tensors of forward, and batch arguments, that backward reads; each counts once, at the layer
    that makes it where that layer's backward reads it, else at the first layer whose backward does. Variables, what
    is computed from nothing else, and whole numbers computed from shapes are not counted. ``parameter_bytes``:
    variables that a gradient reaches, each at the first layer that reads it. ``lists``: layers whose While loops keep
    lists of unknown length, which ``stash_bytes`` leaves out.
    """

    captured: Captured
    layers: Layers
    batch_size: int
    activation_bytes: tuple[float, ...]
    stash_bytes: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    lists: tuple[str, ...]
    _joint: Graph
    _shapes: Mapping[str, Sequence[Shape]]
    _backward: Mapping[str, int]

    @property
    def names(self) -> tuple[str, ...]:
        """The layers' names."""
        return tuple(layer.name for layer in self.layers.layers)

    @property
    def uncuttable(self) -> tuple[int, ...]:
        """Positions where no stage may start."""
        return tuple(cut.position for cut in self.layers.cuts if cut.problem)

    @property
    def unsplittable(self) -> tuple[int, ...]:
        """Positions where stages of unequal replicas cannot meet."""
        return tuple(cut.position for cut in self.layers.cuts if not cut.splittable)

    def forward_seconds(self, peak: Peak) -> Floats:
        """Seconds of each layer's forward by the roofline of its ops."""
        homes = {name: i for i, layer in enumerate(self.layers.layers) for name in layer.nodes}
        return self._sum(homes, peak)

    def backward_seconds(self, peak: Peak) -> Floats:
        """Seconds of each layer's backward by the roofline of the ops of the differentiated graph."""
        return self._sum(self._backward, peak)

    def _sum(self, homes: Mapping[str, int], peak: Peak) -> Floats:
        total = np.zeros(len(self.layers.layers))
        for node in self._joint.nodes:
            if node.name in homes:
                total[homes[node.name]] += _op_seconds(self._joint, node, self._shapes, peak, self.batch_size)
        return total


def _op_seconds(graph: Graph, node: Node, shapes: Mapping[str, Sequence[Shape]], peak: Peak, batch_size: int) -> float:
    """Return the roofline seconds of one op on a device of these ``peak`` figures."""
    if node.op in FREE_OPS:
        return 0.0
    return peak.seconds(flops(graph, node, shapes), moved_bytes(graph, node, shapes, batch_size))


def examine_layers(captured: Captured, batch_size: int) -> LayerFacts:
    """The facts of every layer of a captured loss; nothing runs.

    Raises PartitionError or CaptureError for a loss that cannot be pipelined.
    """
    shapes = infer_shapes(captured, batch_size)
    captured = replace(captured, graph=mark_batch(captured.graph, shapes, batch_size))
    layers = find_layers(captured.graph)
    stages = partition(layers, [])
    joint, found = differentiate(captured, stages)
    joint = joint.replace(inputs=captured.graph.inputs)
    gradients = prune_gradients(joint, found)
    ((forward, backward),) = split_backward(stages, joint, gradients)
    shapes = {**shapes, **infer_shapes(replace(captured, graph=joint), batch_size)}
    homes = {name: i for i, layer in enumerate(layers.layers) for name in layer.nodes}
    attributed = _attribute(joint, backward, homes, gradients[0])
    stash, lists = _stash(joint, forward, backward, homes, attributed, shapes, batch_size)
    trained = [name for name, _ in gradients[0].variables]
    return LayerFacts(
        captured=captured,
        layers=layers,
        batch_size=batch_size,
        activation_bytes=(
            *(float(sum(value_bytes(joint, v, shapes, batch_size) for v in cut.crossing)) for cut in layers.cuts),
            0.0,
        ),
        stash_bytes=stash,
        parameter_bytes=_parameters(captured, layers, trained),
        lists=tuple(layers.layers[i].name for i in lists),
        _joint=joint,
        _shapes=shapes,
        _backward=attributed,
    )


def _attribute(joint: Graph, backward: Function, homes: Mapping[str, int], found: StageGradients) -> dict[str, int]:
    """The layer of each backward op: that of the forward op it is named after.

    Sums and conversions between gradients are named after none: they belong to the first of the layers whose
    gradients they take.
    """
    if not found.seeds:
        return {}
    scope = found.seeds[0][1].rpartition("/")[0] + "/gradients/"
    layer_of: dict[str, int] = {}
    inside = {node.name for node in backward.graph.nodes}
    for node in joint.nodes:
        if node.name not in inside or node.name in homes:
            continue
        layer = _named_after(node.name.removeprefix(scope), homes) if node.name.startswith(scope) else None
        if layer is None:
            sources = [layer_of[v.node] for v in node.inputs if v.node in layer_of]
            layer = min(sources, default=None)
        if layer is not None:
            layer_of[node.name] = layer
    return layer_of


def _named_after(name: str, homes: Mapping[str, int]) -> int | None:
    parts = name.split("/")
    for count in range(len(parts), 0, -1):
        forward = "/".join(parts[:count])
        if forward.endswith("_grad") and forward.removesuffix("_grad") in homes:
            return homes[forward.removesuffix("_grad")]
    return None


def _stash(
    joint: Graph,
    forward: Function,
    backward: Function,
    homes: Mapping[str, int],
    attributed: Mapping[str, int],
    shapes: Mapping[str, Sequence[Shape]],
    batch_size: int,
) -> tuple[tuple[float, ...], list[int]]:
    """Bytes kept for each layer's backward, and the layers that keep lists."""
    ported = dict(zip(backward.graph.inputs, backward.inputs, strict=True))
    taken = {value for port, value in zip(forward.outputs, forward.graph.outputs, strict=True) if port.role == "stash"}
    by_text = {str(value): value for value in taken}
    readers: dict[Value, set[int]] = {}
    for node in backward.graph.nodes:
        for value in node.inputs:
            port = ported.get(value.node)
            if port is None or port.role not in ("stash", "arg"):
                continue
            kept = Value(port.name) if port.role == "arg" else by_text[port.name]
            layers = readers.setdefault(_buffer(joint, kept), set())
            if node.name in attributed:
                layers.add(attributed[node.name])
    total, lists = [0.0] * (max(homes.values()) + 1), set()
    of_samples, of_sizes = _dependent(joint, stop=_SMALL_OPS), _dependent(joint)
    for value, layers in readers.items():
        whole = joint.type_of(value).dtype.name in ("int32", "int64")
        if value.node not in (of_samples if whole else of_sizes):
            continue
        maker = homes.get(value.node)
        layer = maker if maker in layers or not layers else min(layers)
        layer = 0 if layer is None else layer
        if joint.type_of(value).dtype.name == _LISTS:
            lists.add(layer)
        total[layer] += value_bytes(joint, value, shapes, batch_size)
    return tuple(total), sorted(lists)


def _dependent(joint: Graph, stop: Container[str] = ()) -> set[str]:
    """Nodes whose outputs depend on the batch's arguments, on chance or on state, not looking past ops in ``stop``."""
    written = written_variables(joint)
    found: set[str] = set()
    for node in joint.nodes:
        state = any(name in written for name in variables_of(joint, node))
        own = node.op == "arg" or node.effect not in (Effect.PURE, Effect.READ) or state
        if own or (node.op not in stop and any(value.node in found for value in node.inputs)):
            found.add(node.name)
    return found


def _buffer(joint: Graph, value: Value) -> Value:
    """The tensor whose memory ``value`` is: views are followed back."""
    node: Node = joint.node(value.node)
    while node.op in VIEW_OPS:
        value = node.inputs[value.index if node.op == "IdentityN" else 0]
        node = joint.node(value.node)
    return value


def _parameters(captured: Captured, layers: Layers, trained: Sequence[str]) -> tuple[float, ...]:
    """Bytes of the variables ``trained``, each at the first layer that reads it, directly or through what floats."""
    graph, floating = layers.graph, layers.floating
    reads: dict[str, frozenset[str]] = {}
    for node in graph.nodes:
        own = {node.name} if node.op == "variable" else set()
        through = (reads[source] for source in node.predecessors() if source in floating)
        reads[node.name] = frozenset(own.union(*through))
    left, total = set(trained), []
    for layer in layers.layers:
        used = frozenset[str]().union(*(reads[name] for name in layer.nodes)) & left
        left -= used
        sizes = (captured.variables[name] for name in sorted(used))
        total.append(float(sum(int(np.prod(v.shape.as_list())) * v.dtype.size for v in sizes)))
    return tuple(total)
