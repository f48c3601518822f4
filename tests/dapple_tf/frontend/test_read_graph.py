"""Reading TensorFlow graphs into the IR: side effects of ops, attributes, shapes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.frontend.capture import capture
from dapple_tf.frontend.read_graph import read_graph
from dapple_tf.graph_passes.ir.graph import Effect, Node

X = np.ones((4, 2), np.float32)


def test_attributes_that_are_valid_only_in_the_original_graph_are_dropped() -> None:
    a, b = tf.Variable(1.0), tf.Variable(2.0)
    graph = tf.function(lambda: tf.cond(a > 0.0, lambda: a + 1.0, lambda: b + 1.0)).get_concrete_function().graph
    branch = next(op for op in graph.get_operations() if op.type == "If")
    assert "_read_only_resource_inputs" in branch.node_def.attr
    inputs = {tensor.op.name: Node(f"v{i}", "variable") for i, tensor in enumerate(graph.inputs)}
    node = read_graph(graph, inputs, "g").by_name[branch.name]
    assert not node.has("_read_only_resource_inputs")


# --- side effects

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
        ("Empty", lambda x: tf.reduce_sum(tf.raw_ops.Empty(shape=[2], dtype=tf.float32, init=True)), Effect.PURE),
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
        ("StatelessCase", lambda x: switch(x, draw), Effect.RANDOM),  # TensorFlow's name, though it is stateful
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
def test_the_side_effect_of_an_op(op: str, make: Callable[[tf.Tensor], tf.Tensor], effect: str) -> None:
    loss = tf.function(lambda x: tf.reduce_mean(x @ W) + make(x), autograph=False)
    graph = capture(loss, (X,)).graph
    nodes = [node for node in graph.nodes if node.op == op]
    assert [node.effect for node in nodes] == [effect]
    if effect == Effect.WRITE:
        written = nodes[0].strings("writes")
        assert [graph.node(name).op for name in written] == ["variable"]
        assert "w" not in written
