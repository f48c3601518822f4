"""Put each node on a device: the nodes of a replica of a stage on its device, all others on the ``home`` device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import Graph
from dapple_tf.graph_passes.ir.names import replica_counts
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract


@dataclass(frozen=True)
class Place(BuiltInPass):
    """``devices[s][r]`` is the device of replica r of stage s, ``home`` that of the inputs, the loss and the aux."""

    devices: tuple[tuple[str, ...], ...]
    home: str
    contract: ClassVar[Contract] = Contract(requires=frozenset({OpName.FORWARD}))

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with a device on each node. Raises GraphError if ``devices`` do not match its replicas."""
        replicas, device_counts = replica_counts(graph), tuple(len(names) for names in self.devices)
        if replicas != device_counts:
            raise GraphError(f"the stages have {replicas} replicas, but there are {device_counts} devices for them")
        nodes = []
        for node in graph.nodes:
            device = self.home
            if node.has("stage"):
                device = self.devices[node.integer("stage")][node.integer("replica")]
            nodes.append(dataclasses.replace(node, device=device))
        return graph.replace(nodes=tuple(nodes))


@dataclass(frozen=True)
class PlaceRank(BuiltInPass):
    """Put the nodes of a rank's stages on ``device``, and those that belong to no stage on ``home``."""

    device: str
    home: str
    contract: ClassVar[Contract] = Contract(requires=frozenset({OpName.FORWARD}))

    def __call__(self, graph: Graph) -> Graph:
        """Return a rank's graph with a device on each node."""
        nodes = [
            dataclasses.replace(node, device=self.device if node.has("stage") else self.home) for node in graph.nodes
        ]
        return graph.replace(nodes=tuple(nodes))
