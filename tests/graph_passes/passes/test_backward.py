"""Forward and backward functions of each stage, cut from the differentiated graph."""

from __future__ import annotations

from dapple_tf.errors import PartitionError
from dapple_tf.graph_passes.analysis.layers import find_layers
from dapple_tf.graph_passes.ir.graph import Function
from dapple_tf.graph_passes.ir.text import parse_type, print_graph
from dapple_tf.graph_passes.passes.backward import (
    SparseUse,
    StageGradients,
    prune_gradients,
    send_captured,
    sparse_parts,
    split_backward,
)
from dapple_tf.graph_passes.passes.partition import StageGraph, partition
from tests.graph_passes.builders import functions_of, graph, refused, value


def split(forward: str, backward: str, starts: list[int], *gradients: StageGradients) -> list[Function]:
    """Forward and backward functions of all stages, in order."""
    captured = graph(forward)
    stages = partition(find_layers(captured), starts)
    pairs = split_backward(stages, graph(forward + backward), gradients)
    return [function for pair in pairs for function in pair]


def found(seeds: str = "", boundary: str = "", variables: str = "") -> StageGradients:
    """``h=dh, ...``: the placeholder (of seeds) or the gradient (of others) of each value."""

    def pairs(text: str) -> list[list[str]]:
        return [pair.split("=") for pair in text.split(", ") if pair]

    return StageGradients(
        tuple((value(a), b) for a, b in pairs(seeds)),
        tuple((value(a), value(b)) for a, b in pairs(boundary)),
        tuple((a, value(b)) for a, b in pairs(variables)),
    )


def assert_functions(result: list[Function], text: str) -> None:
    """``result`` are the functions of ``text``."""
    expected = graph(text)
    assert print_graph(expected.replace(functions=tuple(result))) == print_graph(expected)
    assert tuple(result) == functions_of(text)


TWO_DENSE = """
    inputs %x
    %x = arg() -> (float32[?,4])
    %w = variable() -> (resource[])
    %v = variable() -> (resource[])
    %r = ReadVariableOp(%w:0) -> (float32[4,4]) !read
    %h = MatMul(%x:0, %r:0) -> (float32[?,4])
    %a = Tanh(%h:0) -> (float32[?,4])
    %s = ReadVariableOp(%v:0) -> (float32[4,1]) !read
    %y = MatMul(%a:0, %s:0) -> (float32[?,1])
    %loss = Mean(%y:0) -> (float32[])
    outputs %loss:0
"""

TWO_DENSE_GRADIENTS = """
    %seed = Placeholder() -> (float32[])
    %dy = MeanGrad(%seed:0, %y:0) -> (float32[?,1])
    %da = MatMul(%dy:0, %s:0) {transpose_b=True} -> (float32[?,4])
    %ds = MatMul(%a:0, %dy:0) {transpose_a=True} -> (float32[4,1])
    %seed_a = Placeholder() -> (float32[?,4])
    %dh = TanhGrad(%a:0, %seed_a:0) -> (float32[?,4])
    %dr = MatMul(%x:0, %dh:0) {transpose_a=True} -> (float32[4,4])
"""


