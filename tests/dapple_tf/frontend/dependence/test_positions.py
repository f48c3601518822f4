"""Positions of samples are followed through the functions that a region calls."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from dapple_tf.frontend.dependence.positions import Flow, PositionUses


@tf.function
def tens(position: Any) -> Any:
    return position // 10


@tf.function
def twenties(position: Any) -> Any:
    return position // 20


def of_two_calls(position: Any) -> Any:
    return tens(tens(position)) < 3  # true for positions up to 299


def of_nodes_with_one_name(position: Any) -> Any:
    return twenties(tens(position)) < 3


def of_a_loop(position: Any) -> Any:
    return tf.while_loop(lambda i: i < 3, lambda i: [i // 10 + 1], [position])[0]


@pytest.mark.parametrize(("function", "factor"), [(of_two_calls, 100), (of_nodes_with_one_name, 200), (of_a_loop, 10)])
def test_the_factor_has_each_division_of_each_call_once(function: Any, factor: int) -> None:
    graph = tf.function(function).get_concrete_function(tf.TensorSpec([], tf.int32, "position")).graph
    definition = graph.as_graph_def()
    uses = PositionUses({each.signature.name: each for each in definition.library.function})
    nodes = [node for node in definition.node if node.op != "Placeholder"]
    uses.follow_all(nodes, {"position": [Flow(position=True)]})
    assert (uses.factor, uses.unknown) == (factor, False)
