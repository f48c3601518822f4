"""Layers of a captured graph, floating nodes, and where the graph can be cut."""

from __future__ import annotations

import pytest

from dapple_tf.errors import PartitionError
from dapple_tf.graph_passes.analysis.layers import (
    Layers,
    batch_axis,
    find_floating,
    find_layers,
    live_nodes,
    variables_of,
    written_variables,
)
from dapple_tf.graph_passes.ir.graph import DType, Shape, TensorType, tensor
from tests.graph_passes.builders import graph, refused

TWO_DENSE = """
    inputs %x
    %x = arg() -> (float32[?,4])
    %w = variable() -> (resource[])
    %v = variable() -> (resource[])
    %r = ReadVariableOp(%w:0) -> (float32[4,4]) !read
    %h = MatMul(%x:0, %r:0) {layer='net/first'} -> (float32[?,4])
    %a = Relu(%h:0) {layer='net/first'} -> (float32[?,4])
    %s = ReadVariableOp(%v:0) -> (float32[4,4]) !read
    %y = MatMul(%a:0, %s:0) {layer='net/second'} -> (float32[?,4])
    %loss = Mean(%y:0) -> (float32[])
    outputs %loss:0
"""


def chain(*paths: str) -> Layers:
    """One op in each of these Keras layers, in a row ("" for an op of no layer)."""
    lines, before = ["inputs %x", "%x = arg() -> (float32[?])"], "x"
    for i, path in enumerate(paths):
        attrs = f" {{layer={path!r}}}" if path else ""
        lines.append(f"%op{i} = Neg(%{before}:0){attrs} -> (float32[?])")
        before = f"op{i}"
    return find_layers(graph("\n".join([*lines, f"outputs %{before}:0"])))


def crossings(layers: Layers) -> list[str]:
    """The tensors that cross each cut, as text."""
    return [" ".join(sorted(map(str, cut.crossing))) for cut in layers.cuts]


def test_ops_of_a_keras_layer_are_one_layer_and_each_other_op_is_its_own() -> None:
    layers = find_layers(graph(TWO_DENSE))
    assert [(layer.name, layer.nodes) for layer in layers.layers] == [
        ("net/first", ("h", "a")),
        ("net/second", ("y",)),
        ("loss", ("loss",)),
    ]


def test_an_op_of_a_keras_layer_that_has_layers_is_named_by_its_path() -> None:
    layers = find_layers(
        graph(
            """
            inputs %x
            %x = arg() -> (float32[?])
            %a/neg = Neg(%x:0) {within='net/block'} -> (float32[?])
            %a/exp = Exp(%a/neg:0) {within='net/block'} -> (float32[?])
            outputs %a/exp:0
            """
        )
    )
    assert [(layer.name, layer.nodes) for layer in layers.layers] == [
        ("net/block/neg", ("a/neg",)),
        ("net/block/exp", ("a/exp",)),
    ]
    assert layers.find("block") == 0


def test_activations_cross_and_weights_do_not() -> None:
    layers = find_layers(graph(TWO_DENSE))
    assert crossings(layers) == ["%a:0", "%y:0"]
    assert [cut.position for cut in layers.cuts] == [1, 2]
    assert layers.positions() == (1, 2)
    assert layers.cut(2).crossing == layers.cuts[1].crossing


def test_a_skip_crosses_every_cut_up_to_its_last_use() -> None:
    layers = find_layers(
        graph(
            """
            inputs %x
            %x = arg() -> (float32[?,4])
            %a = Neg(%x:0) -> (float32[?,4])
            %b = Exp(%a:0) -> (float32[?,4])
            %c = Log(%b:0) -> (float32[?,4])
            %d = Add(%c:0, %a:0) -> (float32[?,4])
            outputs %d:0
            """
        )
    )
    assert crossings(layers) == ["%a:0", "%a:0 %b:0", "%a:0 %c:0"]


def test_each_output_of_an_op_crosses_on_its_own() -> None:
    layers = find_layers(
        graph(
            """
            inputs %x
            %x = arg() -> (float32[?,4])
            %s = Split(%x:0) -> (float32[?,2], float32[?,2])
            %a = Neg(%s:1) -> (float32[?,2])
            %b = Add(%a:0, %s:0) -> (float32[?,2])
            outputs %b:0
            """
        )
    )
    assert crossings(layers) == ["%s:0 %s:1", "%a:0 %s:0"]


def test_a_layer_called_twice_has_two_names() -> None:
    assert [layer.name for layer in chain("d", "e", "d").layers] == ["d", "e", "d.2"]


def test_names_of_layers_are_unique_even_where_one_is_called_like_a_repeat() -> None:
    names = [layer.name for layer in chain("d", "e", "d", "d.2").layers]
    assert len(set(names)) == 4


