"""A backward cut into the gradients of a stage's inputs, and those of its weights."""

from __future__ import annotations

import dataclasses

import pytest

from dapple_tf.graph_passes.ir.graph import Function
from dapple_tf.graph_passes.ir.text import print_graph
from dapple_tf.graph_passes.ir.verify import verify
from dapple_tf.graph_passes.passes.split_weights import SplitWeights, split_function
from tests.graph_passes.builders import call_graph, function, functions_of, graph

# y = reshape(h) @ w + b of a stage that is sent h: what comes back for y is needed for h, for w, and is b's.
DENSE = """
    function stage1/backward
    takes boundary float32[?,2,2] '%h:0' as %boundary/0
    takes gradient float32[?,4] '%y:0' as %gradient/0
    takes variable resource[] 'w' as %variable/0
    gives gradient float32[?,2,2] '%h:0' from %dh:0
    gives variable float32[4] 'b' from %db:0
    gives variable float32[4,4] 'w' from %dw:0
      %flat = Const() -> (int32[2])
      %x = Reshape(%boundary/0:0, %flat:0) -> (float32[?,4])
      %dy = Neg(%gradient/0:0) -> (float32[?,4])
      %db = Sum(%dy:0) -> (float32[4])
      %r = ReadVariableOp(%variable/0:0) -> (float32[4,4]) !read
      %mixed = Mul(%dy:0, %x:0) -> (float32[?,4])
      %dx = MatMul(%mixed:0, %r:0) {transpose_b=True} -> (float32[?,4])
      %dh = Reshape(%dx:0, %flat:0) -> (float32[?,2,2])
      %square = MatMul(%x:0, %mixed:0) {transpose_a=True} -> (float32[4,4])
      %dw = Mul(%square:0, %r:0) -> (float32[4,4])
      end
"""


def split(text: str, *state: str) -> tuple[Function, Function]:
    (given,) = functions_of(text)
    first, second = split_function(given, frozenset(state))
    verify(graph("").replace(functions=(first, second)))
    return first, second


def assert_functions(result: tuple[Function, ...], text: str) -> None:
    expected = graph(text)
    assert print_graph(expected.replace(functions=result)) == print_graph(expected)
    assert result == functions_of(text)


def test_values_that_both_parts_need_are_carried_except_views_and_reads() -> None:
    assert_functions(
        split(DENSE),
        """
        function stage1/inputs
        takes boundary float32[?,2,2] '%h:0' as %boundary/0
        takes gradient float32[?,4] '%y:0' as %gradient/1
        takes variable resource[] 'w' as %variable/2
        gives gradient float32[?,2,2] '%h:0' from %dh:0
        gives carry float32[?,4] '%dy:0' from %dy:0
        gives carry float32[?,4] '%mixed:0' from %mixed:0
          %flat = Const() -> (int32[2])
          %x = Reshape(%boundary/0:0, %flat:0) -> (float32[?,4])
          %dy = Neg(%gradient/1:0) -> (float32[?,4])
          %r = ReadVariableOp(%variable/2:0) -> (float32[4,4]) !read
          %mixed = Mul(%dy:0, %x:0) -> (float32[?,4])
          %dx = MatMul(%mixed:0, %r:0) {transpose_b=True} -> (float32[?,4])
          %dh = Reshape(%dx:0, %flat:0) -> (float32[?,2,2])
          end
        function stage1/weights
        takes boundary float32[?,2,2] '%h:0' as %boundary/0
        takes carry float32[?,4] '%dy:0' as %carry/1
        takes carry float32[?,4] '%mixed:0' as %carry/3
        takes variable resource[] 'w' as %variable/2
        gives variable float32[4] 'b' from %db:0
        gives variable float32[4,4] 'w' from %dw:0
          %flat = Const() -> (int32[2])
          %x = Reshape(%boundary/0:0, %flat:0) -> (float32[?,4])
          %db = Sum(%carry/1:0) -> (float32[4])
          %r = ReadVariableOp(%variable/2:0) -> (float32[4,4]) !read
          %square = MatMul(%x:0, %carry/3:0) {transpose_a=True} -> (float32[4,4])
          %dw = Mul(%square:0, %r:0) -> (float32[4,4])
          end
        """,
    )


def test_a_stage_without_gradients_of_inputs_has_its_whole_backward_in_the_weights_part() -> None:
    text = """
        function stage0/backward
        takes arg float32[?,4] 'x' as %arg/0
        takes gradient float32[?,4] '%y:0' as %gradient/1
        gives variable float32[4,4] 'w' from %dw:0
          %dw = MatMul(%arg/0:0, %gradient/1:0) {transpose_a=True} -> (float32[4,4])
          end
    """
    nothing = "function stage0/inputs\n  graph stage0/inputs\n  end\n"
    assert_functions(split(text), nothing + text.replace("stage0/backward", "stage0/weights"))


def test_a_gradient_that_is_also_sent_is_carried_and_a_received_one_is_an_input_of_both() -> None:
    first, second = split(
        """
        function stage1/backward
        takes gradient float32[?,4] '%y:0' as %gradient/0
        gives gradient float32[?,4] '%h:0' from %both:0
        gives variable float32[?,4] 'v' from %gradient/0:0
        gives variable float32[?,4] 'w' from %both:0
          %both = Neg(%gradient/0:0) -> (float32[?,4])
          end
        """
    )
    assert [(port.role, port.name) for port in first.outputs] == [("gradient", "%h:0"), ("carry", "%both:0")]
    assert [(port.role, port.name) for port in second.inputs] == [("gradient", "%y:0"), ("carry", "%both:0")]
    assert [node.op for node in second.graph.nodes] == ["gradient", "carry"]  # nothing is computed
    assert [second.graph.node(value.node).op for value in second.graph.outputs] == ["gradient", "carry"]


