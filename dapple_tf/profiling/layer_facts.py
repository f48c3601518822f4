"""Per-layer facts from the graph alone: boundary bytes, stash bytes, parameter bytes, and seconds by roofline.

The model is differentiated once, as one stage. TensorFlow names each backward op after the forward op whose gradient
it computes, which assigns it to a layer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dapple_tf.frontend.captured import Captured
from dapple_tf.frontend.gradients import differentiate
from dapple_tf.frontend.inference import Shapes
from dapple_tf.frontend.shapes import infer_shapes, mark_batch
from dapple_tf.graph_passes.analysis.layers import SMALL_OPS, Layers, find_layers, variables_of, written_variables
from dapple_tf.graph_passes.analysis.op_costs import (
    FREE_OPS,
    VIEW_OPS,
    OpClass,
    flops,
    moved_bytes,
    op_class,
    value_bytes,
)
from dapple_tf.graph_passes.ir.graph import Effect, Function, FunctionRef, Graph, Node, Shape, Value
from dapple_tf.graph_passes.ir.names import without_target
from dapple_tf.graph_passes.passes.backward import StageGradients, prune_gradients, split_backward
from dapple_tf.graph_passes.passes.partition import partition
from dapple_tf.internals import LOOP_OPS
from dapple_tf.profiler.measure import Floats
from dapple_tf.profiler.peaks import Peak
from dapple_tf.profiler.profile import Timing

_LEAST_LARGEST_SIZE = 64  # samples: the least of the largest batch sizes that times are computed for
_LIST_DTYPE = "variant"  # of the lists in which a While loop stashes a tensor for each iteration


@dataclass(frozen=True)
class Kernel:
    """An op of a layer that a device runs ``count`` times, with its floating-point operations and ``moved`` bytes."""

    layer: int
    kind: OpClass
    flops: float
    moved: float
    count: int


@dataclass(frozen=True)
class LayerFacts:
    """Facts of every layer for a batch of ``batch_size`` samples, in the order of ``layers``.

    ``activation_bytes``: the tensors that cross the cut after the layer, skip connections included (0 for the last
    layer). ``stash_bytes``: forward tensors and batch arguments that backward reads; each counts once, at the layer
    that computes it if that layer's backward reads it, else at the first layer whose backward does. Variables, tensors
    computed only from variables, and integers computed from shapes do not count. ``parameter_bytes``: variables that a
    gradient reaches, each at the first layer that reads it. ``lists``: names of layers whose While loops stash lists of
    unknown length, which ``stash_bytes`` leaves out.
    """

    captured: Captured
    layers: Layers
    batch_size: int
    activation_bytes: tuple[float, ...]
    stash_bytes: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    lists: tuple[str, ...]
    _joint: Graph
    _shapes: Shapes
    _backward_layers: Mapping[str, int]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers."""
        return tuple(layer.name for layer in self.layers.layers)

    @property
    def uncuttable(self) -> tuple[int, ...]:
        """Positions where no stage may start."""
        return tuple(cut.position for cut in self.layers.cuts if cut.problem)

    @property
    def unsplittable(self) -> tuple[int, ...]:
        """Positions where the stages before and after must have equally many replicas."""
        return tuple(cut.position for cut in self.layers.cuts if not cut.splittable)

    def forward_seconds(self, peak: Peak) -> Floats:
        """Return the seconds of each layer's forward by the roofline of its ops."""
        return self._sum_seconds(self.forward_kernels(), peak)

    def backward_seconds(self, peak: Peak) -> Floats:
        """Return the seconds of each layer's backward by the roofline of its ops in the differentiated graph."""
        return self._sum_seconds(self.backward_kernels(), peak)

    def timings(self, peak: Peak) -> tuple[Timing, ...]:
        """Return the seconds of each layer by the roofline at other batch sizes: powers of 2 up to 4 times the batch.

        The largest size is at least 64 samples. A small micro-batch takes more seconds for each sample, since kernels
        read all weights and wait for their launch. The operations and bytes of an op are taken as linear in the
        samples. Empty where the model does not accept twice the batch.
        """
        doubled = infer_shapes(replace(self.captured, graph=self._joint), 2 * self.batch_size)
        if not doubled:
            return ()
        twice = replace(self, batch_size=2 * self.batch_size, _shapes=doubled)  # used for its kernels alone
        pairs = [
            list(zip(self.forward_kernels(), twice.forward_kernels(), strict=True)),
            list(zip(self.backward_kernels(), twice.backward_kernels(), strict=True)),
        ]
        largest = max(_LEAST_LARGEST_SIZE, 4 * self.batch_size)
        sizes = [size for size in (2**i for i in range(largest.bit_length())) if size != self.batch_size]
        return tuple(
            Timing(size, *(tuple(self._sum_seconds(_scaled(part, size / self.batch_size), peak)) for part in pairs))
            for size in sizes
        )

    def forward_kernels(self) -> Iterator[Kernel]:
        """Yield the ops of each layer's forward."""
        return self._kernels({name: i for i, layer in enumerate(self.layers.layers) for name in layer.nodes})

    def backward_kernels(self) -> Iterator[Kernel]:
        """Yield the ops of each layer's backward.

        The loops of a layer's backward take tensors of unknown shapes from lists. In their place those of its forward
        count, run twice as often, since the backward of a product takes two products.
        """
        loops = {node.name for node in self._joint.nodes if node.op in LOOP_OPS}
        others = {name: layer for name, layer in self._backward_layers.items() if name not in loops}
        with_loops = {self._backward_layers[name] for name in loops & self._backward_layers.keys()}
        forward = {name: i for i in with_loops for name in self.layers.layers[i].nodes if name in loops}
        yield from self._kernels(others)
        yield from (replace(kernel, count=2 * kernel.count) for kernel in self._kernels(forward))

    def _kernels(self, layer_of: Mapping[str, int]) -> Iterator[Kernel]:
        for node in self._joint.nodes:
            if node.name in layer_of:
                yield from _kernels_of(self._joint, node, self._shapes, self.batch_size, layer_of[node.name])

    def _sum_seconds(self, kernels: Iterable[Kernel], peak: Peak) -> Floats:
        total = np.zeros(len(self.layers.layers))
        for kernel in kernels:
            total[kernel.layer] += kernel.count * peak.seconds(kernel.flops, kernel.moved, kernel.kind)
        return total