FLOATING = """
    inputs %x
    %x = arg() -> (float32[?,4])
    %w = variable() -> (resource[])
    %mean = variable() -> (resource[])
    %k = capture() -> (float32[])
    %c = Const() -> (float32[])
    %kc = Mul(%k:0, %c:0) -> (float32[])
    %r = ReadVariableOp(%w:0) -> (float32[4]) !read
    %shape = Shape(%x:0) -> (int32[2])
    %rows = StridedSlice(%shape:0, %c:0) -> (int32[])
    %m = ReadVariableOp(%mean:0) -> (float32[4]) !read
    %noise = RandomUniform(%shape:0) -> (float32[?,4]) !random
    %h = Add(%x:0, %r:0) -> (float32[?,4])
    %hshape = Shape(%h:0) -> (int32[2])
    %put = AssignVariableOp(%mean:0, %c:0) {writes=['mean']} !write ^%m 'auto'
"""


def test_constants_reads_and_shapes_of_arguments_float() -> None:
    inputs, computed = {"x", "w", "mean", "k"}, {"c", "kc", "r", "shape", "rows"}
    assert find_floating(graph(FLOATING)) == inputs | computed


def test_variables_that_forward_writes_are_found() -> None:
    captured = graph(FLOATING)
    written = written_variables(captured)
    assert {name: [node.name for node in nodes] for name, nodes in written.items()} == {"mean": ["put"]}
    assert variables_of(captured, captured.node("put")) == ("mean",)


def test_ops_without_use_are_in_no_layer_unless_they_have_effects() -> None:
    captured = graph(
        """
        inputs %x
        %x = arg() -> (float32[?])
        %v = variable() -> (resource[])
        %dead = Neg(%x:0) -> (float32[?])
        %y = Exp(%x:0) -> (float32[?])
        %print = Print(%y:0) !side
        %put = AssignVariableOp(%v:0, %y:0) {writes=['v']} !write
        %loss = Mean(%y:0) -> (float32[])
        outputs %loss:0
        """
    )
    assert live_nodes(captured) == {"x", "v", "y", "print", "put", "loss"}
    assert [layer.name for layer in find_layers(captured).layers] == ["y", "print", "put", "loss"]


@pytest.mark.parametrize(
    ("kind", "axis"),
    [
        (tensor("float32", None, 4), 0),
        (tensor("float32", 8, None, 4), 1),
        (tensor("float32", None, None), None),
        (tensor("float32", 4), None),
        (tensor("float32"), None),
        (TensorType(DType("float32"), Shape(None)), None),
    ],
)
def test_the_batch_axis_is_the_only_one_of_unknown_length(kind: TensorType, axis: int | None) -> None:
    assert batch_axis(kind) == axis


def test_a_cut_is_splittable_where_every_tensor_has_one_batch_axis() -> None:
    layers = find_layers(
        graph(
            """
            inputs %x
            %x = arg() -> (float32[?,4])
            %a = Neg(%x:0) -> (float32[?,4])
            %b = Sum(%a:0) -> (float32[4])
            %c = Add(%b:0, %a:0) -> (float32[?,4])
            outputs %c:0
            """
        )
    )
    assert crossings(layers) == ["%a:0", "%a:0 %b:0"]
    assert [cut.splittable for cut in layers.cuts] == [True, False]


PROBLEMS = [
    (
        "%h = Neg(%x:0) -> (float32[?])\n%print = Print(%x:0) !side",
        "no tensor crosses here, so the parts are not a pipeline",
    ),
    (
        "%l = TensorListReserve(%x:0) -> (variant[])\n%h = TensorListStack(%l:0) -> (float32[?])",
        "%l:0 crosses here, and a variant tensor cannot leave its device",
    ),
    (
        "%m = ReadVariableOp(%v:0) -> (float32[]) !read\n%h = Add(%m:0, %x:0) -> (float32[?])\n"
        "%put = AssignVariableOp(%v:0, %h:0) {writes=['v']} !write",
        "forward writes variable 'v' and uses it on both sides",
    ),
]


@pytest.mark.parametrize(("body", "problem"), PROBLEMS)
def test_an_impossible_cut_says_why(body: str, problem: str) -> None:
    head = "inputs %x\n%x = arg() -> (float32[?])\n%v = variable() -> (resource[])"
    layers = find_layers(graph(f"{head}\n{body}\noutputs %h:0"))
    assert layers.cut(1).problem == problem
    assert layers.positions() == ()


