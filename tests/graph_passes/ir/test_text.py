"""Text form: what prints, what parses, and what is refused with its line."""

from __future__ import annotations

import pytest
from hypothesis import given

from dapple_tf.errors import TextError
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
    tensor,
)
from dapple_tf.graph_passes.ir.text import parse_graph, parse_node, parse_type, print_graph, print_node, print_type
from tests.graph_passes.builders import refused
from tests.graph_passes.strategies import graphs

NODES = [
    ("%a = NoOp()", Node("a", "NoOp")),
    (
        "%stage0/forward = MatMul(%x:0, %w:1) {transpose_a=False} -> (float32[?,8], int64[])",
        Node(
            "stage0/forward",
            "MatMul",
            (Value("x"), Value("w", 1)),
            (tensor("float32", None, 8), tensor("int64")),
            (("transpose_a", False),),
        ),
    ),
    ("%a = Print() @'/device:CPU:0' !side", Node("a", "Print", device="/device:CPU:0", effect=Effect.SIDE)),
    (
        "%c = NoOp() ^%a 'order: 1B2 after 1F3' ^%b \"it's\"",
        Node("c", "NoOp", controls=(Control("a", "order: 1B2 after 1F3"), Control("b", "it's"))),
    ),
]

ATTRS: list[tuple[str, Attr]] = [
    ("True", True),
    ("-3", -3),
    ("real(0.5)", 0.5),
    ("real(-inf)", float("-inf")),
    ("'a } brace'", "a } brace"),
    ("b'\\x00}'", b"\x00}"),
    ("dtype('float32')", DType("float32")),
    ("shape([None, 4])", Shape((None, 4))),
    ("shape([])", Shape(())),
    ("shape(None)", Shape(None)),
    ("function('body')", FunctionRef("body")),
    ("opaque('AP8=')", Opaque(b"\x00\xff")),
    ("[1, [], [dtype('half'), 'x']]", (1, (), (DType("half"), "x"))),
]

GRAPH_TEXT = """\
graph f
inputs %x
%x = arg() -> (float32[?])
%y = call(%x:0) -> (float32[])
outputs %y:0
library body AAE=
function stage0/forward
takes arg float32[?] 'x'
gives loss float32[] 'loss'
  graph g
  inputs %arg/0
  %arg/0 = arg() -> (float32[?])
  %mean = Mean(%arg/0:0) -> (float32[])
  outputs %mean:0
  end
end
"""

GRAPH = Graph(
    "f",
    (
        Node("x", "arg", outputs=(tensor("float32", None),)),
        Node("y", "call", (Value("x"),), (tensor("float32"),)),
    ),
    ("x",),
    (Value("y"),),
    (
        Function(
            "stage0/forward",
            Graph(
                "g",
                (
                    Node("arg/0", "arg", outputs=(tensor("float32", None),)),
                    Node("mean", "Mean", (Value("arg/0"),), (tensor("float32"),)),
                ),
                ("arg/0",),
                (Value("mean"),),
            ),
            (Port("arg", "x", tensor("float32", None)),),
            (Port("loss", "loss", tensor("float32")),),
        ),
    ),
    (("body", b"\x00\x01"),),
)


@pytest.mark.parametrize(("text", "node"), NODES)
def test_a_node_is_one_line(text: str, node: Node) -> None:
    assert print_node(node) == text
    assert parse_node(text) == node


@pytest.mark.parametrize(("text", "attr"), ATTRS)
def test_an_attribute_prints_and_parses(text: str, attr: Attr) -> None:
    node = Node("a", "Op", attrs=(("key", attr),))
    assert print_node(node) == f"%a = Op() {{key={text}}}"
    assert parse_node(f"%a = Op() {{key={text}}}") == node


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("float32[]", tensor("float32")),
        ("int64[?,8]", tensor("int64", None, 8)),
        ("resource[*]", TensorType(DType("resource"), Shape(None))),
    ],
)
def test_a_type_prints_and_parses(text: str, kind: TensorType) -> None:
    assert print_type(kind) == text
    assert parse_type(text) == kind