def test_two_stages() -> None:
    result = split(
        TWO_DENSE,
        TWO_DENSE_GRADIENTS,
        [2],
        found(seeds="a=seed_a", variables="w=dr"),
        found(seeds="loss=seed", boundary="a=da", variables="v=ds"),
    )
    assert_functions(
        result,
        """
        function stage0/forward
        takes arg float32[?,4] 'x' as %arg/1
        takes variable resource[] 'w' as %variable/0
        gives boundary float32[?,4] '%a:0' from %a:0
        gives stash float32[?,4] '%a:0' from %a:0
          %r = ReadVariableOp(%variable/0:0) -> (float32[4,4]) !read
          %h = MatMul(%arg/1:0, %r:0) -> (float32[?,4])
          %a = Tanh(%h:0) -> (float32[?,4])
          end
        function stage0/backward
        takes arg float32[?,4] 'x' as %arg/2
        takes gradient float32[?,4] '%a:0' as %gradient/1
        takes stash float32[?,4] '%a:0' as %stash/0
        gives variable float32[4,4] 'w' from %dr:0
          %dh = TanhGrad(%stash/0:0, %gradient/1:0) -> (float32[?,4])
          %dr = MatMul(%arg/2:0, %dh:0) {transpose_a=True} -> (float32[4,4])
          end
        function stage1/forward
        takes boundary float32[?,4] '%a:0' as %boundary/1
        takes variable resource[] 'v' as %variable/0
        gives loss float32[] 'loss' from %loss:0
        gives stash float32[?,1] '%y:0' from %y:0
          %s = ReadVariableOp(%variable/0:0) -> (float32[4,1]) !read
          %y = MatMul(%boundary/1:0, %s:0) -> (float32[?,1])
          %loss = Mean(%y:0) -> (float32[])
          end
        function stage1/backward
        takes boundary float32[?,4] '%a:0' as %boundary/3
        takes seed float32[] 'loss' as %seed/1
        takes stash float32[?,1] '%y:0' as %stash/2
        takes variable resource[] 'v' as %variable/0
        gives gradient float32[?,4] '%a:0' from %da:0
        gives variable float32[4,1] 'v' from %ds:0
          %s = ReadVariableOp(%variable/0:0) -> (float32[4,1]) !read
          %dy = MeanGrad(%seed/1:0, %stash/2:0) -> (float32[?,1])
          %da = MatMul(%dy:0, %s:0) {transpose_b=True} -> (float32[?,4])
          %ds = MatMul(%boundary/3:0, %dy:0) {transpose_a=True} -> (float32[4,1])
          end
        """,
    )


SKIPPING = """
    inputs %x
    %x = arg() -> (float32[?,4])
    %a = Neg(%x:0) -> (float32[?,4])
    %b = Exp(%a:0) -> (float32[?,4])
    %c = Add(%b:0, %a:0) -> (float32[?,4])
    outputs %c:0
"""


def test_a_tensor_for_a_later_stage_enters_and_leaves_the_stages_between() -> None:
    middle = split(SKIPPING, "", [1, 2], found(), found(), found())[2]
    assert_functions(
        [middle],
        """
        function stage1/forward
        takes boundary float32[?,4] '%a:0' as %boundary/0
        gives boundary float32[?,4] '%a:0' from %boundary/0:0
        gives boundary float32[?,4] '%b:0' from %b:0
          %b = Exp(%boundary/0:0) -> (float32[?,4])
          end
        """,
    )


def test_the_gradient_of_such_a_tensor_enters_and_leaves_them_too() -> None:
    backward = """
        %seed_a = Placeholder() -> (float32[?,4])
        %seed_b = Placeholder() -> (float32[?,4])
        %db = Mul(%seed_b:0, %b:0) -> (float32[?,4])
        %da = AddN(%seed_a:0, %db:0) -> (float32[?,4])
    """
    middle = split(SKIPPING, backward, [1, 2], found(), found(seeds="a=seed_a, b=seed_b", boundary="a=da"), found())[3]
    assert_functions(
        [middle],
        """
        function stage1/backward
        takes gradient float32[?,4] '%b:0' as %gradient/0
        takes gradient float32[?,4] '%a:0' as %gradient/2
        takes stash float32[?,4] '%b:0' as %stash/1
        gives gradient float32[?,4] '%a:0' from %da:0
          %db = Mul(%gradient/0:0, %stash/1:0) -> (float32[?,4])
          %da = AddN(%gradient/2:0, %db:0) -> (float32[?,4])
          end
        """,
    )


def test_shapes_that_gradients_need_are_computed_in_forward_so_no_activation_is_stashed() -> None:
    forward = """
        inputs %x
        %x = arg() -> (float32[?,4])
        %h = Exp(%x:0) -> (float32[?,4])
        %y = Sum(%h:0) -> (float32[])
        outputs %y:0
    """
    backward = """
        %seed = Placeholder() -> (float32[])
        %hshape = Shape(%h:0) -> (int32[2])
        %dh = Fill(%hshape:0, %seed:0) -> (float32[?,4])
    """
    first, second = split(forward, backward, [], found(seeds="y=seed", variables="w=dh"))
    assert_functions(
        [first, second],
        """
        function stage0/forward
        takes arg float32[?,4] 'x' as %arg/0
        gives loss float32[] 'loss' from %y:0
        gives stash int32[2] '%hshape:0' from %hshape:0
          %h = Exp(%arg/0:0) -> (float32[?,4])
          %y = Sum(%h:0) -> (float32[])
          %hshape = Shape(%h:0) -> (int32[2])
          end
        function stage0/backward
        takes seed float32[] 'loss' as %seed/1
        takes stash int32[2] '%hshape:0' as %stash/0
        gives variable float32[?,4] 'w' from %dh:0
          %dh = Fill(%stash/0:0, %seed/1:0) -> (float32[?,4])
          end
        """,
    )


