"""Recomputation: what backward repeats, what is stashed for it, and when it may begin."""

from __future__ import annotations

import pytest

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.analysis.recomputation import find_recomputation
from dapple_tf.graph_passes.ir.graph import Graph
from dapple_tf.graph_passes.ir.text import print_graph
from dapple_tf.graph_passes.ir.verify import verify
from dapple_tf.graph_passes.passes.recompute import Recompute, find_runs
from tests.graph_passes.builders import graph, refused

FORWARD = """
    function stage0/forward
    takes boundary float32[?,4] 'h' as %boundary/0
    takes variable resource[] 'w' as %variable/1
    takes variable resource[] 'v' as %variable/2
    gives loss float32[] 'loss' from %loss:0
    {stash}
      %r = ReadVariableOp(%variable/1:0) -> (float32[4,4]) !read
      %p = MatMul(%boundary/0:0, %r:0) -> (float32[?,4])
      %a = Tanh(%p:0) -> (float32[?,4])
      %s = ReadVariableOp(%variable/2:0) -> (float32[4,4]) !read
      %y = MatMul(%a:0, %s:0) -> (float32[?,4])
      %loss = L2Loss(%y:0) -> (float32[])
      %size = Shape(%y:0) -> (int32[2])
      end
"""
KEPT = FORWARD.format(
    stash="""gives stash float32[?,4] '%a:0' from %a:0
    gives stash float32[?,4] '%y:0' from %y:0
    gives stash int32[2] '%size:0' from %size:0"""
)
BACKWARD = """
    function stage0/backward
    takes boundary float32[?,4] 'h' as %boundary/0
    takes seed float32[] 'loss' as %seed/1
    takes stash float32[?,4] '%a:0' as %stash/2
    takes stash float32[?,4] '%y:0' as %stash/3
    takes stash int32[2] '%size:0' as %stash/4
    takes variable resource[] 'v' as %variable/5
    gives variable float32[4,4] 'w' from %dw:0
    gives variable float32[4,4] 'v' from %dv:0
      %s = ReadVariableOp(%variable/5:0) -> (float32[4,4]) !read
      %wide = Fill(%stash/4:0, %seed/1:0) -> (float32[?,4])
      %dy = Mul(%wide:0, %stash/3:0) -> (float32[?,4])
      %da = MatMul(%dy:0, %s:0) {transpose_b=True} -> (float32[?,4])
      %dv = MatMul(%stash/2:0, %dy:0) {transpose_a=True} -> (float32[4,4])
      %dp = TanhGrad(%stash/2:0, %da:0) -> (float32[?,4])
      %dw = MatMul(%boundary/0:0, %dp:0) {transpose_a=True} -> (float32[4,4])
      end
"""
FIRST_LAYER, SECOND_LAYER = {"p", "a"}, {"y", "loss"}


def recomputed(*runs: set[str], text: str = KEPT + BACKWARD) -> Graph:
    """The functions of ``text``, whose one stage recomputes ``runs``; they are valid."""
    result = Recompute((tuple(map(frozenset, runs)),))(graph(text))
    verify(result)
    return result


def assert_functions(result: Graph, text: str) -> None:
    assert print_graph(result) == print_graph(graph(text))  # fails with a difference that can be read
    assert result.functions == graph(text).functions


