"""The marks of statistics: values that are computed for their sums, though no output needs them."""

from __future__ import annotations

from dapple_tf.graph_passes.analysis.layers import find_layers, live_nodes
from dapple_tf.graph_passes.analysis.loss_head import find_statistics, mark_statistics
from dapple_tf.graph_passes.ir.graph import Graph, Value
from dapple_tf.graph_passes.passes.partition import partition
from tests.graph_passes.builders import graph

NORMALISED = """
    inputs %x
    %x = arg() -> (float32[?,4])
    %early = Tanh(%x:0) -> (float32[?,4])
    %sums = Sum(%early:0) -> (float64[3,4])
    %late = Exp(%early:0) -> (float32[?,4])
    %loss = Mean(%late:0) -> (float32[])
    outputs %loss:0
"""


def marked() -> Graph:
    return mark_statistics(graph(NORMALISED), {Value("sums"): "norm"})


def test_marks_are_found_again() -> None:
    assert find_statistics(marked()) == {"norm": Value("sums")}
    assert find_statistics(graph(NORMALISED)) == {}


def test_a_statistic_is_live() -> None:
    assert "sums" in live_nodes(marked())
    assert "sums" not in live_nodes(graph(NORMALISED))


def test_a_stage_graph_has_the_statistics_of_its_stages() -> None:
    layers = find_layers(marked())
    stages = partition(layers, [layers.find("late")])
    assert stages.statistics == {"norm": Value("sums")}
    assert stages.stage_of("sums") == 0
