"""Hypothesis strategies: random graphs of the IR."""

from __future__ import annotations

import keyword
import string

from hypothesis import strategies as st

from dapple_tf.graph_passes.ir.graph import (
    Attr,
    Control,
    DType,
    Effect,
    Function,
    FunctionRef,
    Graph,
    Node,
    Opaque,
    Port,
    Shape,
    TensorType,
    Value,
    attributes,
)

names = st.text(string.ascii_letters + string.digits + "_./->", min_size=1, max_size=8)
ops = st.text(string.ascii_letters + string.digits + "_>.", min_size=1, max_size=6)
keys = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,5}", fullmatch=True).filter(lambda key: not keyword.iskeyword(key))
dtypes = st.builds(DType, st.sampled_from(["float32", "bfloat16", "bool", "resource", "int64", "float8_e5m2"]))
dims = st.none() | st.lists(st.none() | st.integers(0, 99), max_size=3).map(tuple)
shapes = st.builds(Shape, dims)
types = st.builds(TensorType, dtypes, shapes)
scalars: st.SearchStrategy[Attr] = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=9),
    st.binary(max_size=9),
    dtypes,
    shapes,
    st.builds(FunctionRef, st.text(max_size=9)),
    st.builds(Opaque, st.binary(max_size=9)),
)
attrs: st.SearchStrategy[Attr] = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5
)


@st.composite
def nodes_named(draw: st.DrawFn, name: str, before: list[Node]) -> Node:
    """A node that takes values of, and runs after, some of the nodes ``before``."""
    available = [value for node in before for value in node.values()]
    inputs: list[Value] = draw(st.lists(st.sampled_from(available), max_size=3)) if available else []
    sources: list[Node] = draw(st.lists(st.sampled_from(before), max_size=2)) if before else []
    return Node(
        name,
        draw(ops),
        tuple(inputs),
        tuple(draw(st.lists(types, max_size=2))),
        attributes(draw(st.dictionaries(keys, attrs, max_size=3))),
        tuple(Control(source.name, draw(st.text(min_size=1, max_size=9))) for source in sources),
        draw(st.sampled_from(Effect)),
        draw(st.text(max_size=9)),
    )


ports = st.builds(Port, st.sampled_from(["arg", "boundary", "stash"]), st.text(max_size=9), types)


@st.composite
def graphs(draw: st.DrawFn, depth: int = 1) -> Graph:
    """A graph whose nodes stand in a topological order; stage functions and library included."""
    nodes: list[Node] = []
    for name in draw(st.lists(names, unique=True, max_size=4)):
        nodes.append(draw(nodes_named(name, nodes)))
    available = [value for node in nodes for value in node.values()]
    functions = []
    for name in draw(st.lists(names, unique=True, max_size=2)) if depth else []:
        takes, gives = draw(st.lists(ports, max_size=2)), draw(st.lists(ports, max_size=2))
        functions.append(Function(name, draw(graphs(depth=depth - 1)), tuple(takes), tuple(gives)))
    return Graph(
        draw(names),
        tuple(nodes),
        tuple(node.name for node in nodes[: draw(st.integers(0, 2))]),
        tuple(draw(st.lists(st.sampled_from(available), max_size=3))) if available else (),
        tuple(functions),
        tuple(draw(st.dictionaries(names, st.binary(max_size=9), max_size=2)).items()),
    )