def test_a_whole_stage_is_recomputed_from_its_inputs() -> None:
    """The size of a tensor is stashed; the inputs of the run wait for the first gradient."""
    assert_functions(
        recomputed(FIRST_LAYER | SECOND_LAYER),
        FORWARD.format(stash="gives stash int32[2] '%size:0' from %size:0")
        + """
        function stage0/backward
        takes boundary float32[?,4] 'h' as %boundary/0
        takes seed float32[] 'loss' as %seed/1
        takes stash int32[2] '%size:0' as %stash/4
        takes variable resource[] 'v' as %variable/5
        takes variable resource[] 'w' as %variable/6
        gives variable float32[4,4] 'w' from %dw:0
        gives variable float32[4,4] 'v' from %dv:0
          %r = ReadVariableOp(%variable/6:0) -> (float32[4,4]) !read
          %wide = Fill(%stash/4:0, %seed/1:0) -> (float32[?,4])
          %recompute0/gate = IdentityN(%wide:0) {T=[dtype('float32')]} -> (float32[?,4])
          %recompute0/enter0 = Identity(%boundary/0:0) {T=dtype('float32')} -> (float32[?,4])
          | ^%recompute0/gate 'recompute: its gradients have come'
          %p = MatMul(%recompute0/enter0:0, %r:0) -> (float32[?,4])
          %a = Tanh(%p:0) -> (float32[?,4])
          %s = ReadVariableOp(%variable/5:0) -> (float32[4,4]) !read
          %y = MatMul(%a:0, %s:0) -> (float32[?,4])
          %dy = Mul(%wide:0, %y:0) -> (float32[?,4])
          %da = MatMul(%dy:0, %s:0) {transpose_b=True} -> (float32[?,4])
          %dv = MatMul(%a:0, %dy:0) {transpose_a=True} -> (float32[4,4])
          %dp = TanhGrad(%a:0, %da:0) -> (float32[?,4])
          %dw = MatMul(%boundary/0:0, %dp:0) {transpose_a=True} -> (float32[4,4])
          end
        """,
    )


def test_a_layer_is_recomputed_when_its_gradients_are_there() -> None:
    assert_functions(
        recomputed(FIRST_LAYER),
        FORWARD.format(
            stash="""gives stash float32[?,4] '%y:0' from %y:0
            gives stash int32[2] '%size:0' from %size:0"""
        )
        + """
        function stage0/backward
        takes boundary float32[?,4] 'h' as %boundary/0
        takes seed float32[] 'loss' as %seed/1
        takes stash float32[?,4] '%y:0' as %stash/3
        takes stash int32[2] '%size:0' as %stash/4
        takes variable resource[] 'v' as %variable/5
        takes variable resource[] 'w' as %variable/6
        gives variable float32[4,4] 'w' from %dw:0
        gives variable float32[4,4] 'v' from %dv:0
          %r = ReadVariableOp(%variable/6:0) -> (float32[4,4]) !read
          %wide = Fill(%stash/4:0, %seed/1:0) -> (float32[?,4])
          %dy = Mul(%wide:0, %stash/3:0) -> (float32[?,4])
          %s = ReadVariableOp(%variable/5:0) -> (float32[4,4]) !read
          %da = MatMul(%dy:0, %s:0) {transpose_b=True} -> (float32[?,4])
          %recompute0/gate = IdentityN(%dy:0, %da:0) {T=[dtype('float32'), dtype('float32')]}
          | -> (float32[?,4], float32[?,4])
          %recompute0/enter0 = Identity(%boundary/0:0) {T=dtype('float32')} -> (float32[?,4])
          | ^%recompute0/gate 'recompute: its gradients have come'
          %p = MatMul(%recompute0/enter0:0, %r:0) -> (float32[?,4])
          %a = Tanh(%p:0) -> (float32[?,4])
          %dv = MatMul(%a:0, %dy:0) {transpose_a=True} -> (float32[4,4])
          %dp = TanhGrad(%a:0, %da:0) -> (float32[?,4])
          %dw = MatMul(%boundary/0:0, %dp:0) {transpose_a=True} -> (float32[4,4])
          end
        """,
    )


def test_stages_without_runs_stay_as_they_are() -> None:
    given = graph(KEPT + BACKWARD)
    assert Recompute(((),))(given) == given


def test_stages_that_are_called_already_are_refused() -> None:
    called = graph(KEPT + BACKWARD + "%f = forward() {function='stage0/forward'}")
    with refused(GraphError, "recomputation changes the inputs of stage functions: run it before the pass"):
        Recompute(((frozenset(FIRST_LAYER),),))(called)


