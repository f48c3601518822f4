"""AllReduce over the replicas of a stage, sums over the stages that share a variable: DAPPLE, Fig. 10."""

from __future__ import annotations

from dapple_tf.graph_passes.passes.allreduce import AllReduce
from tests.graph_passes.builders import assert_graph, call_graph, function

FUNCTIONS = (
    function("stage0/forward", "arg x, variable table, variable u", "boundary h"),
    function("stage0/backward", "gradient h", "variable u, variable table float32[9]"),
    function("stage1/forward", "boundary h, variable table, variable w", "loss loss"),
    function("stage1/backward", "seed loss", "gradient h, variable table float32[9], variable w"),
)

SUMS = """
    %stage0/replica0/mb0/forward = forward() {replica=0, stage=0}
    %stage0/replica1/mb0/forward = forward() {replica=1, stage=0}
    %stage1/replica0/mb0/forward = forward() {replica=0, stage=1}
    %stage0/replica0/gradients = gradients() {place, variables=['u', 'table']} -> (float32[4], float32[9])
    %stage0/replica1/gradients = gradients() {place, variables=['u', 'table']} -> (float32[4], float32[9])
    %stage1/replica0/gradients = gradients() {place, variables=['table', 'w']} -> (float32[9], float32[4])
"""


def test_replicas_are_reduced_and_a_tied_variable_is_summed_at_its_owner() -> None:
    assert_graph(
        AllReduce()(call_graph(SUMS, *FUNCTIONS)),
        SUMS
        + """
        %stage0/allreduce = allreduce(%stage0/replica0/gradients:0, %stage0/replica0/gradients:1,
        | %stage0/replica1/gradients:0, %stage0/replica1/gradients:1) {place, replicas=2, variables=['u', 'table']}
        | -> (float32[4], float32[9])
        %stage0/tied_sum_0 = tied_sum(%stage0/allreduce:1, %stage1/replica0/gradients:0) {place, variable='table'}
        | -> (float32[9])
        %stage0/reduced_gradients = reduced_gradients(%stage0/tied_sum_0:0, %stage0/allreduce:0)
        | {place, variables=['table', 'u']} -> (float32[9], float32[4])
        %stage1/reduced_gradients = reduced_gradients(%stage1/replica0/gradients:1) {place, variables=['w']}
        | -> (float32[4])
        """,
    )


def test_where_the_update_is_sharded_a_gradient_is_summed_on_the_replica_that_updates_its_variable() -> None:
    assert_graph(
        AllReduce((("u", 1), ("table", 0)))(call_graph(SUMS, *FUNCTIONS)),
        SUMS
        + """
        %stage0/replica0/reduce = reduce(%stage0/replica0/gradients:1, %stage0/replica1/gradients:1)
        | {place, variables=['table']} -> (float32[9])
        %stage0/replica1/reduce = reduce(%stage0/replica0/gradients:0, %stage0/replica1/gradients:0)
        | {place, variables=['u']} -> (float32[4])
        %stage0/tied_sum_0 = tied_sum(%stage0/replica0/reduce:0, %stage1/replica0/gradients:0)
        | {place, variable='table'} -> (float32[9])
        %stage0/reduced_gradients = reduced_gradients(%stage0/tied_sum_0:0) {place, variables=['table']} -> (float32[9])
        %stage0/replica1/reduced_gradients = reduced_gradients(%stage0/replica1/reduce:0) {place, variables=['u']}
        | -> (float32[4])
        %stage1/reduced_gradients = reduced_gradients(%stage1/replica0/gradients:1) {place, variables=['w']}
        | -> (float32[4])
        """,
    )


def test_one_replica_needs_no_allreduce_and_a_stage_without_gradients_has_none() -> None:
    functions = (
        function("stage0/forward", "arg x, variable frozen", "boundary h"),
        function("stage0/backward"),
        function("stage1/forward", "boundary h, variable w", "loss loss"),
        function("stage1/backward", "seed loss", "variable w"),
    )
    before = """
        %stage0/replica0/mb0/forward = forward() {replica=0, stage=0}
        %stage1/replica0/mb0/forward = forward() {replica=0, stage=1}
        %stage1/replica0/gradients = gradients() {place, variables=['w']} -> (float32[4])
    """
    assert_graph(
        AllReduce()(call_graph(before, *functions)),
        before
        + """
        %stage1/reduced_gradients = reduced_gradients(%stage1/replica0/gradients:0) {place, variables=['w']}
        | -> (float32[4])
        """,
    )


def test_a_gradient_found_only_in_another_stage_is_sent_to_the_owner() -> None:
    functions = (
        function("stage0/forward", "arg x, variable table", "boundary h"),
        function("stage0/backward"),
        function("stage1/forward", "boundary h, variable table", "loss loss"),
        function("stage1/backward", "seed loss", "variable table"),
    )
    before = """
        %stage0/replica0/mb0/forward = forward() {replica=0, stage=0}
        %stage1/replica0/mb0/forward = forward() {replica=0, stage=1}
        %stage1/replica0/gradients = gradients() {place, variables=['table']} -> (float32[4])
    """
    assert_graph(
        AllReduce()(call_graph(before, *functions)),
        before
        + """
        %stage0/reduced_gradients = reduced_gradients(%stage1/replica0/gradients:0) {place, variables=['table']}
        | -> (float32[4])
        """,
    )