def test_the_stage_that_computes_an_aux_output_returns_it_and_captures_are_no_ports() -> None:
    forward = """
        inputs %x
        %x = arg() -> (float32[?,4])
        %k = capture() -> (float32[])
        %a = Mul(%x:0, %k:0) -> (float32[?,4])
        %n = Sum(%a:0) -> (float32[])
        %loss = Mean(%a:0) -> (float32[])
        outputs %loss:0 %n:0
    """
    first, _, last, _ = split(forward, "", [2], found(), found())
    assert_functions(
        [first, last],
        """
        function stage0/forward
        takes arg float32[?,4] 'x' as %arg/0
        gives boundary float32[?,4] '%a:0' from %a:0
        gives aux float32[] '0' from %n:0
          %k = capture() -> (float32[])
          %a = Mul(%arg/0:0, %k:0) -> (float32[?,4])
          %n = Sum(%a:0) -> (float32[])
          end
        function stage1/forward
        takes boundary float32[?,4] '%a:0' as %boundary/0
        gives loss float32[] 'loss' from %loss:0
          %loss = Mean(%boundary/0:0) -> (float32[])
          end
        """,
    )


def test_side_effects_stay_in_order_inside_their_stage() -> None:
    forward = """
        inputs %x
        %x = arg() -> (float32[?])
        %a = Neg(%x:0) -> (float32[?])
        %p = Print(%a:0) !side
        %b = Exp(%a:0) -> (float32[?])
        %q = Print(%b:0) !side ^%p 'auto'
        outputs %b:0
    """
    (one, _), (first, _, second, _) = split(forward, "", [], found()), split(forward, "", [2], found(), found())
    assert [node.name for node in one.graph.nodes] == ["arg/0", "a", "p", "b", "q"]
    assert [c.source for c in one.graph.node("q").controls] == ["p"]
    assert [node.name for node in first.graph.nodes] == ["arg/0", "a", "p"]
    assert [node.name for node in second.graph.nodes] == ["boundary/0", "b", "q"]
    assert second.graph.node("q").controls == ()


def send(forward: str, backward: str, starts: list[int], *gradients: StageGradients) -> StageGraph:
    return send_captured(partition(find_layers(graph(forward)), starts), graph(forward + backward), gradients)


# Four layers; the gradient of the last one uses the result of the first, as that of log(1 + exp(x)) uses exp(x).
CAPTURING = """
    inputs %x
    %x = arg() -> (float32[?,4])
    %w = variable() -> (resource[])
    %r = ReadVariableOp(%w:0) -> (float32[4,4]) !read
    %h = MatMul(%x:0, %r:0) -> (float32[?,4])
    %e = Exp(%h:0) -> (KIND[?,4])
    %a = AddOne(%e:0) -> (float32[?,4])
    %y = IdentityN(%a:0, %h:0) -> (float32[?,4], float32[?,4])
    %loss = Mean(%y:0) -> (float32[])
    outputs %loss:0
"""

CAPTURING_GRADIENTS = """
    %seed = Placeholder() -> (float32[])
    %dy = MeanGrad(%seed:0, %y:0) -> (float32[?,4])
    %dh = Mul(%dy:0, %e:0) -> (float32[?,4])
    %seed_h = Placeholder() -> (float32[?,4])
    %dw = MatMul(%x:0, %seed_h:0) {transpose_a=True} -> (float32[4,4])
"""


def capturing(starts: list[int], kind: str = "float32") -> StageGraph:
    between = [found(seeds="h=seed_h", boundary="h=seed_h")] * (len(starts) - 1)
    last = found(seeds="loss=seed", boundary="h=dh")
    first = found(seeds="h=seed_h", variables="w=dw")
    return send(CAPTURING.replace("KIND", kind), CAPTURING_GRADIENTS, starts, first, *between, last)


def test_a_tensor_that_a_gradient_captures_crosses_from_its_stage_to_that_of_the_gradient() -> None:
    stages = capturing([2, 3]).stages
    assert [set(map(str, stage.outputs)) for stage in stages] == [{"%e:0", "%h:0"}, {"%a:0", "%e:0", "%h:0"}, set()]
    assert [stage.inputs for stage in stages[1:]] == [stage.outputs for stage in stages[:-1]]


