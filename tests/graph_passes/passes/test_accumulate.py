"""Gradient accumulation: DAPPLE, Fig. 10 (GA)."""

from __future__ import annotations

from dapple_tf.graph_passes.passes.accumulate import Accumulate
from tests.graph_passes.builders import assert_graph, call_graph, function

BACKWARD = function("stage0/backward", "gradient h", "gradient x, variable w, variable v float32[2]")

ONE = """
    %stage0/replica0/mbM/forward = forward() {place}
    %stage0/replica0/mbM/backward = backward() {call} -> (float32[?,4], float32[4], float32[2])
"""
TWO = ONE.replace("M", "0") + ONE.replace("M", "1")


def test_two_micro_batches_are_summed_in_order() -> None:
    assert_graph(
        Accumulate()(call_graph(TWO, BACKWARD)),
        TWO
        + """
        %stage0/replica0/mb0/accumulate = accumulate(%stage0/replica0/mb0/backward:1, %stage0/replica0/mb0/backward:2)
        | {place, first=True, variables=['w', 'v']}
        %stage0/replica0/mb1/accumulate = accumulate(%stage0/replica0/mb1/backward:1, %stage0/replica0/mb1/backward:2)
        | {place, first=False, variables=['w', 'v']}
        | ^%stage0/replica0/mb0/accumulate 'accumulate: micro-batch 1 after 0'
        %stage0/replica0/gradients = gradients() {place, variables=['w', 'v']} -> (float32[4], float32[2])
        | ^%stage0/replica0/mb1/accumulate 'accumulate: all micro-batches are summed'
        """,
    )


INPUTS = function("stage0/inputs", "gradient h", "gradient x, carry c")
WEIGHTS = function("stage0/weights", "carry c", "variable w, variable v float32[2]")

SPLIT = """
    %stage0/replica0/mbM/forward = forward() {place}
    %stage0/replica0/mbM/inputs = inputs() {call} -> (float32[?,4], float32[?,4])
    %stage0/replica0/mbM/weights = weights(%stage0/replica0/mbM/inputs:1) {call} -> (float32[4], float32[2])
"""


def test_where_backward_is_split_the_gradients_of_weights_are_summed() -> None:
    before = SPLIT.replace("M", "0")
    assert_graph(
        Accumulate()(call_graph(before, INPUTS, WEIGHTS)),
        before
        + """
        %stage0/replica0/gradients = gradients(%stage0/replica0/mb0/weights:0, %stage0/replica0/mb0/weights:1)
        | {place, variables=['w', 'v']} -> (float32[4], float32[2])
        """,
    )


def test_whole_and_split_backwards_are_summed_in_micro_batch_order() -> None:
    """Whichever is called first."""
    mixed = ONE.replace("M", "2") + SPLIT.replace("M", "1") + ONE.replace("M", "0")
    assert_graph(
        Accumulate()(call_graph(mixed, BACKWARD, INPUTS, WEIGHTS)),
        mixed
        + """
        %stage0/replica0/mb0/accumulate = accumulate(%stage0/replica0/mb0/backward:1, %stage0/replica0/mb0/backward:2)
        | {place, first=True, variables=['w', 'v']}
        %stage0/replica0/mb1/accumulate = accumulate(%stage0/replica0/mb1/weights:0, %stage0/replica0/mb1/weights:1)
        | {place, first=False, variables=['w', 'v']}
        | ^%stage0/replica0/mb0/accumulate 'accumulate: micro-batch 1 after 0'
        %stage0/replica0/mb2/accumulate = accumulate(%stage0/replica0/mb2/backward:1, %stage0/replica0/mb2/backward:2)
        | {place, first=False, variables=['w', 'v']}
        | ^%stage0/replica0/mb1/accumulate 'accumulate: micro-batch 2 after 1'
        %stage0/replica0/gradients = gradients() {place, variables=['w', 'v']} -> (float32[4], float32[2])
        | ^%stage0/replica0/mb2/accumulate 'accumulate: all micro-batches are summed'
        """,
    )


def test_the_gradients_of_one_micro_batch_are_passed_on() -> None:
    before = ONE.replace("M", "0")
    assert_graph(
        Accumulate()(call_graph(before, BACKWARD)),
        before
        + """
        %stage0/replica0/gradients = gradients(%stage0/replica0/mb0/backward:1, %stage0/replica0/mb0/backward:2)
        | {place, variables=['w', 'v']} -> (float32[4], float32[2])
        """,
    )


def test_each_replica_has_its_own_sums() -> None:
    other = ONE.replace("replica0", "replica1").replace("replica=0", "replica=1")
    result = Accumulate()(call_graph(ONE.replace("M", "0") + other.replace("M", "0"), BACKWARD))
    gradients = [(node.name, str(node.inputs[0])) for node in result.nodes if node.op == "gradients"]
    assert gradients == [
        ("stage0/replica0/gradients", "%stage0/replica0/mb0/backward:1"),
        ("stage0/replica1/gradients", "%stage0/replica1/mb0/backward:1"),
    ]


def test_a_stage_without_variables_has_no_gradients() -> None:
    before = TWO.replace(" -> (float32[?,4], float32[4], float32[2])", " -> (float32[?,4])")
    frozen = function("stage0/backward", "gradient h", "gradient x")
    assert_graph(Accumulate()(call_graph(before, frozen)), before)
