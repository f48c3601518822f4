"""The call-level graph: every stage's forward and backward once for each micro-batch."""

from __future__ import annotations

from typing import Any

import pytest

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import DType, Graph, Shape, TensorType, tensor
from dapple_tf.graph_passes.ir.verify import verify
from dapple_tf.graph_passes.passes.microbatch import Microbatch, merge_kind
from tests.graph_passes.builders import assert_graph, call_graph, function, refused, two_stages

X = "inputs %x\n%x = input() {index=0} -> (float32[?,4])\n"

MICRO_BATCH = """
    %stage0/replica0/mbM/slice = slice(%batch/size:0, %x:0) {place, micro_batches=2, replicas=1}
    | -> (float64[], float32[?,4])
    %stage0/replica0/mbM/forward = forward(%stage0/replica0/mbM/slice:1) {call} -> (float32[?,4], float32[?,4])
    %stage1/replica0/mbM/slice = slice(%batch/size:0) {place, micro_batches=2, replicas=1} -> (float64[])
    %stage1/replica0/mbM/forward = forward(%stage0/replica0/mbM/forward:0) {call} -> (float32[], float32[?,4])
    %stage1/replica0/mbM/seed = loss_gradient(%stage1/replica0/mbM/slice:0) {place} -> (float32[])
    %stage1/replica0/mbM/backward = backward(%stage0/replica0/mbM/forward:0, %stage1/replica0/mbM/seed:0,
    | %stage1/replica0/mbM/forward:1) {call} -> (float32[?,4], float32[4])
    %stage0/replica0/mbM/backward = backward(%stage1/replica0/mbM/backward:0, %stage0/replica0/mbM/forward:1) {call}
    | -> (float32[4])
"""


def test_two_stages_and_two_micro_batches() -> None:
    result = Microbatch(2, 2)(call_graph(X, *two_stages()))
    verify(result)
    assert_graph(
        result,
        f"""
        {X}
        %batch/size = batch_size(%x:0) -> (int64[])
        {MICRO_BATCH.replace("M", "0")}
        {MICRO_BATCH.replace("M", "1")}
        %loss = merge(%stage1/replica0/mb0/forward:0, %stage1/replica0/mb0/slice:0,
        | %stage1/replica0/mb1/forward:0, %stage1/replica0/mb1/slice:0) {{kind='mean'}} -> (float32[])
        outputs %loss:0
        """,
    )


def test_gradients_of_weights_follow_those_of_inputs_and_take_what_they_carry() -> None:
    functions = (
        function("stage0/forward", "arg x, variable w", "boundary h"),
        function("stage0/inputs"),
        function("stage0/weights", "arg x, gradient h", "variable w"),
        function("stage1/forward", "boundary h, variable v", "loss loss, stash b"),
        function("stage1/inputs", "seed loss, stash b", "gradient h, carry c"),
        function("stage1/weights", "boundary h, seed loss, carry c, variable v", "variable v"),
    )
    result = Microbatch(2, 1, split=frozenset({(0, 0), (1, 0)}))(call_graph(X, *functions))
    verify(result)
    assert_graph(
        result,
        f"""
        {X}
        %batch/size = batch_size(%x:0) -> (int64[])
        %stage0/replica0/mb0/slice = slice(%batch/size:0, %x:0) {{place, micro_batches=1, replicas=1}}
        | -> (float64[], float32[?,4])
        %stage0/replica0/mb0/forward = forward(%stage0/replica0/mb0/slice:1) {{call}} -> (float32[?,4])
        %stage1/replica0/mb0/slice = slice(%batch/size:0) {{place, micro_batches=1, replicas=1}} -> (float64[])
        %stage1/replica0/mb0/forward = forward(%stage0/replica0/mb0/forward:0) {{call}} -> (float32[], float32[?,4])
        %stage1/replica0/mb0/seed = loss_gradient(%stage1/replica0/mb0/slice:0) {{place}} -> (float32[])
        %stage1/replica0/mb0/inputs = inputs(%stage1/replica0/mb0/seed:0, %stage1/replica0/mb0/forward:1) {{call}}
        | -> (float32[?,4], float32[?,4])
        %stage1/replica0/mb0/weights = weights(%stage0/replica0/mb0/forward:0, %stage1/replica0/mb0/seed:0,
        | %stage1/replica0/mb0/inputs:1) {{call}} -> (float32[4])
        %stage0/replica0/mb0/inputs = inputs() {{call}}
        %stage0/replica0/mb0/weights = weights(%stage0/replica0/mb0/slice:1, %stage1/replica0/mb0/inputs:0) {{call}}
        | -> (float32[4])
        %loss = merge(%stage1/replica0/mb0/forward:0, %stage1/replica0/mb0/slice:0) {{kind='mean'}} -> (float32[])
        outputs %loss:0
        """,
    )


