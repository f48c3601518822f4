from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from dapple_tf.frontend.tables import FIND, find_misuse, with_known_shapes
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value, tensor

WORDS = tf.constant(["a", "b"])


def table() -> Any:
    made = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 0)
    made.insert(WORDS, tf.range(2, dtype=tf.int64))
    return made


def misuse_of(use: Callable[[Any], Any]) -> str | None:
    made = table()
    trace = tf.function(lambda: use(made), autograph=False).get_concrete_function().graph
    ((_, placeholder),) = [pair for pair in trace.captures if pair[0].dtype == tf.resource]
    return find_misuse(placeholder)


def insert(made: Any) -> Any:
    with tf.control_dependencies([made.insert(WORDS, tf.range(2, dtype=tf.int64))]):
        return made.size()


def in_a_branch(use: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda made: tf.cond(tf.timestamp() > 0, lambda: use(made), lambda: tf.constant(0, tf.int64))


def in_a_loop(use: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda made: tf.while_loop(lambda i: i < 3, lambda i: (i + use(made),), [tf.constant(0, tf.int64)])[0]


def size(made: Any) -> Any:
    return made.size()


@pytest.mark.parametrize("use", [size, lambda made: made.lookup(WORDS), lambda made: made.export()[0]])
def test_reads_are_no_misuse(use: Callable[[Any], Any]) -> None:
    assert misuse_of(use) is None


@pytest.mark.parametrize("around", [in_a_branch, in_a_loop])
def test_functions_that_take_a_table_are_searched(around: Callable[..., Any]) -> None:
    assert misuse_of(around(size)) is None
    assert misuse_of(around(insert)) == "LookupTableInsertV2"
    assert misuse_of(in_a_branch(around(insert))) == "LookupTableInsertV2"


def lookup(keys: tuple[int | None, ...], found: tuple[int | None, ...] | None) -> Graph:
    nodes = (
        Node("table", "capture", (), (tensor("resource"),)),
        Node("keys", "arg", (), (tensor("string", *keys),)),
        Node("default", "Const", (), (tensor("int64"),)),
        Node("found", FIND, (Value("table"), Value("keys"), Value("default")), (tensor("int64", *(found or ())),)),
    )
    return Graph("loss", nodes, ("keys",), (Value("found"),))


def test_a_lookup_has_the_shape_of_its_keys() -> None:
    graph = with_known_shapes(lookup((None, 3), (None, 3)))
    assert [node.op for node in graph.nodes[3:]] == ["Shape", "BroadcastTo"]
    assert graph.outputs == (Value("found"),)


def test_lookups_by_vectors_stay() -> None:
    graph = lookup((None, 3), (None,))
    assert with_known_shapes(graph) == graph