def test_a_graph_prints_and_parses_with_functions_and_library() -> None:
    assert print_graph(GRAPH) == GRAPH_TEXT
    assert parse_graph(GRAPH_TEXT) == GRAPH


def test_without_functions_only_the_call_level_is_printed() -> None:
    head = GRAPH_TEXT[: GRAPH_TEXT.index("library")]
    assert print_graph(GRAPH, functions=False) == head + "end\n"


def test_indentation_and_empty_lines_do_not_matter() -> None:
    assert parse_graph("\n   graph f\n\n  %a = NoOp()\nend\n\n") == Graph("f", (Node("a", "NoOp"),))


@given(graphs())
def test_what_prints_parses_to_the_same_graph(graph: Graph) -> None:
    text = print_graph(graph)
    assert parse_graph(text) == graph
    assert print_graph(parse_graph(text)) == text  # tells True from 1, as == does not


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nonsense", "expected a node such as %name = Op(), not 'nonsense'"),
        ("%a = Op(%b)", "'%b'"),
        ("%a = Op() -> (float32)", "'float32' is not a type such as float32[?,8]"),
        ("%a = Op() -> (float32[4,x])", "'float32[4,x]' is not a type: '4,x' is not a list of dimensions"),
        ("%a = Op() {b=1.5}", "'1.5' is not an attribute"),
        ("%a = Op() {b=None}", "'None' is not an attribute"),
        ("%a = Op() {b=enum('x')}", "\"enum('x')\" is not an attribute"),
        ("%a = Op() {b=name}", "line 3"),
        ("%a = Op() {b='}", "a closing brace is missing"),
        ("%a = Op() {b=}", "line 3"),
        ("%a = Op() @cpu", "expected a quoted string at 'cpu'"),
        ("%a = Op() ^%b because", "expected a quoted string at 'because'"),
        ("%a = Op() !read and more", "unexpected text after the node: ' and more'"),
        ("%a = Op() !loud", "unknown effect 'loud'; the effects are pure, read, write, random, side"),
        ("%a = Op() !Pure", "unknown effect 'Pure'"),
        ("library f #", "line 3"),
    ],
)
def test_the_error_of_a_bad_line_has_its_number_and_what_is_wrong(line: str, said: str) -> None:
    with refused(TextError, "line 3: ", said):
        parse_graph(f"graph f\n%fine = Op()\n{line}\nend")


@pytest.mark.parametrize(
    "line",
    ["%a = Op(b:0)", "%a = Op() {1, b=2}", "%a = Op() {**b}", "%a = Op() {b=1)+(c}", "outputs %a", "outputs a:0"],
)
def test_a_line_of_which_a_part_would_be_lost_is_refused(line: str) -> None:
    with refused(TextError, "line 3: "):
        parse_graph(f"graph f\n%fine = Op()\n{line}\nend")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 0: expected 'graph NAME', not ''"),
        ("%a = Op()\nend", "line 1: expected 'graph NAME', not '%a = Op()'"),
        ("graph f\n%a = Op()", "line 2: graph 'f' has no line 'end'"),
        ("graph f\nend\n%a = Op()", "line 3: expected nothing after the end of the graph, not '%a = Op()'"),
        ("graph f\nfunction g", "line 2: function 'g' has no graph"),
        ("graph f\nfunction g\n%a = Op()\nend", "line 3: expected 'graph NAME', not '%a = Op()'"),
        ("graph f\nfunction g\ngraph g\n%a = Op() ?\nend\nend", "line 4: unexpected text after the node: ' ?'"),
    ],
)
def test_a_text_that_is_not_a_graph_is_refused(text: str, said: str) -> None:
    with refused(TextError, said):
        parse_graph(text)


@pytest.mark.parametrize(
    "port", ["takes arg float32[x] 'x'", "takes arg", "gives loss float32[] loss", "takes argument float32[] 'x'"]
)
def test_the_error_of_a_bad_port_has_the_number_of_its_line(port: str) -> None:
    with refused(TextError, "line 4: "):
        parse_graph(f"graph f\nfunction g\ntakes arg float32[] 'fine'\n{port}\ngraph g\nend\nend")