MIXED = (
    function("stage0/forward", "arg x, variable w", "boundary h, stash a"),
    function("stage0/backward", "gradient h, stash a", "variable w"),
    function("stage1/forward", "boundary h, variable v", "loss loss, stash b"),
    function("stage1/backward", "boundary h, seed loss, stash b", "gradient h, variable v"),
    function("stage1/inputs", "seed loss, stash b", "gradient h, carry c"),
    function("stage1/weights", "boundary h, seed loss, carry c", "variable v"),
)


@pytest.mark.parametrize("m", [0, 1])
def test_only_the_micro_batches_that_are_split_are_called_twice(m: int) -> None:
    """The stage before takes the gradient from the part that gives it."""
    result = Microbatch(2, 2, split=frozenset({(1, m)}))(call_graph(X, *MIXED))
    verify(result)
    whole, split = (MICRO_BATCH.replace("M", str(other)) for other in (1 - m, m))
    call = """
    %stage1/replica0/mbM/backward = backward(%stage0/replica0/mbM/forward:0, %stage1/replica0/mbM/seed:0,
    | %stage1/replica0/mbM/forward:1) {call} -> (float32[?,4], float32[4])
    """.strip().replace("M", str(m))
    assert split.count(call) == 1
    halves = """%stage1/replica0/mbM/inputs = inputs(%stage1/replica0/mbM/seed:0, %stage1/replica0/mbM/forward:1)
    | {function='stage1/inputs', micro_batch=M, replica=0, stage=1} -> (float32[?,4], float32[?,4])
    %stage1/replica0/mbM/weights = weights(%stage0/replica0/mbM/forward:0, %stage1/replica0/mbM/seed:0,
    | %stage1/replica0/mbM/inputs:1)
    | {function='stage1/weights', micro_batch=M, replica=0, stage=1} -> (float32[4])""".replace("M", str(m))
    split = split.replace(call, halves).replace(
        f"%stage1/replica0/mb{m}/backward:0", f"%stage1/replica0/mb{m}/inputs:0"
    )
    assert_graph(
        result,
        f"""
        {X}
        %batch/size = batch_size(%x:0) -> (int64[])
        {split + whole if m == 0 else whole + split}
        %loss = merge(%stage1/replica0/mb0/forward:0, %stage1/replica0/mb0/slice:0,
        | %stage1/replica0/mb1/forward:0, %stage1/replica0/mb1/slice:0) {{kind='mean'}} -> (float32[])
        outputs %loss:0
        """,
    )


def test_an_argument_is_sliced_in_each_stage_that_takes_it() -> None:
    functions = (
        function("stage0/forward", "arg x", "boundary h"),
        function("stage0/backward"),
        function("stage1/forward", "boundary h", "loss loss"),
        function("stage1/backward", "arg y int32[?], arg x, seed loss", "variable v"),
    )
    text = "inputs %x %y\n%x = input() -> (float32[?,4])\n%y = input() -> (int32[?])"
    result = Microbatch(2, 1)(call_graph(text, *functions))
    last = result.node("stage1/replica0/mb0/slice")
    assert list(map(str, last.inputs)) == ["%batch/size:0", "%y:0", "%x:0"]
    assert last.outputs == (tensor("float64"), tensor("int32", None), tensor("float32", None, 4))
    assert list(map(str, result.node("stage1/replica0/mb0/backward").inputs)) == [
        "%stage1/replica0/mb0/slice:1",
        "%stage1/replica0/mb0/slice:2",
        "%stage1/replica0/mb0/seed:0",
    ]
    assert list(map(str, result.node("stage0/replica0/mb0/slice").inputs)) == ["%batch/size:0", "%x:0"]


