"""What must hold of a finished pipelined graph, proved before it runs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import networkx as nx

from graph_passes.errors import GraphError
from graph_passes.ir.graph import Graph, Node
from graph_passes.ir.names import at, nodes_of, replica_counts
from graph_passes.passes.order import call_name
from graph_passes.schedules.schedule import Schedule


@dataclass(frozen=True)
class VerifyPipeline:
    """Check the order of every device, the way of every gradient, and that every node has a place."""

    schedule: Schedule
    name: str = "verify_pipeline"

    def __call__(self, graph: Graph) -> Graph:
        """See the class."""
        verify_pipeline(graph, self.schedule)
        return graph


def verify_pipeline(graph: Graph, schedule: Schedule) -> None:
    """Raise GraphError unless the graph is acyclic, ordered, complete and placed."""
    edges: nx.DiGraph[str] = nx.DiGraph()
    edges.add_nodes_from(node.name for node in graph.nodes)
    edges.add_edges_from((source, node.name) for node in graph.nodes for source in node.predecessors())
    if not nx.is_directed_acyclic_graph(edges):
        cycle = nx.find_cycle(edges)
        raise GraphError("the pipelined graph has a cycle: " + " -> ".join(source for source, _ in cycle))
    verify_order(graph, schedule)
    verify_gradients(graph, edges)
    verify_sums(graph)
    verify_inlined(graph)
    verify_writers(graph, edges)
    for node in graph.nodes:
        if not node.device:
            raise GraphError(f"node {node.name!r} has no device")


def verify_order(graph: Graph, schedule: Schedule) -> None:
    """Each device's only possible order of calls is the schedule's.

    A chain of edges through all its calls admits one order, so it is enough that each neighbouring pair of
    the schedule is joined by an edge, and that there are no calls beside the schedule's.
    """
    scheduled: set[str] = set()
    if len(schedule.stages) != len(replica_counts(graph)):
        raise GraphError(f"the schedule has {len(schedule.stages)} stages, the graph {len(replica_counts(graph))}")
    for stage, replicas in enumerate(replica_counts(graph)):
        for replica in range(replicas):
            names = [call_name(action, replica) for action in schedule.stages[stage]]
            scheduled.update(names)
            for first, second in itertools.pairwise(names):
                if first not in set(graph.node(second).predecessors()):
                    raise GraphError(f"nothing makes {second!r} run after {first!r}, as the schedule wants")
    for node in nodes_of(graph, "forward", "backward", "weights"):
        if node.name not in scheduled:
            raise GraphError(f"{node.name!r} is not in the schedule")


def verify_writers(graph: Graph, edges: nx.DiGraph[str]) -> None:
    """A stage's update runs after its commit: both may write one variable, and the optimizer starts from the state."""
    commits = {node.integer("stage"): node.name for node in nodes_of(graph, "commit")}
    for node in nodes_of(graph, "update"):
        commit = commits.get(node.integer("stage")) if node.has("stage") else None
        if commit is not None and not nx.has_path(edges, commit, node.name):
            raise GraphError(f"nothing orders {node.name!r} after {commit!r}, and both may write the same variable")


def verify_gradients(graph: Graph, edges: nx.DiGraph[str]) -> None:
    """Every gradient that a backward call computes reaches an update, and through its AllReduce."""
    updates = {node.name for node in nodes_of(graph, "update")}
    if not updates:
        return
    reached: set[str] = set(updates)
    for name in reversed(list(nx.topological_sort(edges))):
        if name in reached:
            reached.update(edges.predecessors(name))
    consumers = graph.consumers()
    for node in nodes_of(graph, "backward", "weights"):
        ports = graph.function(node.string("function")).output_ports("variable", "gradient")
        taken = {value for user in consumers[node.name] if user.name in reached for value in user.inputs}
        for index, port in ports:
            if node.values()[index] not in taken:
                raise GraphError(f"the gradient of {port.name!r} from {node.name!r} reaches no update")
    for stage, count in enumerate(replica_counts(graph)):
        for name in (n.name for n in nodes_of(graph, "gradients") if n.integer("stage") == stage):
            if count > 1 and not any(user.op == "allreduce" for user in consumers[name]):
                raise GraphError(f"{name!r} is not all-reduced over the {count} replicas of its stage")


def verify_sums(graph: Graph) -> None:
    """What is summed over micro-batches is added in their order, and read when all of them are in it."""
    uses: dict[tuple[int, int, str], list[Node]] = {}
    for node in (*nodes_of(graph, "accumulate"), *(n for n in nodes_of(graph, "gradients") if not n.inputs)):
        for name in node.strings("variables"):
            uses.setdefault((node.integer("stage"), node.integer("replica"), name), []).append(node)
    for (_, _, variable), nodes in uses.items():
        nodes.sort(key=lambda node: (node.op == "gradients", node.integer("micro_batch") if node.inputs else 0))
        for first, second in itertools.pairwise(nodes):
            if first.name not in set(second.predecessors()):
                raise GraphError(
                    f"nothing makes {second.name!r} run after {first.name!r}, and both use the sum of the gradients of "
                    f"{variable!r}"
                )


def verify_inlined(graph: Graph) -> None:
    """An inlined backward, or part of one, waits for its whole forward: it reads what that, or a refresh, wrote."""
    for node in nodes_of(graph, "backward", "weights"):
        forward = at(node.integer("stage"), node.integer("replica"), node.integer("micro_batch"), "forward")
        if node.has("inline") and forward not in {control.source for control in node.controls}:
            raise GraphError(f"{node.name!r} is inlined, and no control edge makes it wait for {forward!r}")