def _scaled(pairs: Iterable[tuple[Kernel, Kernel]], ratio: float) -> Iterator[Kernel]:
    """Yield the kernels for ``ratio`` times the batch; ``pairs``: those for the batch, and for twice the batch."""
    for one, two in pairs:
        flops = max(0.0, one.flops + (two.flops - one.flops) * (ratio - 1))
        moved = max(0.0, one.moved + (two.moved - one.moved) * (ratio - 1))
        yield Kernel(one.layer, one.kind, flops, moved, one.count)


def _kernels_of(
    graph: Graph, node: Node, shapes: Shapes, batch_size: int, layer: int, count: int = 1, kind: OpClass | None = None
) -> Iterator[Kernel]:
    """Yield one op, or those in the body of a loop, as often as it runs; ``kind``: in place of the class of the op."""
    if node.op in FREE_OPS:
        return
    name = node.attr("body") if node.op in LOOP_OPS else None
    body = shapes.bodies.get((node.name, name.name)) if isinstance(name, FunctionRef) else None
    if body is None:
        moved = moved_bytes(graph, node, shapes, batch_size)
        yield Kernel(layer, kind or op_class(node.op), flops(node, shapes), moved, count)
        return
    count *= _count_rounds(graph, node, shapes)
    for inner in body.graph.nodes:
        yield from _kernels_of(body.graph, inner, body.shapes, batch_size, layer, count, "loop")


def _count_rounds(graph: Graph, loop: Node, shapes: Shapes) -> int:
    """Return how often a loop runs: once for each element of the longest tensor that it takes as a list.

    One that takes no such list, or of unknown length, counts as if it ran once.
    """
    lists = (graph.node(value.node) for value in loop.inputs)
    tensors = [shapes.get(node.inputs[0].node, ()) for node in lists if node.op == "TensorListFromTensor"]
    return max((outputs[0].dims[0] or 1 for outputs in tensors if outputs and outputs[0].dims), default=1)


def examine_layers(captured: Captured, batch_size: int) -> LayerFacts:
    """Return the facts of every layer of a captured loss; nothing runs.

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
    of_joint = infer_shapes(replace(captured, graph=joint), batch_size)
    known = Shapes({**shapes, **of_joint}, of_joint.bodies)
    forward_layers = {name: i for i, layer in enumerate(layers.layers) for name in layer.nodes}
    backward_layers = _assign_backward(joint, backward, forward_layers, gradients[0])
    stash, lists = _stash_bytes(joint, forward, backward, forward_layers, backward_layers, known, batch_size)
    return LayerFacts(
        captured=captured,
        layers=layers,
        batch_size=batch_size,
        activation_bytes=(
            *(float(sum(value_bytes(joint, v, known, batch_size) for v in cut.crossing)) for cut in layers.cuts),
            0.0,
        ),
        stash_bytes=stash,
        parameter_bytes=_parameter_bytes(captured, layers, {*map(without_target, gradients[0].trained)}),
        lists=tuple(layers.layers[i].name for i in lists),
        _joint=joint,
        _shapes=known,
        _backward_layers=backward_layers,
    )


def _assign_backward(
    joint: Graph, backward: Function, forward_layers: Mapping[str, int], gradients: StageGradients
) -> dict[str, int]:
    """Return the layer of each backward op: that of the forward op that it is named after.

    Sums and conversions of gradients are named after no forward op: they belong to the first of the layers whose
    gradients they take.
    """
    if not gradients.seeds:
        return {}
    scope = re.compile(re.escape(gradients.seeds[0][1].rpartition("/")[0]) + r"/gradients(_\d+)?/")  # one a target
    layer_of: dict[str, int] = {}
    members = {node.name for node in backward.graph.nodes}
    for node in joint.nodes:
        if node.name not in members or node.name in forward_layers:
            continue
        of_gradient = scope.match(node.name)
        layer = _named_layer(node.name[of_gradient.end() :], forward_layers) if of_gradient else None
        if layer is None:
            layer = min((layer_of[v.node] for v in node.inputs if v.node in layer_of), default=None)
        if layer is not None:
            layer_of[node.name] = layer
    return layer_of


def _named_layer(name: str, forward_layers: Mapping[str, int]) -> int | None:
    """Return the layer of the forward op in a backward op's name (``dense/MatMul_grad/MatMul``), or None."""
    parts = name.split("/")
    for count in range(len(parts), 0, -1):
        forward = "/".join(parts[:count])
        if forward.endswith("_grad") and forward.removesuffix("_grad") in forward_layers:
            return forward_layers[forward.removesuffix("_grad")]
    return None