@pytest.mark.parametrize(
    ("layers", "runs"),
    [
        ([], []),
        ([0, 1, 2, 7], [range(2, 3)]),
        ([5, 2, 3, 6], [range(2, 4), range(5, 7)]),
        ([4], [range(4, 5)]),
        (range(9), [range(2, 7)]),
    ],
)
def test_consecutive_layers_of_a_stage_are_one_run(layers: list[int], runs: list[range]) -> None:
    assert find_runs(layers, 2, 7) == tuple(runs)


# --- several runs


def stage(forward: str, kept: str, backward: str) -> str:
    """Functions that take %h, return its gradient and the last node, and stash the values ``kept``."""
    last = forward.strip().splitlines()[-1].split(" = ")[0].strip()
    gives = "".join(f"gives stash float32[?,4] '{value}' from {value}\n" for value in kept.split())
    takes = ""
    for number, value in enumerate(kept.split()):
        takes += f"takes stash float32[?,4] '{value}' as %stash/{number}\n"
        backward = backward.replace(value, f"%stash/{number}:0")
    return f"""
    function stage0/forward
    takes boundary float32[?,4] 'h' as %h
    gives boundary float32[?,4] '{last}:0' from {last}:0
    {gives.strip()}
      {_typed(forward)}
      end
    function stage0/backward
    takes boundary float32[?,4] 'h' as %h
    takes gradient float32[?,4] '{last}:0' as %g
    {takes.strip()}
    gives gradient float32[?,4] 'h' from %dh:0
      {_typed(backward)}
      end
    """


def _typed(lines: str) -> str:
    return "\n".join(f"{line} -> (float32[?,4])" for line in lines.strip().splitlines())


def stash_of(result: Graph) -> list[str]:
    return [port.name for _, port in result.function("stage0/forward").output_ports("stash")]


def gate_of(result: Graph, run: int) -> tuple[list[str], list[str]]:
    """The inputs of run ``run`` and what these wait for, by the names of the backward function's nodes."""
    body = result.function("stage0/backward").graph
    gate = body.node(f"recompute{run}/gate")
    entered = [node for node in body.nodes if node.name.startswith(f"recompute{run}/enter")]
    assert all([control.source for control in node.controls] == [gate.name] for node in entered)
    return [node.inputs[0].node for node in entered], [value.node for value in gate.inputs]


def test_runs_are_recomputed_one_after_the_other() -> None:
    text = stage(
        """
        %a = Exp(%h:0)
        %b = Exp(%a:0)
        %c = Exp(%b:0)
        """,
        "%a:0 %b:0 %c:0",
        """
        %db = Mul(%g:0, %c:0)
        %da = Mul(%db:0, %b:0)
        %dh = Mul(%da:0, %a:0)
        """,
    )
    result = recomputed({"a"}, {"c"}, text=text)
    assert stash_of(result) == ["%b:0"]
    assert gate_of(result, 1) == (["stash/1"], ["g"])
    assert gate_of(result, 0) == (["h"], ["da"])  # which is behind c
    one = recomputed({"a", "b", "c"}, text=text)
    assert stash_of(one) == []
    assert gate_of(one, 0) == (["h"], ["g"])


def test_a_run_waits_neither_for_itself_nor_for_an_earlier_run() -> None:
    """The gradient of c is computed from a, which may be recomputed after c: c waits for entering gradients only."""
    text = stage(
        """
        %a = Exp(%h:0)
        %b = Exp(%a:0)
        %c = Exp(%b:0)
        %d = Mul(%c:0, %a:0)
        """,
        "%a:0 %b:0 %c:0",
        """
        %dc = Mul(%g:0, %a:0)
        %db = Mul(%dc:0, %c:0)
        %more = Mul(%db:0, %b:0)
        %skip = Mul(%g:0, %c:0)
        %da = AddN(%more:0, %skip:0)
        %dh = Mul(%da:0, %a:0)
        """,
    )
    result = recomputed({"a"}, {"c"}, text=text)
    assert gate_of(result, 1) == (["stash/1"], ["g"])
    assert gate_of(result, 0) == (["h"], ["g"])


