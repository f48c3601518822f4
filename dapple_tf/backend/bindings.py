"""The tf.Variables behind the names in a pipelined graph: the user's own, and the pipeline's copies and buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from dapple_tf.graph_passes.ir.graph import Graph, Node, Port
from dapple_tf.graph_passes.ir.names import STAGE_OPS, nodes_of, site_of, without_target
from dapple_tf.graph_passes.ir.ops import OpName

# Ops that use a replica's copy of a variable, where it has one.
_USE_COPIES = frozenset({*STAGE_OPS, OpName.REFRESH, OpName.READ_STATE})

# Ops that use a stage's own copy of the optimizer's step counter, where the stage counts its updates itself.
_COUNTING = frozenset({OpName.UPDATE, OpName.COUNT_UPDATE})


class Buffers:
    """The pipeline's own variables, created once and shared by all its programs: copies, and sums of gradients.

    ``updating``: True while a step writes variables; it lives on the ``home`` device.
    """

    def __init__(self, home: str) -> None:
        self._buffers: dict[tuple[int, str, str], tf.Variable] = {}
        with tf.init_scope(), tf.device(home):
            self.updating = tf.Variable(False, trainable=False)

    def like(self, variable: tf.Variable, device: str, purpose: str) -> tf.Variable:
        """Return the buffer on ``device`` with the dtype and shape of ``variable`` for this ``purpose``."""
        key = (id(variable), device, purpose)
        if key not in self._buffers:
            with tf.init_scope(), tf.device(device):
                self._buffers[key] = tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
        return self._buffers[key]


class StepVariables:
    """Implements ``handler.Bindings`` for one pipelined graph. ``variables``: the user's and the optimizer's."""

    def __init__(self, graph: Graph, variables: Mapping[str, tf.Variable], buffers: Buffers) -> None:
        self._variables = variables
        self.updating = buffers.updating
        self._copies: dict[tuple[int, int, str], tf.Variable] = {}
        self._versions: dict[tuple[int, int, str, int], tf.Variable] = {}
        self._counters: dict[tuple[int, str], tf.Variable] = {}
        self._accumulators: dict[tuple[int, int, str], tf.Variable] = {}
        for node in nodes_of(graph, OpName.REFRESH):
            stage, replica = site_of(node)
            for name in node.strings("variables"):
                copy = buffers.like(variables[name], node.device, f"copy of stage {stage}")
                self._copies[stage, replica, name] = copy
        for node in nodes_of(graph, OpName.STORE_VERSION):
            stage, replica = site_of(node)
            slot = node.integer("version")
            for name in node.strings("variables"):
                version = buffers.like(variables[name], node.device, f"version {slot} of stage {stage}")
                self._versions[stage, replica, name, slot] = version
        for node in nodes_of(graph, OpName.COUNT_UPDATE):
            if node.has("stage"):
                stage, name = node.integer("stage"), node.string("variable")
                self._counters[stage, name] = buffers.like(variables[name], node.device, f"counter of stage {stage}")
        for node in nodes_of(graph, OpName.GRADIENTS):
            stage, replica = site_of(node)
            for name in node.strings("variables") if not node.inputs else ():
                variable = without_target(name)
                purpose = f"sum of stage {stage} {name.removesuffix(variable)}"
                buffer = buffers.like(variables[variable], node.device, purpose)
                self._accumulators[stage, replica, name] = buffer

    def variable(self, node: Node, name: str) -> tf.Variable:
        if node.op in _COUNTING and node.has("stage"):
            return self._counters.get((node.integer("stage"), name), self._variables[name])
        key = (*site_of(node), name, node.integer("version")) if node.has("version") else None
        if key in self._versions:
            return self._versions[key]
        if node.op in _USE_COPIES:
            return self._copies.get((*site_of(node), name), self._variables[name])
        return self._variables[name]

    def owner(self, name: str) -> tf.Variable:
        return self._variables[name]

    def copies(self, node: Node, name: str) -> Sequence[tf.Variable]:
        copies = sorted(self._copies.items(), key=lambda item: item[0])
        return [copy for (stage, _, copied), copy in copies if (stage, copied) == (node.integer("stage"), name)]

    def resource(self, node: Node, port: Port) -> tf.Variable:
        if port.role != "sum":
            return self.variable(node, port.name)
        stage, replica = site_of(node)
        return self._accumulators[stage, replica, port.name]

    def accumulators(self, node: Node) -> Sequence[tf.Variable]:
        stage, replica = site_of(node)
        return [self._accumulators[stage, replica, name] for name in node.strings("variables")]
