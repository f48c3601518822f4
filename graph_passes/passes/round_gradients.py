"""Round gradients of float32 variables that are computed in float16 to what that type holds, as on one device.

On one device a layer in mixed precision computes the gradient of its weights in float16, over the whole batch, and
casts it to float32. Where the sum over the batch is too large for float16 the gradient is infinite, which dynamic loss
scaling depends on. Micro-batches and replicas are summed in float32, so the sum is rounded to float16 afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.graph_passes.ir.graph import Graph, Node, Value, make_node
from dapple_tf.graph_passes.ir.names import Site, nodes_of, site_of
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.backward import StageGradients
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract

_NARROW = frozenset({"float16", "half"})
_UNCHANGING = frozenset({"Identity", "Reshape"})


@dataclass(frozen=True)
class Narrow:
    """The gradient that ``stage`` computes of ``variable`` has the type ``dtype`` before it is cast."""

    stage: int
    variable: str
    dtype: str


def find_narrow(joint: Graph, gradients: Sequence[StageGradients]) -> tuple[Narrow, ...]:
    """Return the dense gradients that are cast from float16 as their last operation.

    A variable that a stage uses several times in float16 is not among them: its gradients are cast one by one.
    """
    return tuple(
        Narrow(stage, name, kind)
        for stage, found in enumerate(gradients)
        for name, value in found.variables
        if (kind := _cast_from(joint, value)) in _NARROW
    )


def _cast_from(joint: Graph, value: Value) -> str:
    node = joint.node(value.node)
    while node.op in _UNCHANGING:
        node = joint.node(node.inputs[0].node)
    return joint.type_of(node.inputs[0]).dtype.name if node.op == "Cast" else ""


@dataclass(frozen=True)
class RoundGradients(BuiltInPass):
    """Add a ``round`` for each stage that has some of the gradients ``narrow``."""

    narrow: tuple[Narrow, ...]
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}),
        requires_if_trained=frozenset({OpName.REDUCED_GRADIENTS}),
        forbids=frozenset({OpName.ROUND, OpName.BARRIER}),
        may_produce=frozenset({OpName.ROUND}),
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph in which the complete gradients, and the gradients of stages that are added up, are rounded.

        Gradients from the loss head are not rounded, since it computes the whole batch at once.
        """
        dtypes = {(entry.stage, entry.variable): entry.dtype for entry in self.narrow}
        chosen: dict[Value, str] = {}
        for node in nodes_of(graph, OpName.REDUCED_GRADIENTS, OpName.TIED_SUM):
            tied = node.op == OpName.TIED_SUM
            names = [node.string("variable")] * len(node.inputs) if tied else node.strings("variables")
            for name, value in zip(names, node.inputs, strict=True):
                source = graph.node(value.node)
                if source.op not in (OpName.TIED_SUM, OpName.LOSS_HEAD) and (source.integer("stage"), name) in dtypes:
                    chosen[value] = dtypes[source.integer("stage"), name]
        added, rounded = _round(graph, chosen)
        users = (OpName.REDUCED_GRADIENTS, OpName.TIED_SUM)
        nodes = [node.replace_inputs(rounded) if node.op in users else node for node in graph.nodes]
        return graph.replace(nodes=(*nodes, *added)).sorted()


def _round(graph: Graph, chosen: Mapping[Value, str]) -> tuple[list[Node], dict[Value, Value]]:
    """Return a node for each site, and the rounded value of each of the values ``chosen``."""
    sites: dict[Site, list[Value]] = {}
    for value in chosen:
        sites.setdefault(site_of(graph.node(value.node)), []).append(value)
    added: list[Node] = []
    rounded: dict[Value, Value] = {}
    for site, values in sorted(sites.items()):
        kinds, dtypes = map(graph.type_of, values), tuple(chosen[value] for value in values)
        added.append(make_node(site.at(OpName.ROUND), OpName.ROUND, values, kinds, **site.attrs, dtypes=dtypes))
        rounded |= dict(zip(values, added[-1].values(), strict=True))
    return added, rounded