def test_a_tensor_that_crosses_or_is_of_the_stage_of_the_gradient_is_not_sent_again() -> None:
    for starts in ([1], [2]):
        captured = graph(CAPTURING.replace("KIND", "float32"))
        assert capturing(starts).stages == partition(find_layers(captured), starts).stages


def test_a_tensor_that_a_gradient_captures_and_that_cannot_leave_its_device_is_refused() -> None:
    with refused(
        PartitionError,
        "stage 1 has a custom gradient that uses %e:0 of another stage, and a variant tensor cannot leave its device",
        "start the stage before 'e'",
    ):
        capturing([3], "variant")


def test_boundary_gradients_that_no_earlier_stage_needs_are_dropped() -> None:
    joint = graph(
        """
        %seed_a = Placeholder() -> (float32[])
        %seed_b = Placeholder() -> (float32[])
        %seed = Placeholder() -> (float32[])
        %dw = Neg(%seed_a:0) -> (float32[])
        %da = Exp(%seed:0) -> (float32[])
        %db = Log(%seed:0) -> (float32[])
        %dv = Tan(%seed:0) -> (float32[])
        """
    )
    before = (
        found(seeds="a=seed_a, b=seed_b", variables="w=dw"),
        found(seeds="loss=seed", boundary="a=da, b=db", variables="v=dv"),
    )
    assert prune_gradients(joint, before) == (
        found(seeds="a=seed_a", variables="w=dw"),
        found(seeds="loss=seed", boundary="a=da", variables="v=dv"),
    )


def test_a_first_stage_without_variables_needs_no_gradients() -> None:
    joint = graph("%seed_a = Placeholder() -> (float32[])\n%seed = Placeholder() -> (float32[])\n"
                  "%da = Exp(%seed:0) -> (float32[])\n%dv = Tan(%seed:0) -> (float32[])")  # fmt: skip
    before = found(seeds="a=seed_a"), found(seeds="loss=seed", boundary="a=da", variables="v=dv")
    assert prune_gradients(joint, before) == (found(), found(seeds="loss=seed", variables="v=dv"))


EMBEDDING = """
    inputs %x
    %x = arg() -> (int64[?])
    %w = variable() -> (resource[])
    %h = ResourceGather(%w:0, %x:0) -> (float32[?,4]) !read
    %a = Tanh(%h:0) -> (float32[?,4])
    %loss = Mean(%a:0) -> (float32[])
    outputs %loss:0
"""
EMBEDDING_GRADIENTS = """
    %seed = Placeholder() -> (float32[])
    %da = MeanGrad(%seed:0, %a:0) -> (float32[?,4])
    %dh = TanhGrad(%a:0, %da:0) -> (float32[?,4])
    %ids = Identity(%x:0) -> (int64[?])
"""
KINDS = parse_type("float32[_,4]"), parse_type("int64[_]")


def sparse_use(position: int = 0, variable: str = "w") -> SparseUse:
    return SparseUse(variable, 9, value("dh"), value("ids"), KINDS, "concat", position)


def test_a_sparse_gradient_leaves_backward_as_slices_and_indices() -> None:
    gradients = StageGradients(((value("loss"), "seed"),), (), (), (sparse_use(),))
    backward = split(EMBEDDING, EMBEDDING_GRADIENTS, [], gradients)[1]
    assert [(port.role, port.name, port.type) for port in backward.outputs] == [
        ("slices", "w", KINDS[0]),
        ("indices", "w", KINDS[1]),
    ]
    assert backward.graph.outputs == (value("dh"), value("ids"))
    assert gradients.trained == ("w",)


def test_sparse_gradients_need_the_seed_and_are_kept_where_boundary_gradients_are_left_out() -> None:
    gradients = StageGradients(((value("loss"), "seed"),), (), (), (sparse_use(),))
    assert prune_gradients(graph(EMBEDDING + EMBEDDING_GRADIENTS), [gradients]) == (gradients,)


def test_the_uses_of_all_stages_come_in_the_order_of_one_device() -> None:
    stages = StageGradients(slices=(sparse_use(0), sparse_use(2))), StageGradients(slices=(sparse_use(1),))
    assert [(part.stage, part.pair, part.position) for part in sparse_parts(stages)] == [
        (0, 0, 0),
        (1, 0, 1),
        (0, 1, 2),
    ]
