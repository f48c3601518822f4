"""Weight terms: which layer they belong to, what crosses a cut for them, and which reductions float."""

from __future__ import annotations

import pytest

from dapple_tf.graph_passes.analysis.layers import Layers, find_layers
from dapple_tf.graph_passes.passes.partition import StageGraph, partition
from tests.graph_passes.builders import graph, value

# Three layers of a matrix each.
NET = """
    inputs %x
    %x = arg() -> (float32[?,4])
    %u = variable() -> (resource[])
    %v = variable() -> (resource[])
    %w = variable() -> (resource[])
    %read_u = ReadVariableOp(%u:0) -> (float32[4,4]) !read
    %read_v = ReadVariableOp(%v:0) -> (float32[4,4]) !read
    %read_w = ReadVariableOp(%w:0) -> (float32[4,4]) !read
"""
FIRST = """
    %a = MatMul(%x:0, %read_u:0) {layer='first'} -> (float32[?,4])
"""
SECOND = """
    %b = MatMul(%a:0, %read_v:0) {layer='second'} -> (float32[?,4])
"""
THIRD = """
    %c = MatMul(%b:0, %read_w:0) {layer='third'} -> (float32[?,4])
    %mean = Mean(%c:0) {layer='third'} -> (float32[])
"""
LOSS = """
    %loss = Add(%mean:0, %{term}:0) -> (float32[])
    outputs %loss:0
"""
L2 = """
    %half = Const() -> (float32[])
    %u2 = L2Loss(%read_u:0) -> (float32[])
    %v2 = L2Loss(%read_v:0) -> (float32[])
    %w2 = L2Loss(%read_w:0) -> (float32[])
    %uv = Add(%u2:0, %v2:0) -> (float32[])
    %uvw = AddN(%uv:0, %w2:0) -> (float32[])
    %term = Mul(%uvw:0, %half:0) -> (float32[])
"""
NETWORK = NET + FIRST + SECOND + THIRD


def layers_of(*parts: str, term: str = "term") -> Layers:
    return find_layers(graph("".join((*parts, LOSS.format(term=term)))))


def show(layers: Layers) -> dict[str, str]:
    return {layer.name: " ".join(layer.nodes) for layer in layers.layers}


def crossings(layers: Layers) -> list[str]:
    return [" ".join(sorted(map(str, cut.crossing))) for cut in layers.cuts]


@pytest.mark.parametrize("text", [NETWORK + L2, NET + L2 + FIRST + SECOND + THIRD], ids=["after", "before"])
def test_a_weight_term_is_computed_in_the_layer_of_its_weight(text: str) -> None:
    layers = layers_of(text)
    assert show(layers) == {"first": "a u2", "second": "b v2 uv", "third": "c mean w2 uvw term", "loss": "loss"}
    assert crossings(layers) == ["%a:0 %u2:0", "%b:0 %uv:0", "%mean:0 %term:0"]
    assert layers.weight_terms == {"u2", "v2", "w2", "uv", "uvw", "term"}
    assert layers.floating == {"x", "u", "v", "w", "read_u", "read_v", "read_w", "half"}


def test_stages_of_unequal_replica_counts_may_meet_where_a_weight_term_crosses() -> None:
    assert [cut.splittable for cut in layers_of(NETWORK, L2).cuts] == [True, True, False]  # the mean is of the batch


def cut(*starts: int) -> StageGraph:
    return partition(layers_of(NETWORK, L2), starts)


def test_a_term_is_routed_through_the_stages_between() -> None:
    layers = layers_of(NETWORK, "%term = L2Loss(%read_u:0) -> (float32[])")
    stages = partition(layers, (1, 2))
    assert [stage.nodes for stage in stages.stages] == [("a", "term"), ("b",), ("c", "mean", "loss")]
    assert [set(stage.inputs) for stage in stages.stages] == [
        set(),
        {value("a"), value("term")},
        {value("b"), value("term")},
    ]
    assert stages.shared == {value("term")}


