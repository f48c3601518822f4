"""Rows that are gathered from the value of a variable are looked up in the variable."""

from __future__ import annotations

import pytest

from dapple_tf.graph_passes.ir.graph import Function
from dapple_tf.graph_passes.ir.text import print_graph
from dapple_tf.graph_passes.ir.verify import verify
from dapple_tf.graph_passes.passes.look_up_rows import LookUpRows
from tests.graph_passes.builders import functions_of, graph

TYPES = "Taxis=dtype('int32'), Tindices=dtype('int64'), Tparams=dtype('float32'), batch_dims=0"
BEFORE = f"""
    function stage0/forward
    takes arg int64[?] 'x' as %arg/0
    takes variable resource[] 't' as %variable/1
    gives boundary float32[?,4] '%h:0' from %h:0
      %read = ReadVariableOp(%variable/1:0) {{dtype=dtype('float32')}} -> (float32[9,4]) !read
      %axis = Const() -> (int32[])
      %rows = GatherV2(%read:0, %arg/0:0, %axis:0) {{{TYPES}}} -> (float32[?,4])
      %h = Tanh(%rows:0) -> (float32[?,4])
      end
"""
AFTER = """
    function stage0/forward
    takes arg int64[?] 'x' as %arg/0
    takes variable resource[] 't' as %variable/1
    gives boundary float32[?,4] '%h:0' from %h:0
      %rows = ResourceGather(%variable/1:0, %arg/0:0)
      | {Tindices=dtype('int64'), batch_dims=0, dtype=dtype('float32'), validate_indices=True} -> (float32[?,4]) !read
      %h = Tanh(%rows:0) -> (float32[?,4])
      end
"""


def looked_up(text: str, *lookups: str) -> tuple[Function, ...]:
    before = graph("").replace(functions=functions_of(text))
    result = LookUpRows(frozenset(lookups))(before)
    verify(result)
    return result.functions


def test_a_lookup_takes_the_variable_and_the_whole_value_is_not_read() -> None:
    result = looked_up(BEFORE, "rows")
    assert print_graph(graph("").replace(functions=result)) == print_graph(graph(AFTER))
    assert result == functions_of(AFTER)


def test_control_edges_of_the_read_and_of_the_lookup_are_kept() -> None:
    text = BEFORE.replace("(float32[9,4]) !read", "(float32[9,4]) !read ^%axis 'first'").replace(
        "(float32[?,4])\n      %h", "(float32[?,4]) ^%arg/0 'second'\n      %h"
    )
    ((function),) = looked_up(text, "rows")
    assert [(c.source, c.reason) for c in function.graph.node("rows").controls] == [
        ("axis", "first"),
        ("arg/0", "second"),
    ]
    assert "axis" in function.graph.by_name


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%h = Tanh(%rows:0)", "%h = MatMul(%rows:0, %read:0)"),
        ("from %h:0", "from %read:0"),
        ("%h = Tanh(%rows:0) -> (float32[?,4])", "%h = Tanh(%rows:0) -> (float32[?,4]) ^%read 'after the read'"),
        ("%rows = GatherV2(%read:0, %arg/0:0, %axis:0)", "%rows = GatherV2(%arg/0:0, %read:0, %axis:0)"),
        ("%rows = GatherV2", "%other = GatherV2"),
    ],
    ids=["dense use", "result", "waited for", "indices", "another op"],
)
def test_a_read_that_something_else_needs_stays(old: str, new: str) -> None:
    assert BEFORE.count(old) == 1
    text = BEFORE.replace(old, new).replace("Tanh(%rows:0)", "Tanh(%other:0)" if "%other" in new else "Tanh(%rows:0)")
    assert looked_up(text, "rows") == functions_of(text)
