"""Where a call-level node lives, said once: its name and its attributes."""

from __future__ import annotations

from graph_passes.ir.graph import Graph, Node


def at(stage: int, replica: int | None = None, micro_batch: int | None = None, what: str = "") -> str:
    """``stage1/replica0/mb3/forward``, leaving out what is None."""
    parts = [f"stage{stage}"]
    if replica is not None:
        parts.append(f"replica{replica}")
    if micro_batch is not None:
        parts.append(f"mb{micro_batch}")
    return "/".join([*parts, what] if what else parts)


def nodes_of(graph: Graph, *ops: str) -> tuple[Node, ...]:
    """The nodes of these ops, in order."""
    return tuple(node for node in graph.nodes if node.op in ops)


def gradient_function(graph: Graph, stage: int) -> str:
    """What the calls of a stage that give its variables' gradients are called: ``weights`` where backward is split."""
    return "weights" if at(stage, what="weights") in graph.function_by_name else "backward"


def replica_counts(graph: Graph) -> tuple[int, ...]:
    """Replicas of each stage, read off the forward calls."""
    counts: dict[int, int] = {}
    for node in nodes_of(graph, "forward"):
        stage = node.integer("stage")
        counts[stage] = max(counts.get(stage, 0), node.integer("replica") + 1)
    return tuple(counts[stage] for stage in sorted(counts))


def micro_batch_count(graph: Graph) -> int:
    """M, read off the forward calls."""
    return max(node.integer("micro_batch") for node in nodes_of(graph, "forward")) + 1