def test_only_terms_that_cross_are_shared() -> None:
    assert cut(1).shared == {value("u2")}
    assert cut(2).shared == {value("uv")}
    assert cut().shared == set()


def test_a_cut_that_only_weight_terms_cross_is_impossible() -> None:
    layers = find_layers(
        graph(
            f"""
            {NET}
            {FIRST}
            %print = Print(%a:0) {{layer='first'}} !side
            %term = L2Loss(%read_u:0) -> (float32[])
            %b = MatMul(%x:0, %read_v:0) {{layer='second'}} -> (float32[?,4])
            %loss = Add(%b:0, %term:0) -> (float32[?,4])
            outputs %loss:0
            """
        )
    )
    assert crossings(layers) == ["%term:0", "%b:0 %term:0"]
    assert layers.cut(1).problem == "no tensor crosses here, so the parts are not a pipeline"
    assert layers.positions() == (2,)


def test_a_weight_term_that_is_an_output_is_returned_by_the_layer_of_its_weight() -> None:
    layers = find_layers(graph(f"{NETWORK}\n%term = L2Loss(%read_u:0) -> (float32[])\noutputs %mean:0 %term:0"))
    assert show(layers)["first"] == "a term"
    assert crossings(layers) == ["%a:0", "%b:0"]


def test_a_combination_of_a_term_and_another_scalar_is_computed_where_it_is_used() -> None:
    layers = layers_of(
        NETWORK,
        """
        %strength = variable() -> (resource[])
        %read = ReadVariableOp(%strength:0) -> (float32[]) !read
        %u2 = L2Loss(%read_u:0) -> (float32[])
        %weighed = Mul(%u2:0, %read:0) -> (float32[])
        %term = Neg(%weighed:0) -> (float32[])
        """,
    )
    assert show(layers)["first"] == "a u2"
    assert show(layers)["loss"] == "loss weighed term"
    assert "read" in layers.floating


def test_a_term_of_a_weight_that_two_layers_use_belongs_to_the_first() -> None:
    tied = SECOND.replace("read_v", "read_u")
    layers = layers_of(NET + FIRST + tied + THIRD, "%term = L2Loss(%read_u:0) -> (float32[])")
    assert show(layers)["first"] == "a term"


def test_scalars_of_weights_may_be_stacked() -> None:
    layers = layers_of(
        NETWORK,
        """
        %u2 = L2Loss(%read_u:0) -> (float32[])
        %v2 = L2Loss(%read_v:0) -> (float32[])
        %stack = Pack(%u2:0, %v2:0) -> (float32[2])
        %axes = Const() -> (int32[1])
        %term = Sum(%stack:0, %axes:0) -> (float32[])
        """,
    )
    assert show(layers)["second"] == "b v2 stack term"


def test_a_weight_term_is_cut_where_it_is_reduced_to_a_scalar() -> None:
    layers = layers_of(
        NETWORK,
        """
        %square = Mul(%read_u:0, %read_u:0) -> (float32[4,4])
        %sum = Sum(%square:0) -> (float32[1,1])
        %root = Sqrt(%sum:0) -> (float32[1,1])
        %term = Squeeze(%root:0) -> (float32[])
        """,
    )
    assert show(layers)["first"] == "a term"
    assert {"square", "sum", "root"} <= layers.floating


