"""The call of a model's loss head, once a step, between the forwards and the backwards of all micro-batches."""

from __future__ import annotations

import pytest

from dapple_tf.errors import GraphError, ScheduleError
from dapple_tf.graph_passes.analysis.loss_head import LossHeadInput
from dapple_tf.graph_passes.ir.graph import Function, Graph, Value
from dapple_tf.graph_passes.ir.names import nodes_of
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.ir.verify import verify
from dapple_tf.graph_passes.passes.accumulate import Accumulate
from dapple_tf.graph_passes.passes.allreduce import AllReduce
from dapple_tf.graph_passes.passes.batch_loss import check_forwards_first
from dapple_tf.graph_passes.passes.copy_variables import CopyVariables
from dapple_tf.graph_passes.passes.microbatch import Microbatch
from dapple_tf.graph_passes.passes.order import Order
from dapple_tf.graph_passes.passes.place import Place
from dapple_tf.graph_passes.passes.split_concat import SplitConcat
from dapple_tf.graph_passes.passes.verify_pipeline import VerifyPipeline
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from tests.graph_passes.builders import assert_graph, call_graph, function, refused

X = "inputs %x\n%x = input() {index=0} -> (float32[?,4])\n"
HEAD_INPUTS = (LossHeadInput(Value("z"), 0, 2),)


def one_stage(loss_head: str = "boundary %z:0, variable t") -> tuple[Function, ...]:
    """``x -> [w] -> z``; the loss head computes the loss of all z with a temperature t, and also uses w."""
    return (
        function("stage0/forward", "arg x, variable w", "boundary %z:0, stash a"),
        function("stage0/backward", "gradient %z:0, stash a", "variable w"),
        function("stage0/loss_head", loss_head, "loss loss, gradient %z:0, variable t, variable w"),
    )


def test_all_forwards_then_the_loss_head_then_all_backwards() -> None:
    result = Microbatch(1, 2, head_inputs=HEAD_INPUTS)(call_graph(X, *one_stage()))
    verify(result)
    assert_graph(
        result,
        f"""
        {X}
        %batch/size = batch_size(%x:0) -> (int64[])
        %stage0/replica0/mb0/slice = slice(%batch/size:0, %x:0) {{place, micro_batches=2, replicas=1}}
        | -> (float64[], float32[?,4])
        %stage0/replica0/mb0/forward = forward(%stage0/replica0/mb0/slice:1) {{call}} -> (float32[?,4], float32[?,4])
        %stage0/replica0/mb1/slice = slice(%batch/size:0, %x:0) {{place, micro_batches=2, replicas=1}}
        | -> (float64[], float32[?,4])
        %stage0/replica0/mb1/forward = forward(%stage0/replica0/mb1/slice:1) {{call}} -> (float32[?,4], float32[?,4])
        %stage0/replica0/gather_rows = gather_rows(%stage0/replica0/mb0/forward:0, %stage0/replica0/mb1/forward:0)
        | {{place, axes=[0], outer=[2], pieces=2}} -> (float32[?,4], int64[2])
        %stage0/replica0/loss_head = loss_head(%stage0/replica0/gather_rows:0) {{call}}
        | -> (float32[], float32[?,4], float32[4], float32[4])
        %stage0/replica0/cut_rows = cut_rows(%stage0/replica0/loss_head:1, %stage0/replica0/gather_rows:1)
        | {{place, axes=[0], outer=[2], pieces=2}} -> (float32[?,4], float32[?,4])
        %stage0/replica0/mb0/backward = backward(%stage0/replica0/cut_rows:0, %stage0/replica0/mb0/forward:1)
        | {{call}} -> (float32[4])
        %stage0/replica0/mb1/backward = backward(%stage0/replica0/cut_rows:1, %stage0/replica0/mb1/forward:1)
        | {{call}} -> (float32[4])
        %loss = merge(%stage0/replica0/loss_head:0) {{kind='first'}} -> (float32[])
        outputs %loss:0
        """,
    )


def test_the_loss_head_takes_whole_arguments_and_the_bounds_of_the_whole_batch() -> None:
    functions = one_stage("arg x, rows micro_batch/rows int64[3], boundary %z:0, variable t")
    result = Microbatch(1, 2, head_inputs=HEAD_INPUTS)(call_graph(X, *functions))
    verify(result)
    (loss_head,) = nodes_of(result, OpName.LOSS_HEAD)
    assert [str(value) for value in loss_head.inputs] == [
        "%x:0",
        "%stage0/replica0/row_bounds:0",
        "%stage0/replica0/gather_rows:0",
    ]
    assert not result.node("stage0/replica0/row_bounds").has("micro_batch")


