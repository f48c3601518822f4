"""What runs is what the schedule says: measured times, the edges of the GraphDef, the size of the graph."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import pytest

import dapple_tf as dapple
from graph_passes.ir.graph import Graph, Node
from tests.equality.small_models import chain, data, sgd, weights

CALLS = ("forward", "backward", "weights")
SHAPES = [
    # stages, micro-batches, schedule, warm-up K_i of every stage (by hand, from the paper's formulas)
    (1, 4, "dapple-a", [1]),
    (2, 16, "dapple-a", [2, 1]),
    (2, 5, "gpipe", [5, 5]),
    (3, 8, "dapple-b", [5, 3, 1]),
    (4, 6, "dapple-a:D=2", [2, 2, 2, 1]),
    (4, 16, "dapple-b", [7, 5, 3, 1]),
    (4, 16, "dapple-a", [4, 3, 2, 1]),
]


def build(stages: int, micro_batches: int, schedule: str, **options: Any) -> tuple[Any, Any]:
    """A step of as many layers as stages, and a batch for it."""
    step = dapple.pipeline(
        chain(weights(stages)),
        optimizer=sgd(),
        stages=[f"layer{i}" for i in range(1, stages)],
        micro_batches=micro_batches,
        schedule=schedule,
        **options,
    )
    return step, data(micro_batches * 3 + 1)


def expected(stage: int, warm: int, micro_batches: int) -> list[str]:
    """``warm`` forwards, then a backward and a forward in turn, then the backwards that are left."""
    forwards = [f"{stage}F{m}" for m in range(micro_batches)]
    backwards = [f"{stage}B{m}" for m in range(micro_batches)]
    rest = itertools.zip_longest(backwards, forwards[warm:])
    return forwards[:warm] + [action for pair in rest for action in pair if action]


@pytest.mark.parametrize(("stages", "micro_batches", "schedule", "warm"), SHAPES)
def test_the_measured_order_is_the_schedules(stages: int, micro_batches: int, schedule: str, warm: list[int]) -> None:
    step, batch = build(stages, micro_batches, schedule)
    for _ in range(2):  # the first step may wait for things to be made ready
        step.record(*batch)
        for stage in range(stages):
            assert [str(a) for a in step.timeline.order(stage)] == expected(stage, warm[stage], micro_batches)
            events = [e for e in step.timeline.events if e.action.stage == stage]
            for first, second in itertools.pairwise(events):
                assert first.start <= first.end <= second.start


def test_every_replica_keeps_the_order() -> None:
    step, _ = build(3, 4, "dapple-a", replicas=[2, 1, 3])
    step.record(*data(4 * 4 + 1))
    for stage, (warm, replicas) in enumerate([(3, 2), (2, 1), (1, 3)]):
        for replica in range(replicas):
            assert [str(a) for a in step.timeline.order(stage, replica)] == expected(stage, warm, 4)


# --- the GraphDef


def owners(definition: Any, graph: Graph) -> dict[str, str]:
    """For each op of the GraphDef the IR node that it was made for (the ops' names say it)."""
    found = {}
    for op in definition.node:
        parts = op.name.split("/")
        prefixes = ("/".join(parts[:end]) for end in range(len(parts), 0, -1))
        owner = next((prefix for prefix in prefixes if prefix in graph.by_name), None)
        if owner is not None:
            found[op.name] = owner
    return found


def control_edges(definition: Any, owner: dict[str, str], ops: tuple[str, ...] | None) -> dict[str, set[str]]:
    """IR node -> IR nodes whose ops its ops (of these kinds) wait for by control edges."""
    edges = defaultdict(set)
    for op in definition.node:
        if op.name in owner and (ops is None or op.op in ops):
            sources = (owner.get(name[1:], name) for name in op.input if name.startswith("^"))
            edges[owner[op.name]].update(source for source in sources if source != owner[op.name])
    return edges


@pytest.mark.parametrize(
    ("stages", "micro_batches", "schedule", "options"),
    [
        (2, 3, "dapple-a", {}),
        (3, 4, "gpipe", {"replicas": [1, 2, 1]}),
        (4, 8, "dapple-b", {}),
        (2, 1, "gpipe", {}),
        (3, 4, "zb-h1", {}),
    ],
)
def test_the_graph_def_has_the_edges_of_the_ir_between_calls(
    stages: int, micro_batches: int, schedule: str, options: dict[str, Any]
) -> None:
    step, batch = build(stages, micro_batches, schedule, **options)
    step(*batch)
    calls = {node.name: node for node in step.graph.nodes if node.op in CALLS}
    owner = owners(step.graph_def, step.graph)
    found = control_edges(step.graph_def, owner, ("StatefulPartitionedCall", "PartitionedCall"))
    kinds = 3 if schedule == "zb-h1" else 2
    assert len(calls) == kinds * micro_batches * sum(options.get("replicas", [1] * stages))
    for name, node in calls.items():
        assert found[name] == {control.source for control in node.controls}, name
    assert any(found[name] & calls.keys() for name in calls) == (micro_batches > 1)


def test_edges_from_a_call_wait_for_its_results() -> None:
    """TensorFlow may inline a call, and an edge from it then waits for its side effects only."""
    step, batch = build(3, 4, "dapple-a")
    step(*batch)
    by_name = {op.name: op for op in step.graph_def.node}
    owner = owners(step.graph_def, step.graph)
    waits = 0
    for op in by_name.values():
        if op.op not in ("StatefulPartitionedCall", "PartitionedCall") or owner[op.name].rsplit("/")[-1] not in CALLS:
            continue
        sources = [by_name[name[1:]] for name in op.input if name.startswith("^")]
        for call in {owner[source.name] for source in sources if owner[source.name].endswith(CALLS)}:
            kinds = {source.op for source in sources if owner[source.name] == call}
            assert "IdentityN" in kinds, (op.name, call)
            waits += 1
    assert waits > 3 * 4


def test_everything_else_in_the_graph_def_waits_as_the_ir_says() -> None:
    """Each control edge of the IR is a path in the GraphDef, so updates stay behind the barrier."""
    step, batch = build(2, 3, "dapple-a")
    step(*batch)
    definition = step.graph_def
    owner = owners(definition, step.graph)
    edges = defaultdict(set)
    for op in definition.node:
        for name in op.input:
            source = name.lstrip("^").split(":")[0]
            if op.name in owner and source in owner:
                edges[owner[op.name]].add(owner[source])
    for node in step.graph.nodes:
        missing = {control.source for control in node.controls} - edges[node.name]
        assert not missing, (node.name, missing)


# --- size


def call_nodes(stages: int, micro_batches: int, layers_per_stage: int = 1) -> tuple[Node, ...]:
    step = dapple.pipeline(
        chain(weights(stages * layers_per_stage)),
        optimizer=sgd(),
        stages=[f"layer{i * layers_per_stage}" for i in range(1, stages)],
        micro_batches=micro_batches,
        example_batch=data(2 * micro_batches),
    )
    return step.graph.nodes


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 8), (2, 4), (3, 8), (4, 2), (4, 16)])
def test_the_graph_holds_five_nodes_a_stage_and_micro_batch_at_most(stages: int, micro_batches: int) -> None:
    """Forward, backward, accumulate, a slice, a seed; and for each stage and for the step a constant number."""
    assert len(call_nodes(stages, micro_batches)) <= 5 * stages * micro_batches + 6 * stages + 10


def test_the_graph_does_not_grow_with_the_model() -> None:
    assert len(call_nodes(2, 4, layers_per_stage=1)) == len(call_nodes(2, 4, layers_per_stage=5))