def test_aux_outputs_are_merged_by_kind_where_they_are_computed() -> None:
    functions = (
        function("stage0/forward", "arg x", "boundary h, aux 1 int32[]"),
        function("stage0/backward"),
        function("stage1/forward", "boundary h", "loss loss, aux 0 float32[?]"),
        function("stage1/backward", "seed loss"),
    )
    result = Microbatch(2, 1, ("concat", "sum"))(call_graph(X, *functions))
    merged = "\n".join(
        f"{node.name} {node.string('kind')} {node.inputs[0]} {node.inputs[1]}" for node in result.nodes[-3:]
    )
    assert merged.splitlines() == [
        "loss mean %stage1/replica0/mb0/forward:0 %stage1/replica0/mb0/slice:0",
        "aux/0 concat %stage1/replica0/mb0/forward:1 %stage1/replica0/mb0/slice:0",
        "aux/1 sum %stage0/replica0/mb0/forward:1 %stage0/replica0/mb0/slice:0",
    ]
    assert list(map(str, result.outputs)) == ["%loss:0", "%aux/0:0", "%aux/1:0"]


def test_the_number_of_nodes_is_proportional_to_stages_times_micro_batches() -> None:
    sizes = [len(Microbatch(2, m)(call_graph(X, *two_stages())).nodes) for m in (1, 2, 5)]
    assert sizes == [3 + 7, 3 + 14, 3 + 35]


def test_a_pipeline_without_arguments_is_refused() -> None:
    with refused(GraphError, "a pipeline needs at least one batched argument"):
        Microbatch(2, 1)(call_graph("", *two_stages()))


def test_no_micro_batch_is_refused() -> None:
    with refused(GraphError, "M = 0: there must be at least one micro-batch"):
        Microbatch(2, 0)(call_graph(X, *two_stages()))


@pytest.mark.parametrize(
    ("kind", "merged"),
    [
        (tensor("float32", None, 4), "concat"),
        (tensor("bool", None), "concat"),
        (tensor("float32"), "mean"),
        (tensor("bfloat16", 4), "mean"),
        (tensor("int64"), "sum"),
        (tensor("uint8", 3), "sum"),
    ],
)
def test_how_an_aux_output_is_merged(kind: TensorType, merged: str) -> None:
    assert merge_kind(kind) == merged


@pytest.mark.parametrize("kind", [tensor("float32", 4, None), TensorType(DType("float32"), Shape(None))])
def test_an_aux_output_whose_batch_is_not_on_axis_0_is_refused(kind: TensorType) -> None:
    with refused(
        GraphError, f"an aux output of shape {kind.shape.dims} does not have the batch on axis 0", "transpose"
    ):
        merge_kind(kind)


@pytest.mark.parametrize("dtype", ["bool", "string"])
def test_an_aux_output_that_cannot_be_merged_is_refused(dtype: str) -> None:
    with refused(GraphError, f"an aux output of type {dtype} without a batch axis cannot be merged"):
        merge_kind(TensorType(DType(dtype), Shape(())))


# --- what runs once a step, row bounds, sums


ONCE = (
    function("stage0/run_once", "arg x, rows r int64[3], variable n", "once c:0 float32[]"),
    function("stage0/forward", "arg x, rows r int64[3], once c:0 float32[], variable w", "boundary h"),
    function("stage0/backward", "gradient h, once c:0 float32[]", "variable w"),
    function("stage1/forward", "boundary h, variable v", "loss loss"),
    function("stage1/backward", "boundary h, seed loss", "gradient h, variable v"),
)


def inputs_of(result: Graph, name: str) -> list[str]:
    return [str(value).removeprefix("%") for value in result.node(name).inputs]


def test_what_runs_once_takes_the_whole_batch_before_the_micro_batches() -> None:
    result = Microbatch(2, 2)(call_graph(X, *ONCE))
    verify(result)
    assert [node.name for node in result.nodes if node.op == "run_once"] == ["stage0/replica0/run_once"]
    assert inputs_of(result, "stage0/replica0/run_once") == ["x:0", "stage0/replica0/row_bounds:0"]
    assert inputs_of(result, "stage0/replica0/row_bounds") == ["batch/size:0"]
    assert not result.node("stage0/replica0/row_bounds").has("micro_batch")
    for m in (0, 1):
        forward = result.node(f"stage0/replica0/mb{m}/forward")
        assert "stage0/replica0/run_once" in [control.source for control in forward.controls]
        assert "stage0/replica0/run_once:0" in inputs_of(result, forward.name)
        assert "stage0/replica0/run_once:0" in inputs_of(result, f"stage0/replica0/mb{m}/backward")


