"""The variables behind the names: the user's own, moved to their stages, and the pipeline's copies and buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import tensorflow as tf

from dapple_tf import internals
from graph_passes.analysis.resident_variables import resident_variables
from graph_passes.analysis.variable_use import find_variables
from graph_passes.ir.graph import Graph, Node
from graph_passes.ir.names import nodes_of
from graph_passes.ir.ops import OpName

# Ops that use a replica's copy of a variable, where it has one.
_USE_COPIES = frozenset({OpName.FORWARD, OpName.BACKWARD, OpName.WEIGHTS, OpName.REFRESH, OpName.READ_STATE})


class Buffers:
    """The pipeline's own variables, made once and shared by all its programs: copies, and sums of gradients."""

    def __init__(self, home: str) -> None:
        self._made: dict[tuple[int, str, str], tf.Variable] = {}
        with tf.init_scope(), tf.device(home):
            self.updating = tf.Variable(False, trainable=False)

    def like(self, variable: tf.Variable, device: str, use: str) -> tf.Variable:
        """A variable on ``device`` of the type and shape of ``variable``, for one use."""
        key = (id(variable), device, use)
        if key not in self._made:
            with tf.init_scope(), tf.device(device):
                self._made[key] = tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
        return self._made[key]


class StepVariables:
    """Implements ``operations.Bindings`` for one pipelined graph."""

    def __init__(self, graph: Graph, variables: Mapping[str, tf.Variable], buffers: Buffers) -> None:
        self._variables = variables
        self._updating = buffers.updating
        self._copies: dict[tuple[int, int, str], tf.Variable] = {}
        self._buffers: dict[tuple[int, int, str], tf.Variable] = {}
        for node in nodes_of(graph, OpName.REFRESH):
            for name in node.strings("variables"):
                key = (node.integer("stage"), node.integer("replica"), name)
                self._copies[key] = buffers.like(variables[name], node.device, f"copy of stage {key[0]}")
        for node in nodes_of(graph, OpName.GRADIENTS):
            if not node.inputs:
                stage, replica = node.integer("stage"), node.integer("replica")
                for name in node.strings("variables"):
                    buffer = buffers.like(variables[name], node.device, f"sum of stage {stage}")
                    self._buffers[stage, replica, name] = buffer

    def variable(self, node: Node, name: str) -> tf.Variable:
        """See ``operations.Bindings``."""
        if node.op in _USE_COPIES:
            key = (node.integer("stage"), node.integer("replica"), name)
            return self._copies.get(key, self._variables[name])
        return self._variables[name]

    def owner(self, name: str) -> tf.Variable:
        """See ``operations.Bindings``."""
        return self._variables[name]

    def copies(self, name: str) -> Sequence[tf.Variable]:
        """See ``operations.Bindings``."""
        return [copy for (_, _, known), copy in sorted(self._copies.items(), key=lambda item: item[0]) if known == name]

    def accumulators(self, node: Node) -> Sequence[tf.Variable]:
        """See ``operations.Bindings``."""
        stage, replica = node.integer("stage"), node.integer("replica")
        return [self._buffers[stage, replica, name] for name in node.strings("variables")]

    @property
    def updating(self) -> tf.Variable:
        """See ``operations.Bindings``."""
        return self._updating


def move_to_device(graph: Graph, variables: Mapping[str, tf.Variable], device: str) -> None:
    """Move the variables that a rank's stage and its update use to the rank's device."""
    calls = [node for node in graph.nodes if node.has("function") and node.has("stage")]
    ports = [graph.function(node.string("function")).input_ports("variable") for node in calls]
    held = resident_variables(graph)  # the others are not here
    names = [name for name in dict.fromkeys(port.name for found in ports for _, port in found) if name in held]
    internals.move_variables([(variables[n], device) for n in names if not _same(variables[n].device, device)])


def move_to_stages(graph: Graph, variables: Mapping[str, tf.Variable]) -> None:
    """Move every variable to the device of what writes it: weights to their owner's, slots to their update's.

    What several updates share (the step counter, the learning rate) stays where it is.
    """
    device = {n.integer("stage"): n.device for n in nodes_of(graph, OpName.FORWARD) if n.integer("replica") == 0}
    homes = {name: device[stages[0]] for name, stages in find_variables(graph).users}
    updates = nodes_of(graph, OpName.UPDATE)
    used = [{port.name for _, port in graph.function(n.string("function")).input_ports("variable")} for n in updates]
    uses = Counter(name for names in used for name in names)
    for node, names in zip(updates, used, strict=True):
        if node.has("stage"):
            homes |= {name: node.device for name in names if uses[name] == 1 and name not in homes}
    moves = [(variables[name], home) for name, home in homes.items()]
    internals.move_variables([(v, home) for v, home in moves if not _same(v.device, home)])


def _same(first: str, second: str) -> bool:
    a, b = tf.DeviceSpec.from_string(first), tf.DeviceSpec.from_string(second)
    return (a.device_type, a.device_index) == (b.device_type, b.device_index)