ACTING = """
    function stage1/backward
    takes gradient float32[?,4] '%y:0' as %gradient/0
    takes variable resource[] 'n' as %variable/0
    gives gradient float32[?,4] '%h:0' from %dh:0
    gives variable float32[?,4] 'w' from %dw:0
      %dh = Neg(%gradient/0:0) -> (float32[?,4])
      %g = Exp(%gradient/0:0) -> (float32[?,4])
      ACT
      %dw = Mul(%g:0, %s:0) -> (float32[?,4])
      end
"""


@pytest.mark.parametrize(
    ("act", "state", "early"),
    [
        ("%s = Print(%g:0) -> (float32[?,4]) !side", (), ["dh", "g", "s"]),
        ("%s = RandomUniform(%g:0) -> (float32[?,4]) !random", (), ["dh", "g", "s"]),
        ("%s = AssignSub(%variable/0:0, %g:0) {writes=['n']} -> (float32[?,4]) !write", ("n",), ["dh", "g", "s"]),
        ("%s = ReadVariableOp(%variable/0:0) -> (float32[?,4]) !read", ("n",), ["dh", "s"]),
        ("%s = ReadVariableOp(%variable/0:0) -> (float32[?,4]) !read", (), ["dh"]),
        ("%s = Exp(%g:0) -> (float32[?,4])", ("n",), ["dh"]),
    ],
)
def test_effects_and_reads_of_written_variables_are_in_the_first_part(
    act: str, state: tuple[str, ...], early: list[str]
) -> None:
    first, second = split(ACTING.replace("ACT", act), *state)
    own = [[node.name for node in part.graph.nodes if node.op[0].isupper()] for part in (first, second)]
    assert own[0] == early
    assert sorted(own[0] + own[1]) == ["dh", "dw", "g", "s"]  # each once


def dense_stage(stage: int) -> tuple[Function, Function, Function]:
    """Its forward, backward and update."""
    (backward,) = functions_of(DENSE.replace("stage1", f"stage{stage}"))
    takes = "boundary %h:0 float32[?,2,2], variable w, variable b"
    forward = function(f"stage{stage}/forward", takes, "boundary %y:0")
    return forward, backward, function(f"stage{stage}/update", "gradient w, variable w")


def test_the_pass_splits_every_backward_and_nothing_else() -> None:
    forward, backward, update = dense_stage(0)
    before = call_graph("%x = input() -> (float32[?])", forward, backward, update)
    after = SplitWeights(frozenset({(0, 0), (0, 1)}), 2)(before)
    assert after.function_by_name.keys() == {"stage0/forward", "stage0/inputs", "stage0/weights", "stage0/update"}
    assert after.function("stage0/forward") == forward
    assert (after.function("stage0/inputs"), after.function("stage0/weights")) == split_function(backward)
    assert dataclasses.replace(after, functions=before.functions) == before


def test_a_stage_keeps_the_backward_that_some_micro_batches_run_whole() -> None:
    """Stage 0 splits both of its backwards, stage 1 one of two, and stage 2 none."""
    stages = [dense_stage(stage) for stage in range(3)]
    before = call_graph("", *(function for stage in stages for function in stage))
    after = SplitWeights(frozenset({(0, 0), (0, 1), (1, 1)}), 2)(before)
    verify(after)
    assert [function.name for function in after.functions] == [
        *("stage0/forward", "stage0/inputs", "stage0/weights", "stage0/update"),
        *("stage1/forward", "stage1/backward", "stage1/inputs", "stage1/weights", "stage1/update"),
        *("stage2/forward", "stage2/backward", "stage2/update"),
    ]
    for stage in (1, 2):
        assert after.function(f"stage{stage}/backward") == stages[stage][1]
    for stage in (0, 1):
        halves = after.function(f"stage{stage}/inputs"), after.function(f"stage{stage}/weights")
        assert halves == split_function(stages[stage][1])


def test_a_variable_that_forward_writes_is_read_in_the_first_part() -> None:
    (backward,) = functions_of(ACTING.replace("ACT", "%s = ReadVariableOp(%variable/0:0) -> (float32[?,4]) !read"))
    forward = function("stage0/forward", "arg x, variable n", "loss loss", writes=["n"])
    renamed = dataclasses.replace(backward, name="stage0/backward")
    after = SplitWeights(frozenset({(0, 0)}), 1)(call_graph("", forward, renamed))
    assert "s" in after.function("stage0/inputs").graph.by_name
    assert "s" not in after.function("stage0/weights").graph.by_name


def test_slices_and_indices_belong_to_the_weights() -> None:
    first, second = split(
        """
        function stage1/backward
        takes boundary int64[?] '%ids:0' as %boundary/0
        takes gradient float32[?,4] '%y:0' as %gradient/0
        gives gradient float32[?,4] '%h:0' from %dh:0
        gives slices float32[_,4] 'table' from %rows:0
        gives indices int64[_] 'table' from %boundary/0:0
          %dh = Neg(%gradient/0:0) -> (float32[?,4])
          %rows = Square(%gradient/0:0) -> (float32[?,4])
          end
        """
    )
    assert [port.role for port in first.outputs] == ["gradient"]
    assert [(port.role, port.name) for port in second.outputs] == [("slices", "table"), ("indices", "table")]
    assert [port.name for port in second.inputs] == ["%ids:0", "%y:0"]
