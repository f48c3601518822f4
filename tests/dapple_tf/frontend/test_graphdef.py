"""IR to GraphDef and back: attributes, libraries, and what each op does besides its outputs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from tensorflow.core.framework import attr_value_pb2, graph_pb2

from dapple_tf.frontend.capture import capture
from dapple_tf.frontend.graphdef import _read_attr, _write_attr, needed_library, read_graph, read_shapes, write_graph
from graph_passes.ir.graph import Attr, DType, Effect, FunctionRef, Graph, Node, Opaque, Shape, attributes, tensor

X = np.ones((4, 2), np.float32)

# --- attributes

integers = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(width=32, allow_nan=False)
dtypes = st.sampled_from(["float32", "float64", "bfloat16", "float16", "int8", "uint16", "bool", "complex64", "string",
                          "resource", "variant"]).map(DType)  # fmt: skip
shapes = st.builds(Shape, st.none() | st.lists(st.none() | st.integers(0, 9), max_size=4).map(tuple))
scalars = st.one_of(integers, floats, st.booleans(), st.binary(max_size=9), dtypes, shapes)
lists = st.one_of(*(st.lists(kind, max_size=3).map(tuple) for kind in (integers, floats, st.booleans(), st.binary(
    max_size=9), dtypes, shapes)))  # fmt: skip
functions = st.from_regex(r"[a-z]\w{0,8}", fullmatch=True).map(FunctionRef)


@given(scalars | lists | functions)
def test_attributes_come_back_the_same(attribute: Attr) -> None:
    proto = attr_value_pb2.AttrValue()
    _write_attr(proto, attribute)
    back = _read_attr(attr_value_pb2.AttrValue.FromString(proto.SerializeToString()))
    assert back == attribute
    assert type(back) is type(attribute)


@pytest.mark.parametrize(
    "proto",
    [
        attr_value_pb2.AttrValue(tensor=tf.make_tensor_proto([1.0, 2.0])),
        attr_value_pb2.AttrValue(placeholder="T"),
        attr_value_pb2.AttrValue(
            func=attr_value_pb2.NameAttrList(name="f", attr={"T": attr_value_pb2.AttrValue(type=1)})
        ),
        attr_value_pb2.AttrValue(
            list=attr_value_pb2.AttrValue.ListValue(
                func=[attr_value_pb2.NameAttrList(name="f"), attr_value_pb2.NameAttrList(name="g")]
            )
        ),
        attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue(tensor=[tf.make_tensor_proto(1)])),
        attr_value_pb2.AttrValue(),
    ],
)
def test_what_only_tensorflow_understands_is_kept_whole(proto: attr_value_pb2.AttrValue) -> None:
    attribute = _read_attr(proto)
    assert isinstance(attribute, Opaque)
    back = attr_value_pb2.AttrValue()
    _write_attr(back, attribute)
    assert back == proto


def test_a_text_is_no_attribute_of_tensorflow() -> None:
    with pytest.raises(TypeError, match="'text' is no attribute of TensorFlow's"):
        _write_attr(attr_value_pb2.AttrValue(), "text")
    with pytest.raises(TypeError, match="'text' is no item of a list attribute of TensorFlow's"):
        _write_attr(attr_value_pb2.AttrValue(), (1, "text"))


# --- graphs


def imported(definition: graph_pb2.GraphDef, name: str, **inputs: tf.Tensor) -> tf.Tensor:
    """Run a written graph: one of its tensors, given its placeholders."""
    with tf.Graph().as_default() as graph:
        placeholders = {k: tf.compat.v1.placeholder(v.dtype) for k, v in inputs.items()}
        (output,) = tf.graph_util.import_graph_def(
            definition, {k.replace("__", "/"): v for k, v in placeholders.items()}, [name], name=""
        )
        with tf.compat.v1.Session(graph=graph) as session:
            return session.run(output, {placeholders[k]: v.numpy() for k, v in inputs.items()})


def test_a_written_graph_computes_what_the_function_does() -> None:
    w = tf.Variable(1.0)

    def loss(x: tf.Tensor) -> tf.Tensor:
        y = tf.nn.conv2d(tf.reshape(x, (-1, 1, 2, 1)), tf.ones((1, 2, 1, 3)), [1, 1, 1, 1], "VALID")
        z = tf.cond(tf.reduce_sum(y) > 0, lambda: tf.einsum("abcd->ad", y), lambda: tf.zeros((4, 3)))
        return tf.reduce_mean(tf.one_hot(tf.argmax(z, -1), 3) + tf.concat([z, z], 0)[:4]) + 0.0 * w

    captured = capture(loss, (X,))
    definition = write_graph(captured.graph.replace(nodes=without_variables(captured.graph)))
    (summed,) = (n.inputs[0] for n in captured.graph.nodes if n.op == "Mean")
    found = imported(definition, f"{summed.node}:{summed.index}", input__0=tf.constant(X))
    np.testing.assert_allclose(np.mean(found), loss(tf.constant(X)), rtol=1e-6)


def without_variables(graph: Graph) -> tuple[Node, ...]:
    gone = {node.name for node in graph.nodes if node.op == "variable"}
    kept = []
    for node in graph.nodes:
        if node.name in gone or any(value.node in gone for value in node.inputs):
            gone.add(node.name)
        else:
            kept.append(node)
    return tuple(kept)


def test_a_scalars_shape_is_an_attribute_too() -> None:
    scale = tf.Variable(1.0)
    graph = capture(lambda x: (tf.reduce_mean(x) * scale, tf.ensure_shape(tf.reduce_sum(x), ())), (X,)).graph
    (ensure,) = (node for node in graph.nodes if node.op == "EnsureShape")
    definition = write_graph(graph.replace(nodes=without_variables(graph)))
    assert imported(definition, f"{ensure.name}:0", input__0=tf.constant(X)) == X.sum()


def test_our_own_attributes_do_not_reach_tensorflow() -> None:
    own = attributes({"layer": "a/b", "within": "a", "writes": ("v",), "T": DType("float32")})
    node = Node("n", "Identity", outputs=(tensor("float32"),), attrs=own)
    (proto,) = write_graph(Graph("g", (node,))).node
    assert list(proto.attr) == ["T"]


def test_inputs_become_placeholders_and_control_edges_are_written() -> None:
    graph = Graph(
        "g",
        (
            Node("input/0", "arg", outputs=(tensor("int32", None, 2),)),
            Node("say", "PrintV2", effect=Effect.SIDE),
            Node("same", "Identity", Node("input/0", "arg", outputs=(tensor("int32"),)).values()).after("say", "why"),
        ),
    )
    placeholder, _, same = write_graph(graph).node
    assert (placeholder.op, placeholder.attr["dtype"].type) == ("Placeholder", tf.int32.as_datatype_enum)
    assert list(same.input) == ["input/0", "^say"]


def test_attributes_that_hold_only_where_they_were_made_are_left_behind() -> None:
    a, b = tf.Variable(1.0), tf.Variable(2.0)
    graph = tf.function(lambda: tf.cond(a > 0.0, lambda: a + 1.0, lambda: b + 1.0)).get_concrete_function().graph
    branch = next(op for op in graph.get_operations() if op.type == "If")
    assert "_read_only_resource_inputs" in branch.node_def.attr
    inputs = {tensor.op.name: Node(f"v{i}", "variable") for i, tensor in enumerate(graph.inputs)}
    node = read_graph(graph, inputs, "g").by_name[branch.name]
    assert not node.has("_read_only_resource_inputs")


def test_read_shapes_strips_the_prefix() -> None:
    with tf.Graph().as_default() as graph:
        tf.identity(tf.zeros((2, 3)), name="probe/a")
        tf.identity(tf.compat.v1.placeholder(tf.int32), name="probe/b")
    assert read_shapes(graph, "probe/") == {"a": (Shape((2, 3)),), "b": (Shape(None),)}


# --- the library


def test_the_needed_library_is_transitive_and_no_more() -> None:
    innermost = tf.function(lambda x: tf.exp(x))
    outer = tf.function(lambda x: tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, innermost(x)), (0, x))[1])
    other = tf.function(lambda x: tf.tanh(x))
    w = tf.Variable(1.0)
    graph = capture(lambda x: (tf.reduce_mean(outer(x) * w), other(x)), (X,)).graph
    library = dict(graph.library)
    loops = tuple(node for node in graph.nodes if node.op == "PartitionedCall")
    first = next(node for node in loops if any(uses(library, name, "Exp") for name in reached(library, node)))

    needed = dict(needed_library(Graph("g", (first,)), library))
    assert set(needed) == reached(library, first)
    assert any(uses(library, name, "Exp") for name in needed)
    assert not any(uses(library, name, "Tanh") for name in needed)
    assert all(needed[name] == library[name] for name in needed)


def body(library: dict[str, bytes], name: str) -> graph_pb2.GraphDef:
    definition = graph_pb2.GraphDef()
    definition.library.function.add().ParseFromString(library[name])
    return definition


def uses(library: dict[str, bytes], name: str, op: str) -> bool:
    return any(node.op == op for node in body(library, name).library.function[0].node_def)


def reached(library: dict[str, bytes], node: Node) -> set[str]:
    """By searching the bytes for the names: crude, and independent of how attributes are read."""
    found, pending = set(), [value.name for _, value in node.attrs if isinstance(value, FunctionRef)]
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += [other for other in library if other.encode() in library[name] and other != name]
    return found


def test_functions_in_opaque_attributes_are_needed_too() -> None:
    both = attr_value_pb2.AttrValue()
    both.list.func.add(name="f")
    both.list.func.add(name="g")
    one = attr_value_pb2.AttrValue(func=attr_value_pb2.NameAttrList(name="h"))
    node = Node("n", "Case", attrs=attributes({
        "branches": Opaque(both.SerializeToString()), "other": Opaque(one.SerializeToString())
    }))  # fmt: skip
    library = dict.fromkeys(("f", "g", "h", "unused"), b"")
    assert [name for name, _ in needed_library(Graph("g", (node,)), library)] == ["f", "g", "h"]


# --- effects

W = tf.Variable([[1.0], [2.0]], name="w")
COUNT = tf.Variable(0, trainable=False, name="count")
GENERATOR = tf.random.Generator.from_seed(1)


def loop(body: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    return tf.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, body(a)), (0, 0.0))[1]


def branch(x: tf.Tensor, body: Callable[[], tf.Tensor]) -> tf.Tensor:
    return tf.cond(tf.reduce_sum(x) > 0, body, lambda: 0.0)


def switch(x: tf.Tensor, body: Callable[[], tf.Tensor]) -> tf.Tensor:
    return tf.switch_case(tf.cast(x[0, 0], tf.int32), [body, lambda: 0.0])


def say_and_read() -> tf.Tensor:
    tf.print("read")
    return tf.reduce_sum(W)


def count_up() -> tf.Tensor:
    return tf.cast(COUNT.assign_add(1), tf.float32)


def total() -> tf.Tensor:
    return tf.reduce_sum(W)


def draw() -> tf.Tensor:
    return tf.random.uniform([])


def sampled() -> tf.Tensor:
    drawn = tf.random.log_uniform_candidate_sampler(tf.zeros((1, 1), tf.int64), 1, 2, True, 5)[0]
    return tf.cast(tf.reduce_sum(drawn), tf.float32)


def draw_and_read() -> tf.Tensor:
    return tf.random.uniform([]) + tf.reduce_sum(W)


@pytest.mark.parametrize(
    ("op", "make", "effect"),
    [
        ("Exp", lambda x: tf.reduce_sum(tf.exp(x)), Effect.PURE),
        ("ResourceGather", lambda x: tf.reduce_sum(tf.gather(W, [0])), Effect.READ),
        ("StatelessRandomUniformV2", lambda x: tf.random.stateless_uniform([], (1, 2)), Effect.PURE),
        ("RandomUniform", lambda x: draw(), Effect.RANDOM),
        ("RandomShuffle", lambda x: tf.random.shuffle(x)[0, 0], Effect.RANDOM),
        ("RngReadAndSkip", lambda x: GENERATOR.uniform([]), Effect.WRITE),
        ("AssignAddVariableOp", lambda x: count_up(), Effect.WRITE),
        ("PrintV2", lambda x: (tf.print("x"), 0.0)[1], Effect.SIDE),
        ("EagerPyFunc", lambda x: tf.ensure_shape(tf.py_function(lambda: 1.0, [], tf.float32), []), Effect.SIDE),
        ("StatelessWhile", lambda x: loop(lambda a: a + 1), Effect.PURE),
        ("While", lambda x: loop(lambda a: a + total()), Effect.READ),
        ("While", lambda x: loop(lambda a: a + draw()), Effect.RANDOM),
        ("While", lambda x: loop(lambda a: a + draw_and_read()), Effect.RANDOM),
        ("While", lambda x: loop(lambda a: a + count_up()), Effect.WRITE),
        ("While", lambda x: loop(lambda a: a + say_and_read()), Effect.SIDE),
        ("StatelessIf", lambda x: branch(x, lambda: tf.reduce_sum(x)), Effect.PURE),
        ("If", lambda x: branch(x, total), Effect.READ),
        ("If", lambda x: branch(x, draw), Effect.RANDOM),
        ("If", lambda x: branch(x, count_up), Effect.WRITE),
        ("If", lambda x: branch(x, say_and_read), Effect.SIDE),
        ("If", lambda x: (tf.debugging.Assert(tf.reduce_all(x > 0), [x]), 0.0)[1], Effect.SIDE),
        ("StatelessCase", lambda x: switch(x, lambda: tf.reduce_sum(x)), Effect.PURE),
        ("StatelessCase", lambda x: switch(x, draw), Effect.RANDOM),  # so TensorFlow calls it
        ("LogUniformCandidateSampler", lambda x: sampled(), Effect.RANDOM),
        ("Case", lambda x: switch(x, total), Effect.READ),
        ("PartitionedCall", lambda x: tf.function(lambda y: tf.reduce_sum(y))(x), Effect.PURE),
        ("StatefulPartitionedCall", lambda x: tf.function(total)(), Effect.READ),
        ("StatefulPartitionedCall", lambda x: tf.function(count_up)(), Effect.WRITE),
        ("StatefulPartitionedCall", lambda x: tf.function(say_and_read)(), Effect.SIDE),
        ("StatefulPartitionedCall", lambda x: tf.function(draw_and_read)(), Effect.RANDOM),
        ("StatefulPartitionedCall", lambda x: tf.function(lambda: tf.function(draw)())(), Effect.RANDOM),
    ],
)
def test_the_effect_of_an_op(op: str, make: Callable[[tf.Tensor], tf.Tensor], effect: str) -> None:
    loss = tf.function(lambda x: tf.reduce_mean(x @ W) + make(x), autograph=False)
    graph = capture(loss, (X,)).graph
    nodes = [node for node in graph.nodes if node.op == op]
    assert [node.effect for node in nodes] == [effect]
    if effect == Effect.WRITE:
        written = nodes[0].strings("writes")
        assert [graph.node(name).op for name in written] == ["variable"]
        assert "w" not in written