def test_a_run_waits_for_the_first_gradient_combined_with_its_results() -> None:
    text = stage(
        """
        %a = Exp(%h:0)
        %b = Exp(%a:0)
        """,
        "%a:0 %b:0",
        """
        %da = Mul(%g:0, %b:0)
        %slope = Neg(%a:0)
        %dh = Mul(%da:0, %slope:0)
        """,
    )
    assert gate_of(recomputed({"a"}, text=text), 0) == (["h"], ["da"])


def test_the_inputs_of_a_run_are_stashed() -> None:
    """Otherwise the later run could not be recomputed before the earlier one, whose gradients come later."""
    text = stage(
        """
        %a = Exp(%h:0)
        %b = Neg(%a:0)
        %c = Mul(%b:0, %a:0)
        %d = Exp(%c:0)
        """,
        "%a:0 %b:0 %d:0",
        """
        %dc = Mul(%g:0, %d:0)
        %db = Mul(%dc:0, %a:0)
        %skip = Mul(%dc:0, %b:0)
        %da = AddN(%db:0, %skip:0)
        %dh = Mul(%da:0, %a:0)
        """,
    )
    result = recomputed({"a"}, {"c", "d"}, text=text)
    assert stash_of(result) == ["%a:0", "%b:0"]
    nodes = result.function("stage0/backward").graph.by_name
    assert ("a" in nodes, "c" in nodes, "d" in nodes) == (False, True, True)


def test_a_run_without_such_a_gradient_waits_for_those_that_enter_the_stage() -> None:
    text = stage("%a = Exp(%h:0)", "%a:0", "%dh = Neg(%a:0)")
    assert gate_of(recomputed({"a"}, text=text), 0) == (["h"], ["g"])


def test_forward_does_not_compute_what_it_no_longer_stashes() -> None:
    text = stage(
        """
        %a = Exp(%h:0)
        %b = Neg(%a:0)
        %c = Exp(%h:0)
        """,
        "%b:0",
        "%dh = Mul(%g:0, %b:0)",
    )
    forward, backward = recomputed({"a", "b"}, text=text).functions
    assert [node.name for node in forward.graph.nodes] == ["h", "c"]
    assert {"a", "b"} <= backward.graph.by_name.keys()


# --- what cannot run twice


def recomputation_of(lines: str, kept: str, run: str) -> tuple[set[str], set[str], list[str]]:
    """For a forward of these lines: the nodes that the run recomputes, those repeated freely, and the stash."""
    text = "\n".join(
        [
            "function stage0/forward",
            "takes arg float32[?,64] 'x' as %x",
            "takes variable resource[] 'w' as %w",
            "takes variable resource[] 'n' as %n",
            *(f"gives stash float32[?,64] '{value}' from {value}" for value in kept.split()),
            lines,
            "end",
        ]
    )
    found = find_recomputation(graph(text).functions[0], [set(run.split())])
    return set(found.runs[0]), set(found.free), [str(value) for value in found.stash]


DROPOUT = """
    %size = Shape(%x:0) -> (int32[2])
    %u = RandomUniform(%size:0) -> ({draw}[?,64]) !random
    %half = Const() -> (float32[])
    %mask = GreaterEqual(%u:0, %half:0) -> (bool[?,64])
    %d = SelectV2(%mask:0, %x:0, %half:0) -> (float32[?,64])
    %y = Exp(%d:0) -> (float32[?,64])
"""


