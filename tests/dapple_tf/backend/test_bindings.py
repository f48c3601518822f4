"""Which tf.Variable a name means: the user's own, a replica's copy, or a buffer of accumulated gradients."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from dapple_tf.backend.bindings import Buffers, StepVariables
from dapple_tf.graph_passes.ir.graph import Attr, Graph, Node, Value, attributes, tensor
from dapple_tf.graph_passes.ir.ops import OpName
from tests.dapple_tf.backend.builders import DEVICES, make_node


def node_at(op: OpName, stage: int, replica: int, *names: str, inputs: int = 0) -> Node:
    """Return a node of a replica, on the replica's device, for these variables."""
    attrs = attributes({"stage": stage, "replica": replica, "variables": names})
    values = tuple(Value("b", i) for i in range(inputs))
    return Node(f"{op}{stage}{replica}", op, values, (tensor("float32"),), attrs, device=DEVICES[stage + replica])


def test_a_buffer_has_the_type_and_device_and_is_created_once_for_each_purpose() -> None:
    buffers, variable = Buffers(DEVICES[0]), tf.Variable(tf.ones([2, 3], tf.float64))
    first = buffers.like(variable, DEVICES[1], "sum")
    assert (first.shape, first.dtype, first.device) == ((2, 3), tf.float64, DEVICES[1])
    assert buffers.like(variable, DEVICES[1], "sum") is first
    others = [
        buffers.like(variable, DEVICES[1], "copy"),
        buffers.like(variable, DEVICES[2], "sum"),
        buffers.like(tf.Variable(tf.ones([2, 3], tf.float64)), DEVICES[1], "sum"),
    ]
    assert len({id(buffer) for buffer in [first, *others]}) == 4


def test_replicas_with_a_copy_use_it_and_others_the_owner() -> None:
    own = {"w": tf.Variable(1.0), "v": tf.Variable(2.0)}
    graph = Graph("g", (node_at(OpName.REFRESH, 0, 1, "w"),))
    found = StepVariables(graph, own, Buffers(DEVICES[0]))
    copy = found.variable(node_at(OpName.FORWARD, 0, 1), "w")
    assert copy is not own["w"]
    assert copy.device == DEVICES[1]
    for op in (OpName.BACKWARD, OpName.WEIGHTS, OpName.REFRESH, OpName.READ_STATE):
        assert found.variable(node_at(op, 0, 1), "w") is copy
    assert found.variable(node_at(OpName.FORWARD, 0, 0), "w") is own["w"]
    assert found.variable(node_at(OpName.FORWARD, 1, 1), "w") is own["w"]
    assert found.variable(node_at(OpName.FORWARD, 0, 1), "v") is own["v"]
    # The update and reads for other ranks take the owner, wherever they run.
    assert found.variable(node_at(OpName.UPDATE, 0, 1), "w") is own["w"]
    assert found.variable(node_at(OpName.READ_VARIABLE, 0, 1), "w") is own["w"]
    assert found.owner("w") is own["w"]
    assert list(map(id, found.copies(node_at(OpName.COMMIT, 0, 0), "w"))) == [id(copy)]
    assert found.copies(node_at(OpName.COMMIT, 0, 0), "v") == []
    assert found.copies(node_at(OpName.COMMIT, 1, 0), "w") == []  # of another stage


def test_each_replica_accumulates_in_buffers_of_its_own() -> None:
    own = {"w": tf.Variable([1.0, 2.0]), "v": tf.Variable(2.0)}
    nodes = [node_at(OpName.GRADIENTS, 0, replica, "w", "v") for replica in range(2)]
    found = StepVariables(Graph("g", tuple(nodes)), own, Buffers(DEVICES[0]))
    first, second = (found.accumulators(node) for node in nodes)
    assert [buffer.shape for buffer in first] == [(2,), ()]
    assert {buffer.device for buffer in first} == {DEVICES[0]}
    assert {buffer.device for buffer in second} == {DEVICES[1]}
    assert list(map(id, found.accumulators(make_node(OpName.ACCUMULATE, stage=0, replica=0, variables=("v",))))) == [
        id(first[1])
    ]


def test_gradients_that_are_passed_on_need_no_buffers() -> None:
    buffers = Buffers(DEVICES[0])
    node = node_at(OpName.GRADIENTS, 0, 0, "w", inputs=1)
    found = StepVariables(Graph("g", (node,)), {"w": tf.Variable(1.0)}, buffers)
    assert not found._accumulators


def test_programs_of_one_pipeline_share_buffers_and_the_updating_flag() -> None:
    own, buffers = {"w": tf.Variable(1.0)}, Buffers(DEVICES[3])
    node = node_at(OpName.GRADIENTS, 0, 0, "w")
    first, second = (StepVariables(Graph("g", (node,)), own, buffers) for _ in range(2))
    assert first.accumulators(node)[0] is second.accumulators(node)[0]
    assert first.updating is second.updating
    assert first.updating.device == DEVICES[3]


def test_calls_with_a_version_use_what_is_stored_in_that_slot_of_their_replica() -> None:
    own = {"w": tf.Variable([1.0, 2.0]), "n": tf.Variable(0)}
    stores = [
        make_node(OpName.STORE_VERSION, stage=0, replica=replica, version=slot, variables=("w",))
        for replica in (0, 1)
        for slot in (0, 1, 0)  # a slot is stored several times
    ]
    placed = [dataclasses.replace(n, device=DEVICES[n.integer("replica")]) for n in stores]
    found = StepVariables(Graph("g", tuple(placed)), own, Buffers(DEVICES[3]))

    def variable(op: OpName, replica: int, name: str = "w", **attrs: Attr) -> tf.Variable:
        return found.variable(make_node(op, stage=0, replica=replica, **attrs), name)

    slots = {(r, v): variable(OpName.FORWARD, r, version=v) for r in (0, 1) for v in (0, 1)}
    assert len({id(slot) for slot in [own["w"], *slots.values()]}) == 5
    for (replica, version), slot in slots.items():
        assert (slot.device, slot.shape) == (DEVICES[replica], (2,))
        for op in (OpName.BACKWARD, OpName.RUN_ONCE, OpName.STORE_VERSION):
            assert variable(op, replica, version=version) is slot
    assert variable(OpName.FORWARD, 0, "n", version=1) is own["n"]  # of which no versions are stored
    assert variable(OpName.UPDATE, 0) is own["w"]
    assert variable(OpName.FORWARD, 0) is own["w"]


def test_each_stage_counts_its_updates_in_a_counter_of_its_own() -> None:
    own = {"t": tf.Variable(5, dtype=tf.int64)}
    counts = [make_node(OpName.COUNT_UPDATE, stage=s, replica=0, variable="t", offset=0) for s in (0, 1)]
    placed = [dataclasses.replace(node, device=DEVICES[i]) for i, node in enumerate(counts)]
    found = StepVariables(Graph("g", tuple(placed)), own, Buffers(DEVICES[3]))
    first, second = (found.variable(node, "t") for node in placed)
    assert (first.device, second.device, first.dtype) == (DEVICES[0], DEVICES[1], tf.int64)
    assert len({id(own["t"]), id(first), id(second)}) == 3
    assert found.variable(make_node(OpName.UPDATE, stage=1, replica=0), "t") is second
    assert found.variable(make_node(OpName.COUNT_UPDATE), "t") is own["t"]  # at the end of the window
    assert found.variable(make_node(OpName.UPDATE, stage=2, replica=0), "t") is own["t"]  # which counts no updates
