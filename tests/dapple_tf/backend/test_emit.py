"""The GraphDef of an emitted graph: devices, control edges, and what runs when."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.backend.emit import Part, emit
from dapple_tf.backend.handler import as_template, call
from dapple_tf.backend.operations import Operations
from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value, attributes, tensor
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from tests.dapple_tf.backend.builders import DEVICES, NamedVariables
from tests.equality.small_models import chain, data, sgd, weights

CALLS = ("forward", "backward", "inputs", "weights")
MIXED = "0F0 0F1 0I0 0F2 0B1 0W0 0I2 0W2; 1F0 1B0 1F1 1I1 1F2 1W1 1B2"
X = Node("x", OpName.INPUT, outputs=(tensor("float32", None),))
TIME = (tensor("float64"),)


def emit_graph(nodes: Sequence[Node], outputs: Sequence[str], bindings: NamedVariables | None = None) -> Any:
    """Return the function of a graph of one input, ``x``, that returns the first outputs of some nodes."""
    graph = Graph("g", (X, *nodes), ("x",), tuple(Value(name) for name in outputs))
    return emit([Part(graph, Operations(graph, bindings or NamedVariables(), {}, {}), {})], [tf.TensorSpec([None])])


def ops_of(function: Any, node: str) -> list[Any]:
    """Return the NodeDefs that were emitted for a node, in order."""
    return [op for op in function.graph.as_graph_def().node if op.name.startswith(f"{node}/")]


# --- nodes that differ only in their micro-batch share a template

SIZE = Node("size", OpName.BATCH_SIZE, (Value("x"),), (tensor("int64"),))
ROWS = (tensor("float64"), tensor("float32", None))


def slices(micro_batches: int) -> list[Node]:
    """Return the nodes that cut the batch into micro-batches."""
    cut = {"stage": 0, "replica": 0, "replicas": 1, "micro_batches": micro_batches}
    return [
        Node(f"s{m}", OpName.SLICE, (Value("size"), Value("x")), ROWS, attributes({**cut, "micro_batch": m}))
        for m in range(micro_batches)
    ]


def test_each_copy_of_a_template_has_its_own_micro_batch() -> None:
    nodes = slices(5)
    graph = Graph("g", (X, SIZE, *nodes), ("x",), tuple(Value(node.name, 1) for node in nodes))
    function = emit([Part(graph, Operations(graph, NamedVariables(), {}, {}), {})], [tf.TensorSpec([None])])
    rows = [tensor.numpy().tolist() for tensor in function(tf.range(7.0))]
    assert rows == [[0], [1], [2, 3], [4], [5, 6]]  # cut at the rows 7 m // 5


def test_a_handler_of_a_template_cannot_read_the_micro_batch() -> None:
    """Ops made with the number of one micro-batch would be copied for all others."""
    read = as_template(slices(1)[0])
    assert read.has("micro_batch")
    with pytest.raises(GraphError, match="not an integer"):
        read.integer("micro_batch")


def test_copies_wait_for_ops_without_outputs() -> None:
    """An import cannot name such an op: a constant stands between."""
    owner = tf.Variable(1.0)
    copies = [tf.Variable(5.0), tf.Variable(7.0)]
    bindings = NamedVariables({"v": owner, "w": owner}, {"w": copies})
    place = {"stage": 0, "replica": 0}
    commit = attributes({**place, "replicas": 2, "variables": ("w",)})
    read = attributes({**place, "variables": ("v",)})
    nodes = [Node("commit", OpName.COMMIT, attrs=commit)]
    nodes += [
        Node(f"read{i}", OpName.READ_VARIABLE, outputs=(tensor("float32"),), attrs=read).after("commit", "for the test")
        for i in range(4)
    ]
    function = emit_graph(nodes, [f"read{i}" for i in range(4)], bindings)
    assert [output.numpy() for output in function(tf.zeros([1]))] == [6] * 4
    (done,) = (op for op in ops_of(function, "commit") if op.op == "Const" and op.name.endswith("done"))
    assert [name.partition("/")[0] for name in done.input] == ["^commit"]
    for i in range(4):
        (reading,) = ops_of(function, f"read{i}")
        assert f"^{done.name}" in reading.input


# --- graphs written by hand


def test_each_op_is_on_the_device_of_its_node() -> None:
    nodes = [Node(f"t{i}", OpName.TIMESTAMP, outputs=TIME, device=DEVICES[i]) for i in range(3)]
    function = emit_graph(nodes, ["t0", "t2"])
    for i in range(3):
        assert {op.device for op in ops_of(function, f"t{i}")} == {DEVICES[i]}
    assert [output.device for output in function.outputs] == [DEVICES[0], DEVICES[2]]  # where they were computed


def test_ops_have_the_control_edges_of_their_nodes_and_no_others() -> None:
    """The clock is a stateful op: TensorFlow's automatic dependencies would put all stamps in a row."""
    first = Node("first", OpName.TIMESTAMP, outputs=TIME)
    alone = Node("alone", OpName.TIMESTAMP, outputs=TIME)
    last = Node("last", OpName.TIMESTAMP, outputs=TIME).after("first", "for the test")
    function = emit_graph([first, alone, last], ["first", "alone", "last"])
    edges = {node: [name for op in ops_of(function, node) for name in op.input] for node in ("first", "alone", "last")}
    assert edges == {"first": [], "alone": [], "last": ["^first/Timestamp"]}