def _stash_bytes(
    joint: Graph,
    forward: Function,
    backward: Function,
    forward_layers: Mapping[str, int],
    backward_layers: Mapping[str, int],
    shapes: Mapping[str, Sequence[Shape]],
    batch_size: int,
) -> tuple[tuple[float, ...], list[int]]:
    """Return the bytes stashed for each layer's backward, and the layers that stash lists."""
    depends_on_sizes = _dependent_nodes(joint)
    depends_on_values = _dependent_nodes(joint, stop=SMALL_OPS)
    total, lists = [0.0] * (max(forward_layers.values()) + 1), set()
    for value, readers in _stash_readers(joint, forward, backward, backward_layers).items():
        dtype = joint.type_of(value).dtype.name
        counted = depends_on_values if dtype in ("int32", "int64") else depends_on_sizes
        if value.node not in counted:
            continue
        producer = forward_layers.get(value.node)
        layer = producer if producer in readers or not readers else min(readers)
        layer = 0 if layer is None else layer
        if dtype == _LIST_DTYPE:
            lists.add(layer)
        total[layer] += value_bytes(joint, value, shapes, batch_size)
    return tuple(total), sorted(lists)


def _stash_readers(
    joint: Graph, forward: Function, backward: Function, backward_layers: Mapping[str, int]
) -> dict[Value, set[int]]:
    """Return the layers whose backward reads each stashed tensor or batch argument, directly or through a view."""
    ports = dict(zip(backward.graph.inputs, backward.inputs, strict=True))
    outputs = zip(forward.outputs, forward.graph.outputs, strict=True)
    stashed = {str(value): value for port, value in outputs if port.role == "stash"}
    readers: dict[Value, set[int]] = {}
    for node in backward.graph.nodes:
        for value in node.inputs:
            port = ports.get(value.node)
            if port is None or port.role not in ("stash", "arg"):
                continue
            source = Value(port.name) if port.role == "arg" else stashed[port.name]
            layers = readers.setdefault(_viewed_value(joint, source), set())
            if node.name in backward_layers:
                layers.add(backward_layers[node.name])
    return readers


def _dependent_nodes(joint: Graph, stop: Container[str] = ()) -> set[str]:
    """Return the nodes that depend on batch arguments, random numbers or state, other than through ops in ``stop``."""
    written = written_variables(joint)
    found: set[str] = set()
    for node in joint.nodes:
        uses_state = any(name in written for name in variables_of(joint, node))
        is_source = node.op == "arg" or node.effect not in (Effect.PURE, Effect.READ) or uses_state
        if is_source or (node.op not in stop and any(value.node in found for value in node.inputs)):
            found.add(node.name)
    return found


def _viewed_value(joint: Graph, value: Value) -> Value:
    """Return the tensor that owns the memory of ``value``, which may be a view."""
    node: Node = joint.node(value.node)
    while node.op in VIEW_OPS:
        value = node.inputs[value.index if node.op == "IdentityN" else 0]
        node = joint.node(value.node)
    return value


def _parameter_bytes(captured: Captured, layers: Layers, trained: Collection[str]) -> tuple[float, ...]:
    """Return the bytes of the ``trained`` variables, each at the first layer that reads it.

    A layer also reads the variables of nodes that belong to no layer (see ``Layers.floating``) and that it uses.
    """
    graph, floating = layers.graph, layers.floating
    reads: dict[str, frozenset[str]] = {}
    for node in graph.nodes:
        own = {node.name} if node.op == "variable" else set()
        through = (reads[source] for source in node.predecessors() if source in floating)
        reads[node.name] = frozenset(own.union(*through))
    remaining, total = set(trained), []
    for layer in layers.layers:
        used = frozenset[str]().union(*(reads[name] for name in layer.nodes)) & remaining
        remaining -= used
        variables = (captured.variables[name] for name in sorted(used))
        total.append(float(sum(int(np.prod(v.shape.as_list())) * v.dtype.size for v in variables)))
    return tuple(total)
