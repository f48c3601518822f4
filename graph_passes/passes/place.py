"""Put every node on a device: what belongs to a replica of a stage on its device, the rest at home."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from graph_passes.errors import GraphError
from graph_passes.ir.graph import Graph
from graph_passes.ir.names import replica_counts


@dataclass(frozen=True)
class Place:
    """``devices[s][r]`` is the device of replica r of stage s; ``home`` that of inputs, loss and aux."""

    devices: tuple[tuple[str, ...], ...]
    home: str
    name: str = "place"

    def __call__(self, graph: Graph) -> Graph:
        """See the class."""
        return place_nodes(graph, self.devices, self.home)


@dataclass(frozen=True)
class PlaceRank:
    """Put a rank's nodes on its ``device``, and what belongs to no stage ``home``."""

    device: str
    home: str
    name: str = "place_rank"

    def __call__(self, graph: Graph) -> Graph:
        """See the class."""
        nodes = [
            dataclasses.replace(node, device=self.device if node.has("stage") else self.home) for node in graph.nodes
        ]
        return graph.replace(nodes=tuple(nodes))


def place_nodes(graph: Graph, devices: Sequence[Sequence[str]], home: str) -> Graph:
    """The graph with a device on every node; GraphError when the devices do not match its replicas."""
    wanted, given = replica_counts(graph), tuple(len(names) for names in devices)
    if wanted != given:
        raise GraphError(f"the stages have {wanted} replicas, but devices are given for {given}")
    nodes = []
    for node in graph.nodes:
        device = home
        if node.has("stage"):
            device = devices[node.integer("stage")][node.integer("replica")]
        nodes.append(dataclasses.replace(node, device=device))
    return graph.replace(nodes=tuple(nodes))
