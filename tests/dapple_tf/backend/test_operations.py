"""Each op has a handler; calls of stage functions; and the resources that nodes take."""

from __future__ import annotations

import tensorflow as tf

from dapple_tf.backend.operations import HANDLERS, Operations
from dapple_tf.graph_passes.ir.graph import DType, Function, Graph, Node, Port, Value, attributes, tensor
from dapple_tf.graph_passes.ir.ops import OpName
from tests.dapple_tf.backend.builders import NamedVariables, make_node

SCALAR = tensor("float32")
CALL = {"stage": 0, "replica": 1, "micro_batch": 0, "function": "stage0/forward"}


def subtract() -> Function:
    """The function of ports x, the variable w, and y that returns (x - w) - y and the value of w."""
    dtype = attributes({"T": DType("float32")})
    nodes = (
        Node("x", "boundary", outputs=(SCALAR,)),
        Node("w", "variable", outputs=(tensor("resource"),)),
        Node("y", "boundary", outputs=(SCALAR,)),
        Node("read", "ReadVariableOp", (Value("w"),), (SCALAR,), attributes({"dtype": DType("float32")})),
        Node("first", "Sub", (Value("x"), Value("read")), (SCALAR,), dtype),
        Node("second", "Sub", (Value("first"), Value("y")), (SCALAR,), dtype),
    )
    inputs = (Port("boundary", "x", SCALAR), Port("variable", "w", tensor("resource")), Port("boundary", "y", SCALAR))
    outputs = (Port("boundary", "z", SCALAR), Port("stash", "w", SCALAR))
    graph = Graph("stage0/forward", nodes, ("x", "w", "y"), (Value("second"), Value("read")))
    return Function("stage0/forward", graph, inputs, outputs)


def operations(bindings: NamedVariables) -> Operations:
    call = Node("call", OpName.FORWARD, attrs=attributes(CALL))
    return Operations(Graph("g", (call,), functions=(subtract(),)), bindings, {}, {})


def test_each_op_except_the_input_has_a_handler() -> None:
    assert set(HANDLERS) == set(OpName) - {OpName.INPUT}  # the batch's tensors are arguments of the step


def test_a_call_takes_the_inputs_in_order_and_the_replicas_variable() -> None:
    bindings = NamedVariables(replica_copies={"w": [tf.Variable(100.0), tf.Variable(3.0)]})
    node = make_node(OpName.FORWARD, SCALAR, SCALAR, **CALL)
    outputs, _ = operations(bindings).run(node, [tf.constant(10.0), tf.constant(5.0)])
    assert [output.numpy() for output in outputs] == [2, 3]


def test_a_call_takes_the_resources_of_its_variables() -> None:
    copies = [tf.Variable(1.0), tf.Variable(2.0)]
    found = operations(NamedVariables(replica_copies={"w": copies})).resources(make_node(OpName.FORWARD, **CALL))
    assert [id(variable) for variable in found] == [id(copies[1])]


def test_nodes_take_the_resources_that_they_read_and_write() -> None:
    owner, copies, total = tf.Variable(1.0), [tf.Variable(2.0), tf.Variable(3.0)], tf.Variable(4.0)
    bindings = NamedVariables({"w": owner}, {"w": copies}, {"w": total})
    place = {"stage": 0, "replica": 0, "variables": ("w",)}
    wanted = {
        OpName.ACCUMULATE: [total],
        OpName.GRADIENTS: [total],
        OpName.READ_STATE: [copies[0]],
        OpName.REFRESH: [owner, copies[0]],
        OpName.COMMIT: [owner, *copies],
        OpName.SET_UPDATING: [bindings.updating],
        OpName.TIED_SUM: [],
    }
    found = {op: operations(bindings).resources(make_node(op, **place)) for op in wanted}
    assert {op: list(map(id, variables)) for op, variables in found.items()} == {
        op: list(map(id, variables)) for op, variables in wanted.items()
    }


def test_gradients_of_a_single_micro_batch_take_no_buffers() -> None:
    bindings = NamedVariables(sums={"w": tf.Variable(4.0)})
    node = Node("g", OpName.GRADIENTS, (Value("b"),), (SCALAR,), attributes({"variables": ("w",)}))
    assert operations(bindings).resources(node) == []


def test_stage_functions_that_are_called_once_may_be_inlined_except_in_a_window() -> None:
    """An update of a window does not wait for a backward that still reads the weights, if this is inlined."""
    assert not operations(NamedVariables()).inlines_nothing
    call = Node("call", OpName.FORWARD, attrs=attributes(CALL))
    cut = Node("batch", OpName.MINIBATCH, attrs=attributes({"minibatch": 0, "minibatches": 1}))
    assert Operations(Graph("g", (cut, call), functions=(subtract(),)), NamedVariables(), {}, {}).inlines_nothing