def test_the_smaller_of_a_random_draw_and_its_result_is_stashed() -> None:
    repeated, free, stash = recomputation_of(DROPOUT.format(draw="float32"), "%mask:0 %y:0", "size u mask d y")
    assert (repeated, free, stash) == ({"d", "y"}, {"half"}, ["%mask:0"])
    lines = DROPOUT.format(draw="int8").replace("(bool[?,64])", "(int32[?,64])")
    repeated, free, stash = recomputation_of(lines, "%mask:0 %y:0", "size u mask d y")
    assert (repeated, free, stash) == ({"mask", "d", "y"}, {"half"}, ["%u:0"])


def test_the_seed_of_a_stateless_draw_is_stashed() -> None:
    """It was read from a variable that forward then writes (Keras)."""
    repeated, free, stash = recomputation_of(
        """
        %seed = ReadVariableOp(%n:0) -> (int64[2]) !read
        %next = AddV2(%seed:0, %seed:0) -> (int64[2])
        %write = AssignVariableOp(%n:0, %next:0) {writes=['n']} !write
        %size = Shape(%x:0) -> (int32[2])
        %u = StatelessRandomUniformV2(%size:0, %seed:0) -> (float32[?,64])
        %half = Const() -> (float32[])
        %mask = GreaterEqual(%u:0, %half:0) -> (bool[?,64])
        %y = SelectV2(%mask:0, %x:0, %half:0) -> (float32[?,64])
        """,
        "%mask:0 %y:0",
        "seed next write size u mask y",
    )
    assert (repeated, free, stash) == ({"u", "mask", "y"}, {"half"}, ["%seed:0", "%size:0"])


def test_a_draw_of_unknown_rank_is_not_taken_as_small() -> None:
    lines = DROPOUT.format(draw="float32").replace("(float32[?,64]) !random", "(float32[*]) !random")
    assert recomputation_of(lines, "%y:0", "size u mask d y")[2] == ["%mask:0"]


@pytest.mark.parametrize(
    ("line", "stash"),
    [
        ("%a = PyFunc(%x:0) -> (float32[?,64]) !side", "%a:0"),
        ("%a = ReadVariableOp(%n:0) -> (float32[?,64]) !read", "%a:0"),  # which the line below writes
        ("%a = While(%x:0, %n:0) {writes=['n']} -> (float32[?,64]) !write", "%a:0"),
        ("%a = Multinomial(%x:0) -> (float32[?,64]) !random", "%a:0"),
    ],
)
def test_nodes_that_must_run_once_are_not_repeated(line: str, stash: str) -> None:
    repeated, free, found = recomputation_of(
        f"""
        {line}
        %b = AddV2(%a:0, %x:0) -> (float32[?,64])
        %write = AssignVariableOp(%n:0, %b:0) {{writes=['n']}} !write
        """,
        "%b:0",
        "a b write",
    )
    assert (repeated, free, found) == ({"b"}, set(), [stash])


def test_loops_and_reads_of_weights_are_repeated() -> None:
    repeated, free, stash = recomputation_of(
        """
        %r = ReadVariableOp(%w:0) -> (float32[64,64]) !read
        %t = Transpose(%r:0) -> (float32[64,64])
        %l = While(%x:0, %t:0, %w:0) -> (float32[?,64], variant[]) !read
        %y = Exp(%l:0) -> (float32[?,64])
        """,
        "%l:1 %y:0",
        "l y",
    )
    assert (repeated, free, stash) == ({"l", "y"}, {"r", "t"}, [])


def test_sizes_are_stashed_and_what_depends_on_them_alone_is_repeated() -> None:
    """Neither the argument is stashed, nor is a tensor recomputed only for its size."""
    repeated, free, stash = recomputation_of(
        """
        %p = Exp(%x:0) -> (float32[?,64])
        %size = Shape(%p:0) -> (int32[2])
        %one = Const() -> (float32[])
        %zeros = Fill(%size:0, %one:0) -> (float32[?,64])
        %y = AddV2(%zeros:0, %x:0) -> (float32[?,64])
        """,
        "%zeros:0 %y:0",
        "p size zeros y",
    )
    assert (repeated, free, stash) == ({"y"}, {"zeros", "one"}, ["%size:0"])