def test_cuts_that_another_trace_cannot_have_are_left_out() -> None:
    head = "inputs %x\n%x = arg() -> (float32[?])\n%v = variable() -> (resource[])\n%a = Neg(%x:0) -> (float32[?])"
    own = find_layers(graph(f"{head}\n%b = Neg(%a:0) -> (float32[?])\n%c = Neg(%b:0) -> (float32[?])\noutputs %c:0"))
    other = find_layers(
        graph(
            f"{head}\n%m = ReadVariableOp(%v:0) -> (float32[]) !read\n%b = Add(%a:0, %m:0) -> (float32[?])\n"
            "%put = AssignVariableOp(%v:0, %b:0) {writes=['v']} !write\noutputs %b:0"
        )
    )
    assert own.positions() == (1, 2)
    restricted = own.cut_only_as(other)
    assert restricted.positions() == ()
    assert restricted.cut(1).problem == "forward writes variable 'v' and uses it on both sides"
    assert restricted.cut(2).problem == "with one micro-batch no stage can start here"
    assert own.cut_only_as(own) == own


def test_a_function_that_computes_nothing_has_no_layers() -> None:
    with refused(PartitionError, "the function 'f' computes nothing from its arguments"):
        find_layers(graph("inputs %x\n%x = arg() -> (float32[?])\n%c = Const() -> (float32[])\noutputs %c:0"))


def test_a_function_that_draws_its_samples_has_the_layers_that_use_them() -> None:
    layers = find_layers(
        graph(
            """
            inputs %x
            %rows = rows() -> (int64[3])
            %x = arg() -> (float32[?])
            %w = variable() -> (resource[])
            %seed = variable() -> (resource[])
            %s = ReadVariableOp(%seed:0) -> (int64[2]) !read
            %z = Draw(%rows:0, %s:0) -> (float32[?,4])
            %r = ReadVariableOp(%w:0) -> (float32[4,4]) !read
            %h = MatMul(%z:0, %r:0) -> (float32[?,4])
            %loss = Sum(%h:0) -> (float32[])
            outputs %loss:0
            """
        )
    )
    assert [name for layer in layers.layers for name in layer.nodes] == ["z", "h", "loss"]
    assert {"s", "r"} <= layers.floating


NET = ("net/block1/conv", "net/block1/norm", "net/block2/conv", "net/block2/norm", "net/head", "")


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("net/block1/norm", 1),
        ("block2/conv", 2),
        ("block2", 2),
        ("net/block2", 2),
        ("head", 4),
        ("net", 0),
        ("op5", 5),
    ],
)
def test_a_layer_is_found_by_name_or_by_a_part_of_its_path(name: str, index: int) -> None:
    assert chain(*NET).find(name) == index


@pytest.mark.parametrize(
    ("name", "indices"),
    [("net/block1/norm", (1,)), ("block2", (2, 3)), ("net", (0, 1, 2, 3, 4)), ("op5", (5,))],
)
def test_all_layers_under_a_part_of_a_path_are_found(name: str, indices: tuple[int, ...]) -> None:
    assert chain(*NET).find_all(name) == indices


def test_the_error_of_an_ambiguous_name_lists_all_matches() -> None:
    with refused(PartitionError, "layer name 'conv' is ambiguous: it may be net/block1/conv, net/block2/conv. Write"):
        chain(*NET).find("conv")


def test_a_name_inside_its_own_layer_is_not_ambiguous() -> None:
    assert chain("stem", "net/net/dense", "net/net/norm").find("net") == 1


@pytest.mark.parametrize(
    ("name", "near"),
    [("blok2", "'block2'"), ("hed", "'head'"), ("net/block1/convv", "'net/block1/conv'")],
)
def test_the_error_of_an_unknown_name_lists_the_nearest_names(name: str, near: str) -> None:
    with refused(PartitionError, f"no layer is called {name!r}; the nearest are ", near):
        chain(*NET).find(name)


def test_the_error_of_a_name_like_no_other_lists_the_first_names() -> None:
    with refused(PartitionError, "no layer is called 'qqqq'; the nearest are 'first', 'second'"):
        chain("first", "second").find("qqqq")


def test_a_model_is_not_cut_between_a_list_and_the_custom_gradient_that_captures_it() -> None:
    """What forward does not use, %set, is computed where the gradient is, from the list %start."""
    layers = find_layers(
        graph("""
            inputs %x
            %x = arg() -> (float32[?])
            %a = Neg(%x:0) -> (float32[?])
            %start = TensorListFromTensor(%a:0) -> (variant[])
            %d = TensorListLength(%start:0) -> (int32[])
            %set = TensorListSetItem(%start:0, %a:0) -> (variant[])
            %b = Exp(%a:0) -> (float32[?])
            %c = IdentityN(%b:0) {captures=['set']} -> (float32[?])
            %loss = Mean(%c:0) -> (float32[])
            outputs %loss:0 %d:0
        """)
    )
    problems = {layers.layers[cut.position].name: cut.problem for cut in layers.cuts}
    assert problems["start"] == ""
    assert "a variant tensor cannot leave its device" in problems["d"]
    assert all("custom gradient of 'c' captures a list of tensors" in problems[name] for name in ("b", "c"))
    assert problems["loss"] == ""