def test_reads_and_writes_happen_in_the_order_of_the_edges() -> None:
    """An op of a handle that was captured inside of the control block would have no edge."""
    owner = tf.Variable(1.0)
    # Reads of "v" go to the owner, since only "w" has copies.
    bindings = NamedVariables({"v": owner, "w": owner}, {"w": [tf.Variable(5.0), tf.Variable(7.0)]})
    read = attributes({"stage": 0, "replica": 0, "variables": ("v",)})
    nodes = [
        Node("before", OpName.READ_VARIABLE, outputs=(tensor("float32"),), attrs=read),
        Node(
            "commit", OpName.COMMIT, attrs=attributes({"stage": 0, "replica": 0, "replicas": 2, "variables": ("w",)})
        ).after("before", "for the test"),
        Node("after", OpName.READ_VARIABLE, outputs=(tensor("float32"),), attrs=read).after("commit", "for the test"),
    ]
    function = emit_graph(nodes, ["before", "after"], bindings)
    writes = [op.name for op in ops_of(function, "commit") if op.op == "AssignVariableOp"]
    (reading,) = (op for op in ops_of(function, "after") if op.op == "ReadVariableOp")
    assert [name for name in reading.input if name.startswith("^")] == [f"^{name}" for name in writes]
    assert [output.numpy() for output in function(tf.zeros([1]))] == [1, 6]


def test_nodes_without_outputs_run_before_the_step_ends() -> None:
    bindings = NamedVariables()
    node = Node("begin", OpName.SET_UPDATING, attrs=attributes({"updating": True}))
    stamp = Node("stamp", OpName.TIMESTAMP, outputs=TIME)
    function = emit_graph([node, stamp], ["stamp"], bindings)
    function(tf.zeros([1]))
    assert bool(bindings.updating.numpy())


def test_the_batch_itself_may_be_an_output() -> None:
    (found,) = emit_graph([], ["x"])(tf.constant([1.0, 2.0]))
    np.testing.assert_array_equal(found, [1, 2])


# --- graphs of models


@functools.cache
def build(stages: int, micro_batches: int, schedule: str, replicas: tuple[int, ...] | None = None) -> Any:
    """Return a compiled step of as many layers as stages."""
    return dapple.pipeline(
        chain(weights(stages)),
        optimizer=sgd(),
        stages=[f"layer{i}" for i in range(1, stages)],
        micro_batches=micro_batches,
        schedule=schedule,
        replicas=replicas,
        example_batch=data(micro_batches * 3 + 1),
    )


def owners(definition: Any, graph: Graph) -> dict[str, str]:
    """Return for each op of the GraphDef the node that it was emitted for, which is in the op's name."""
    found = {}
    for op in definition.node:
        parts = op.name.split("/")
        prefixes = ("/".join(parts[:end]) for end in range(len(parts), 0, -1))
        owner = next((prefix for prefix in prefixes if prefix in graph.by_name), None)
        if owner is not None:
            found[op.name] = owner
    return found


