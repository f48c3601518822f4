"""A rank that is called with its own rows: the batch size is an input, and slices are cut from what is there."""

from __future__ import annotations

import pytest

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.analysis.input_needs import find_inputs
from dapple_tf.graph_passes.passes.base import run_passes
from dapple_tf.graph_passes.passes.instrument import Instrument
from dapple_tf.graph_passes.passes.local_input import LocalInput
from dapple_tf.graph_passes.passes.project import Project
from tests.graph_passes.builders import assert_graph, graph, refused
from tests.graph_passes.whole import Kind, graph_for_ranks

BEFORE = """
    inputs %x %y %mask
    %x = input() -> (float32[?,4])
    %y = input() -> (int32[?])
    %mask = input() -> (float32[?])
    %batch/size = batch_size(%x:0) -> (int64[])
    %stage1/replica1/row_bounds = row_bounds(%batch/size:0) {place} -> (int64[3])
    %stage1/replica1/run_once = run_once(%mask:0) {place} -> (float32[])
    %stage1/replica1/mb0/slice = slice(%batch/size:0, %mask:0, %y:0) {place, micro_batches=2, replicas=2}
    | -> (float64[], float32[?], int32[?])
    %stage1/replica1/mb0/forward = forward(%stage1/replica1/mb0/slice:1, %stage1/replica1/mb0/slice:2) {place}
    | -> (float32[])
    outputs %stage1/replica1/mb0/forward:0
"""


def test_the_batch_size_is_an_input_and_own_rows_are_marked() -> None:
    assert_graph(
        LocalInput()(graph(BEFORE)),
        BEFORE.replace("inputs %x %y %mask", "inputs %x %y %mask %batch/size")
        .replace("%batch/size = batch_size(%x:0) -> (int64[])", "%batch/size = input() {index=3} -> (int64[])")
        .replace("{place, micro_batches=2", "{place, local=[1], micro_batches=2"),
    )


def test_what_a_rank_needs_is_the_same_afterwards() -> None:
    before = graph(BEFORE)
    assert find_inputs(LocalInput()(before)) == find_inputs(before)


@pytest.mark.parametrize("rank", [0, 2])
def test_only_a_projected_graph_is_rewritten_once_and_before_it_is_timed(rank: int) -> None:
    kind = Kind((2, 1), 2)
    project = Project(kind.ranks, rank)
    local = run_passes(graph_for_ranks(kind), [project, LocalInput(), Instrument()])
    assert [node.op for node in local.nodes if node.name in local.inputs] == ["input", "input"]
    with refused(GraphError, "pass 'local_input' (after the input) requires 'collect_tokens' nodes"):
        run_passes(graph_for_ranks(kind), [LocalInput()])
    with refused(GraphError, "pass 'local_input' (after 'local_input') requires 'batch_size' nodes"):
        run_passes(graph_for_ranks(kind), [project, LocalInput(), LocalInput()])
    with refused(GraphError, "pass 'local_input' (after 'instrument') forbids 'timestamp' nodes"):
        run_passes(graph_for_ranks(kind), [project, Instrument(), LocalInput()])