def test_the_bounds_of_the_whole_batch_are_there_once() -> None:
    functions = (
        *one_stage("rows micro_batch/rows int64[3], once seed int64[], boundary %z:0"),
        function("stage0/run_once", "rows micro_batch/rows int64[3]", "once seed int64[]"),
    )
    result = Microbatch(1, 2, head_inputs=HEAD_INPUTS)(call_graph(X, *functions))
    verify(result)
    assert len(nodes_of(result, OpName.ROW_BOUNDS)) == 1
    (loss_head,) = nodes_of(result, OpName.LOSS_HEAD)
    assert "%stage0/replica0/run_once:0" in [str(value) for value in loss_head.inputs]


def test_an_aux_output_of_the_loss_head_is_no_merge_of_micro_batches() -> None:
    functions = (*one_stage()[:2], function("stage0/loss_head", "boundary %z:0", "loss loss, aux 0, gradient %z:0"))
    result = Microbatch(1, 3, ("mean",), head_inputs=HEAD_INPUTS)(call_graph(X, *functions))
    verify(result)
    assert_merge = result.node("aux/0")
    assert [str(value) for value in assert_merge.inputs] == ["%stage0/replica0/loss_head:1"]
    assert assert_merge.string("kind") == "first"


def test_a_loss_head_that_differentiates_no_rows_cuts_none() -> None:
    functions = (
        *one_stage()[:1],
        function("stage0/backward"),
        function("stage0/loss_head", "boundary %z:0", "loss loss"),
    )
    result = Microbatch(1, 2, head_inputs=HEAD_INPUTS)(call_graph(X, *functions))
    assert not nodes_of(result, OpName.CUT_ROWS)


def replicated(*functions: Function, micro_batches: int = 2) -> Graph:
    result = SplitConcat((2,))(Microbatch(1, micro_batches, head_inputs=HEAD_INPUTS)(call_graph(X, *functions)))
    verify(result)
    return result


def test_replicas_send_their_rows_to_the_first_one_in_sample_order() -> None:
    result = replicated(*one_stage())
    (gather,), (loss_head,), (cut,) = (
        nodes_of(result, op) for op in (OpName.GATHER_ROWS, OpName.LOSS_HEAD, OpName.CUT_ROWS)
    )
    assert [str(value) for value in gather.inputs] == [
        f"%stage0/replica{r}/mb{m}/forward:0" for m in range(2) for r in range(2)
    ]
    assert gather.integer("pieces") == cut.integer("pieces") == 4
    assert result.type_of(gather.values()[1]).shape.dims == (4,)
    assert loss_head.integer("replica") == 0
    for m in range(2):
        for r in range(2):
            backward = result.node(f"stage0/replica{r}/mb{m}/backward")
            assert backward.inputs[0] == Value(cut.name, 2 * m + r)
    assert [str(value) for value in result.node("loss").inputs] == ["%stage0/replica0/loss_head:0"]


def test_gradients_of_the_loss_heads_variables_count_once() -> None:
    result = AllReduce()(Accumulate()(CopyVariables()(replicated(*one_stage()))))
    verify(result)
    (reduced,) = nodes_of(result, OpName.REDUCED_GRADIENTS)
    found = dict(zip(reduced.strings("variables"), map(str, reduced.inputs), strict=True))
    assert found["t"] == "%stage0/replica0/loss_head:2"
    (tied,) = nodes_of(result, OpName.TIED_SUM)
    assert found["w"] == f"%{tied.name}:0"
    assert [str(value) for value in tied.inputs] == ["%stage0/allreduce:0", "%stage0/replica0/loss_head:3"]


def test_the_whole_pipeline_with_a_loss_head_is_valid() -> None:
    schedule = ScheduleSpec.parse("gpipe").build(1, 2)
    result = AllReduce()(Accumulate()(CopyVariables()(replicated(*one_stage()))))
    result = Place((("a", "b"),), "home")(Order(schedule)(result))
    VerifyPipeline(schedule)(result)
    with refused(GraphError, "cycle"):
        VerifyPipeline(ScheduleSpec.parse("dapple-a").build(1, 2))(
            Order(ScheduleSpec.parse("dapple-a").build(1, 2))(result)
        )


@pytest.mark.parametrize("name", ["dapple-a", "dapple-b", "zb-h1", "K=3,2"])
def test_a_schedule_whose_last_stage_runs_backward_early_is_refused(name: str) -> None:
    with refused(ScheduleError, "batch_loss", "all M=4 micro-batches", "stage 1", "'gpipe'"):
        check_forwards_first(ScheduleSpec.parse(name).build(2, 4))


@pytest.mark.parametrize(("name", "m"), [("gpipe", 4), ("K=4,4", 4), ("dapple-a", 1)])
def test_schedules_with_all_forwards_first_are_accepted(name: str, m: int) -> None:
    check_forwards_first(ScheduleSpec.parse(name).build(2, m))