def control_edges(definition: Any, owner: dict[str, str], ops: tuple[str, ...]) -> dict[str, set[str]]:
    """Return for each node the nodes whose ops its ops of these types wait for by control edges."""
    edges = defaultdict(set)
    for op in definition.node:
        if op.name in owner and op.op in ops:
            sources = (owner.get(name[1:], name) for name in op.input if name.startswith("^"))
            edges[owner[op.name]].update(source for source in sources if source != owner[op.name])
    return edges


@pytest.mark.parametrize(
    ("stages", "micro_batches", "schedule", "replicas"),
    [
        (2, 3, "dapple-a", None),
        (3, 4, "gpipe", (1, 2, 1)),
        (4, 8, "dapple-b", None),
        (2, 1, "gpipe", None),
        (3, 4, "zb-h1", None),
        (2, 3, MIXED, (1, 2)),
    ],
)
def test_calls_wait_for_the_calls_that_the_graph_says(
    stages: int, micro_batches: int, schedule: str, replicas: tuple[int, ...] | None
) -> None:
    step = build(stages, micro_batches, schedule, replicas)
    calls = {node.name: node for node in step.graph.nodes if node.op in CALLS}
    definition = step.graph_def
    found = control_edges(definition, owners(definition, step.graph), ("StatefulPartitionedCall", "PartitionedCall"))
    actions = ScheduleSpec.parse(schedule).build(stages, micro_batches).stages
    wanted = sum(len(own) * r for own, r in zip(actions, replicas or [1] * stages, strict=True))
    assert len(calls) == wanted
    for name, node in calls.items():
        assert found[name] == {control.source for control in node.controls}, name
    assert any(found[name] & calls.keys() for name in calls) == (micro_batches > 1)


def test_edges_from_a_call_start_at_its_op_where_nothing_is_inlined() -> None:
    step = build(3, 4, "gpipe", (1, 2, 1))
    definition = step.graph_def
    by_name = {op.name: op for op in definition.node}
    owner = owners(definition, step.graph)
    waits = 0
    for op in by_name.values():
        sources = [by_name[name[1:]] for name in op.input if name.startswith("^")]
        named = [(owner[source.name], source.op) for source in sources if source.name in owner]
        for source in {name for name, _ in named if name.endswith(CALLS) and name != owner.get(op.name)}:
            kinds = {kind for name, kind in named if name == source}
            assert kinds <= {"StatefulPartitionedCall", "PartitionedCall"}, (op.name, source)
            waits += 1
    assert waits > 3 * 4


@pytest.mark.parametrize("not_inlined", [True, False])
def test_a_call_that_may_be_inlined_has_ended_with_its_results_too(not_inlined: bool) -> None:
    """Where TensorFlow inlines a call, an edge from the call op waits only for its side effects."""
    function = tf.function(lambda x: (x + 1.0, x * 2.0)).get_concrete_function(tf.TensorSpec([]))
    with tf.Graph().as_default():
        outputs, ends = call(function, [tf.constant(1.0)], not_inlined=not_inlined)
    assert len(outputs) == 2
    assert [op.type for op in ends] == ["PartitionedCall", *([] if not_inlined else ["IdentityN"])]


def test_each_control_edge_of_the_graph_is_an_edge_of_the_graph_def() -> None:
    """So updates stay behind the barrier."""
    step = build(2, 3, "dapple-a")
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


def test_calls_are_on_the_devices_of_their_stages() -> None:
    step = build(3, 4, "gpipe", (1, 2, 1))
    owner = owners(step.graph_def, step.graph)
    devices = defaultdict(set)
    for op in step.graph_def.node:
        if "PartitionedCall" in op.op and owner[op.name].endswith(CALLS):
            devices["/".join(owner[op.name].split("/")[:2])].add(op.device)
    assert {place: {name.rpartition("/")[2] for name in found} for place, found in devices.items()} == {
        "stage0/replica0": {"device:CPU:0"},
        "stage1/replica0": {"device:CPU:1"},
        "stage1/replica1": {"device:CPU:2"},
        "stage2/replica0": {"device:CPU:3"},
    }
