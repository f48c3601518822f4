"""A stage function cut where replicas join values: golden parts, and what they have in common with the whole."""

from __future__ import annotations

from dapple_tf.graph_passes.ir.graph import Function, Value
from dapple_tf.graph_passes.ir.text import print_graph
from dapple_tf.graph_passes.ir.verify import verify
from dapple_tf.graph_passes.passes.function_parts import FunctionParts, cut_function, has_joins
from tests.graph_passes.builders import functions_of, graph

# y = norm(x * w) * w: a constant and a weight on both sides of the join, whose result backward takes too.
NORM = """
    function stage0/forward
    takes arg float32[?,4] 'x' as %arg/0
    takes variable resource[] 'w' as %variable/1
    takes variable resource[] 'm' as %variable/2
    gives boundary float32[?,4] '%y:0' from %y:0
    gives stash float32[3,4] '%j:0' from %j:0
    gives stash float32[] '%one:0' from %one:0
      %one = Const() -> (float32[])
      %r = ReadVariableOp(%variable/1:0) -> (float32[4]) !read
      %old = ReadVariableOp(%variable/2:0) -> (float32[4]) !read
      %a = Mul(%arg/0:0, %r:0) -> (float32[?,4])
      %own = Moments(%a:0, %one:0) -> (float32[3,4])
      %j = Identity(%own:0) {join='moments'} -> (float32[3,4]) !join
      %new = Move(%old:0, %j:0, %one:0) -> (float32[4])
      %write = AssignVariableOp(%variable/2:0, %new:0) {writes=['m']} !write ^%old 'effect: writes what was read before'
      %b = Sub(%a:0, %j:0) -> (float32[?,4])
      %y = Mul(%b:0, %r:0) -> (float32[?,4])
      end
"""


def cut(text: str) -> FunctionParts:
    (whole,) = functions_of(text)
    parts = cut_function(whole)
    verify(graph("").replace(functions=parts.functions))
    return parts


def assert_functions(result: tuple[Function, ...], text: str) -> None:
    expected = graph(text)
    assert print_graph(expected.replace(functions=result)) == print_graph(expected)


def test_a_part_ends_where_replicas_join_and_repeats_constants_and_reads_of_weights() -> None:
    parts = cut(NORM)
    assert [[str(value) for value in values] for values in parts.results] == [
        ["%one:0", "%old:0", "%a:0", "%own:0"],
        ["%y:0"],
    ]
    assert [[node.name for node in nodes] for nodes in parts.joins] == [["j"], []]
    assert_functions(
        parts.functions,
        """
    function stage0/forward/part0
    takes arg float32[?,4] 'x' as %arg/2
    takes variable resource[] 'w' as %variable/0
    takes variable resource[] 'm' as %variable/1
    gives carry float32[] '%one:0' from %one:0
    gives carry float32[4] '%old:0' from %old:0
    gives carry float32[?,4] '%a:0' from %a:0
    gives carry float32[3,4] '%own:0' from %own:0
      %one = Const() -> (float32[])
      %r = ReadVariableOp(%variable/0:0) -> (float32[4]) !read
      %old = ReadVariableOp(%variable/1:0) -> (float32[4]) !read
      %a = Mul(%arg/2:0, %r:0) -> (float32[?,4])
      %own = Moments(%a:0, %one:0) -> (float32[3,4])
      end
    function stage0/forward/part1
    takes carry float32[4] '%old:0' as %carry/1
    takes carry float32[3,4] '%j:0' as %carry/2
    takes carry float32[?,4] '%a:0' as %carry/4
    takes variable resource[] 'w' as %variable/0
    takes variable resource[] 'm' as %variable/3
    gives carry float32[?,4] '%y:0' from %y:0
      %one = Const() -> (float32[])
      %r = ReadVariableOp(%variable/0:0) -> (float32[4]) !read
      %new = Move(%carry/1:0, %carry/2:0, %one:0) -> (float32[4])
      %write = AssignVariableOp(%variable/3:0, %new:0) {writes=['m']} !write
      %b = Sub(%carry/4:0, %carry/2:0) -> (float32[?,4])
      %y = Mul(%b:0, %r:0) -> (float32[?,4])
      end
    """,
    )


# Two branches join at once; their sum joins again, and nothing in the function waits for that.
BRANCHES = """
    function stage0/backward
    takes gradient float32[3,4] 'g' as %gradient/0
    gives variable float32[3,4] 'w' from %j:0
      %a = Neg(%gradient/0:0) -> (float32[3,4])
      %ja = Identity(%a:0) {join='sum'} -> (float32[3,4]) !join
      %jb = Identity(%gradient/0:0) {join='sum'} -> (float32[3,4]) !join
      %sum = Add(%ja:0, %jb:0) -> (float32[3,4])
      %late = Neg(%gradient/0:0) -> (float32[3,4]) ^%sum 'effect: ordered after a side effect'
      %j = Identity(%sum:0) {join='sum'} -> (float32[3,4]) !join
      end
"""


def test_joins_that_do_not_wait_for_each_other_come_after_the_same_part() -> None:
    parts = cut(BRANCHES)
    assert [[node.name for node in nodes] for nodes in parts.joins] == [["ja", "jb"], ["j"]]
    assert [[str(value) for value in values] for values in parts.results] == [["%a:0"], ["%sum:0"]]


def test_control_edges_hold_a_node_in_a_later_part() -> None:
    first, last = cut(BRANCHES).functions
    assert ("late" in first.graph.by_name, "late" in last.graph.by_name) == (False, True)


def test_every_node_but_what_is_repeated_is_in_one_part() -> None:
    (whole,) = functions_of(NORM)
    parts = cut(NORM).functions
    names = [node.name for part in parts for node in part.graph.nodes if node.name not in part.graph.inputs]
    assert sorted({*names, "j"}) == sorted(set(whole.graph.by_name) - set(whole.graph.inputs))
    assert {name for name in names if names.count(name) > 1} == {"one", "r"}


def test_what_a_join_takes_from_outside_is_no_result() -> None:
    assert Value("gradient/0") not in cut(BRANCHES).results[0]


def test_a_function_without_joins_is_known_by_it() -> None:
    (whole,) = functions_of(NORM)
    plain = whole.graph.replace(nodes=tuple(node for node in whole.graph.nodes if node.name != "j"))
    assert has_joins(whole)
    assert not has_joins(Function(whole.name, plain, whole.inputs, whole.outputs))