FLOATS = {
    "a weight is computed from it": (
        NET
        + FIRST
        + SECOND
        + """
        %term = L2Loss(%read_u:0) -> (float32[])
        %normed = Div(%read_w:0, %term:0) -> (float32[4,4])
        %c = MatMul(%b:0, %normed:0) {layer='third'} -> (float32[?,4])
        %mean = Mean(%c:0) {layer='third'} -> (float32[])
        """
    ),
    "a weight is computed from what is computed from it": (
        NET
        + FIRST
        + SECOND
        + """
        %term = L2Loss(%read_u:0) -> (float32[])
        %root = Sqrt(%term:0) -> (float32[])
        %normed = Div(%read_w:0, %root:0) -> (float32[4,4])
        %c = MatMul(%b:0, %normed:0) {layer='third'} -> (float32[?,4])
        %mean = Mean(%c:0) {layer='third'} -> (float32[])
        """
    ),
    "as long as the batch": (
        NETWORK
        + """
        %u2 = L2Loss(%read_u:0) -> (float32[])
        %shape = Shape(%x:0) -> (int32[2])
        %ones = Fill(%shape:0, %u2:0) -> (float32[?,4])
        %term = Mean(%ones:0) -> (float32[])
        """
    ),
    "divided by the batch's size": (
        NETWORK
        + """
        %u2 = L2Loss(%read_u:0) -> (float32[])
        %size = Size(%x:0) -> (float32[])
        %term = Div(%u2:0, %size:0) -> (float32[])
        """
    ),
    "of unknown length": (
        NETWORK
        + """
        %term = L2Loss(%read_u:0) -> (float32[])
        %some = Where(%term:0) -> (float32[_])
        %print = Print(%some:0) !side
        """
    ),
    "a string": (
        NETWORK
        + """
        %u2 = L2Loss(%read_u:0) -> (float32[])
        %text = AsString(%u2:0) -> (string[])
        %print = Print(%text:0) !side
        %term = Neg(%u2:0) -> (float32[])
        """
    ),
    "of two variables": NETWORK
    + """
        %both = Add(%read_u:0, %read_v:0) -> (float32[4,4])
        %term = L2Loss(%both:0) -> (float32[])
        """,
    "beside a whole variable": (
        NETWORK
        + """
        %u2 = L2Loss(%read_u:0) -> (float32[])
        %term = PartitionedCall(%u2:0, %w:0) -> (float32[]) !read
        """
    ),
    "an integer": (
        NETWORK
        + """
        %most = ArgMax(%read_u:0) -> (int64[])
        %term = Cast(%most:0) -> (float32[])
        """
    ),
    "of a variable that is a number": (
        NETWORK
        + """
        %n = variable() -> (resource[])
        %read_n = ReadVariableOp(%n:0) -> (float32[]) !read
        %d = Mul(%a:0, %read_n:0) {layer='first'} -> (float32[?,4])
        %print = Print(%d:0) !side
        %term = Exp(%read_n:0) -> (float32[])
        """
    ),
    "several numbers at once": (
        NETWORK + "%moments = Moments(%read_u:0) -> (float32[], float32[])\n%term = Neg(%moments:1) -> (float32[])"
    ),
    "of a variable that nothing else uses": (
        NETWORK
        + """
        %n = variable() -> (resource[])
        %read_n = ReadVariableOp(%n:0) -> (float32[4]) !read
        %term = L2Loss(%read_n:0) -> (float32[])
        """
    ),
    "taken before its variable is used": (
        NET
        + """
        %term = L2Loss(%read_w:0) -> (float32[])
        %a = MatMul(%x:0, %term:0) {layer='first'} -> (float32[?,4])
        """
        + SECOND
        + THIRD
    ),
}


@pytest.mark.parametrize("text", FLOATS.values(), ids=FLOATS)
def test_reductions_that_are_no_weight_terms_float(text: str) -> None:
    layers = layers_of(text)
    assert layers.weight_terms == set()
    assert "term" in layers.floating


def test_a_scalar_that_no_layer_uses_is_no_weight_term() -> None:
    layers = layers_of(
        NETWORK, "%dead = L2Loss(%read_v:0) -> (float32[])", "\n%term = L2Loss(%read_u:0) -> (float32[])"
    )
    assert layers.weight_terms == {"term"}


def test_a_scalar_that_only_the_layer_of_its_weight_uses_floats() -> None:
    layers = find_layers(
        graph(
            f"""
            {NET}
            %u2 = L2Loss(%read_u:0) -> (float32[])
            %h = MatMul(%x:0, %read_u:0) {{layer='first'}} -> (float32[?,4])
            %a = Mul(%h:0, %u2:0) {{layer='first'}} -> (float32[?,4])
            {SECOND}
            outputs %b:0
            """
        )
    )
    assert layers.weight_terms == set()
    assert "u2" in layers.floating