def test_each_micro_batch_is_given_its_row_bounds() -> None:
    result = Microbatch(2, 2)(call_graph(X, *ONCE))
    for m in (0, 1):
        bounds = result.node(f"stage0/replica0/mb{m}/row_bounds")
        assert (bounds.integer("micro_batch"), bounds.integer("micro_batches")) == (m, 2)
        assert f"{bounds.name}:0" in inputs_of(result, f"stage0/replica0/mb{m}/forward")


def test_a_stage_that_needs_neither_has_none() -> None:
    result = Microbatch(2, 2)(call_graph(X, *ONCE))
    assert not [node.name for node in result.nodes if node.op in ("run_once", "row_bounds") and "stage1" in node.name]
    plain = Microbatch(2, 2)(call_graph(X, *two_stages()))
    assert not [node.name for node in plain.nodes if node.op in ("run_once", "row_bounds")]


def test_backward_of_a_sum_starts_from_one() -> None:
    result = Microbatch(2, 2, loss="sum")(call_graph(X, *two_stages()))
    verify(result)
    seeds = [node for node in result.nodes if node.op == "loss_gradient"]
    assert [node.name for node in seeds] == [f"stage1/replica0/mb{m}/seed" for m in (0, 1)]
    assert all(not node.inputs and node.outputs == (tensor("float32"),) for node in seeds)
    assert result.node("loss").string("kind") == "sum"


def test_aux_outputs_are_merged_as_they_are_told() -> None:
    functions = (*two_stages()[:2], function("stage1/forward", "boundary h, variable v", LOSS_AND_AUX), two_stages()[3])
    result = Microbatch(2, 2, aux=("first", "sum"))(call_graph(X, *functions))
    assert [result.node(f"aux/{i}").string("kind") for i in (0, 1)] == ["first", "sum"]
    assert result.node("aux/0").op == "merge"


LOSS_AND_AUX = "loss loss, stash b, aux 0 int32[], aux 1 int32[]"


@pytest.mark.parametrize("options", [{"loss": "max"}, {"aux": ("last",)}])
def test_unknown_merges_are_refused(options: Any) -> None:
    with refused(GraphError, "merged by one of concat, mean, sum, first, not by"):
        Microbatch(2, 2, **options)(call_graph(X, *two_stages()))


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_backward_starts_from_the_loss_scale_where_the_optimizer_scales_the_loss(loss: Any) -> None:
    scale = function("optimizer/loss_scale", "variable scale", "combined s float32[]")
    result = Microbatch(2, 2, loss=loss)(call_graph(X, *two_stages(), scale))
    verify(result)
    assert (result.node("optimizer/loss_scale").op, result.node("optimizer/loss_scale").inputs) == ("loss_scale", ())
    share = ["%stage1/replica0/mb1/slice:0"] if loss == "mean" else []
    seed = result.node("stage1/replica0/mb1/seed")
    assert [str(value) for value in seed.inputs] == [*share, "%optimizer/loss_scale:0"]


def test_given_sizes_are_an_attribute_of_what_cuts_the_batch() -> None:
    result = Microbatch(2, 2, sizes=(2, 6))(call_graph(X, *two_stages()))
    verify(result)
    sized = MICRO_BATCH.replace("replicas=1", "replicas=1, sizes=[2, 6]")
    assert_graph(
        result,
        f"""
        {X}
        %batch/size = batch_size(%x:0) -> (int64[])
        {sized.replace("M", "0")}
        {sized.replace("M", "1")}
        %loss = merge(%stage1/replica0/mb0/forward:0, %stage1/replica0/mb0/slice:0,
        | %stage1/replica0/mb1/forward:0, %stage1/replica0/mb1/slice:0) {{kind='mean'}} -> (float32[])
        outputs %loss:0
        """,
    )
    bounds = Microbatch(2, 2, sizes=(2, 6))(call_graph(X, *ONCE)).node("stage0/replica0/mb1/row_bounds")
    assert bounds.integers("sizes") == (2, 6)


def test_another_number_of_sizes_is_refused() -> None:
    with pytest.raises(GraphError, match="M = 2, but there are 3 sizes of micro-batches: give one for each"):
        Microbatch(2, 2, sizes=(1, 2, 3))(call_graph(X, *two_stages()))
