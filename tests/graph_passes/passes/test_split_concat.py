"""Replicas, and split and concat between stages of different replica counts: each row arrives once."""

from __future__ import annotations

import functools
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.errors import PartitionError
from dapple_tf.graph_passes.analysis.row_bounds import whole_shares
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value
from dapple_tf.graph_passes.ir.verify import verify
from dapple_tf.graph_passes.passes.microbatch import Microbatch
from dapple_tf.graph_passes.passes.split_concat import SplitConcat, overlaps
from tests.graph_passes.builders import assert_graph, call_graph, function, refused, two_stages

X = "inputs %x\n%x = input() -> (float32[?,4])\n"

BEFORE = """
    inputs %x
    %x = input() -> (float32[?,4])
    %batch/size = batch_size(%x:0) -> (int64[])
    %stage0/replica0/mb0/slice = slice(%batch/size:0, %x:0) {place, micro_batches=1, replicas=1}
    | -> (float64[], float32[?,4])
    %stage0/replica0/mb0/forward = forward(%stage0/replica0/mb0/slice:1) {place} -> (float32[?,4], int32[2,?])
    %stage1/replica0/mb0/forward = forward(%stage0/replica0/mb0/forward:0, %stage0/replica0/mb0/forward:1) {place}
    | -> (float32[])
"""

FIRST_TWICE = """
    %stage0/replica0/mb0/slice = slice(%batch/size:0, %x:0) {place, micro_batches=1, replicas=2}
    | -> (float64[], float32[?,4])
    %stage0/replica1/mb0/slice = slice(%batch/size:0, %x:0) {place, micro_batches=1, replicas=2}
    | -> (float64[], float32[?,4])
    %stage0/replica0/mb0/forward = forward(%stage0/replica0/mb0/slice:1) {place} -> (float32[?,4], int32[2,?])
    %stage0/replica1/mb0/forward = forward(%stage0/replica1/mb0/slice:1) {place} -> (float32[?,4], int32[2,?])
"""


HEAD = """
    inputs %x
    %x = input() -> (float32[?,4])
    %batch/size = batch_size(%x:0) -> (int64[])
"""


def test_many_to_one_concatenates_each_tensor_on_its_batch_axis() -> None:
    assert_graph(
        SplitConcat((2, 1))(call_graph(BEFORE)),
        f"""
        {HEAD}
        {FIRST_TWICE}
        %stage1/replica0/mb0/concat_forward = concat(%stage0/replica0/mb0/forward:0, %stage0/replica1/mb0/forward:0,
        | %stage0/replica0/mb0/forward:1, %stage0/replica1/mb0/forward:1) {{place, axes=[0, 1], pieces=2}}
        | -> (float32[?,4], int32[2,?])
        %stage1/replica0/mb0/forward = forward(%stage1/replica0/mb0/concat_forward:0,
        | %stage1/replica0/mb0/concat_forward:1) {{place}} -> (float32[])
        """,
    )


def test_one_to_many_splits_each_tensor_on_its_batch_axis() -> None:
    assert_graph(
        SplitConcat((1, 2))(call_graph(BEFORE)),
        f"""
        {BEFORE[: BEFORE.index("%stage1")]}
        %stage0/replica0/mb0/split_forward = split(%batch/size:0, %stage0/replica0/mb0/forward:0,
        | %stage0/replica0/mb0/forward:1) {{place, axes=[0, 1], micro_batches=1, of=2, receivers=[0, 1], replicas=1}}
        | -> (float32[?,4], float32[?,4], int32[2,?], int32[2,?])
        %stage1/replica0/mb0/forward = forward(%stage0/replica0/mb0/split_forward:0,
        | %stage0/replica0/mb0/split_forward:2) {{place}} -> (float32[])
        %stage1/replica1/mb0/forward = forward(%stage0/replica0/mb0/split_forward:1,
        | %stage0/replica0/mb0/split_forward:3) {{place}} -> (float32[])
        """,
    )


def test_splits_have_the_given_sizes_of_micro_batches() -> None:
    before = Microbatch(2, 2, sizes=(1, 3))(call_graph(X, *two_stages()))
    result = SplitConcat((2, 3))(before)
    verify(result)
    splits = [node for node in result.nodes if node.op == "split"]
    assert len(splits) == 6  # of both replicas forward, of the middle one of three backward, in two micro-batches
    assert {(node.integer("micro_batches"), node.integers("sizes")) for node in splits} == {(2, (1, 3))}
    plain = SplitConcat((2, 3))(Microbatch(2, 2)(call_graph(X, *two_stages())))
    assert not any(node.has("sizes") for node in plain.nodes)


def test_each_replica_waits_for_what_it_runs_once_itself() -> None:
    text = """
        inputs %x
        %x = input() -> (float32[?,4])
        %stage0/replica0/run_once = run_once(%x:0) {place}
        %stage0/replica0/mb0/forward = forward(%x:0) {place} -> (float32[]) ^%stage0/replica0/run_once "once"
    """
    result = SplitConcat((3,))(call_graph(text))
    for replica in range(3):
        (control,) = result.node(f"stage0/replica{replica}/mb0/forward").controls
        assert control.source == f"stage0/replica{replica}/run_once"


def test_equal_counts_are_connected_one_to_one_without_extra_nodes() -> None:
    assert_graph(
        SplitConcat((2, 2))(call_graph(BEFORE)),
        f"""
        {HEAD}
        {FIRST_TWICE}
        %stage1/replica0/mb0/forward = forward(%stage0/replica0/mb0/forward:0, %stage0/replica0/mb0/forward:1)
        | {{place}} -> (float32[])
        %stage1/replica1/mb0/forward = forward(%stage0/replica1/mb0/forward:0, %stage0/replica1/mb0/forward:1)
        | {{place}} -> (float32[])
        """,
    )


def test_loss_gathers_each_replica_with_its_weight_in_sample_order() -> None:
    result = SplitConcat((1, 2))(Microbatch(2, 2)(call_graph(X, *two_stages())))
    assert list(map(str, result.node("loss").inputs)) == [
        f"%stage1/replica{replica}/mb{m}/{what}:0"
        for m in (0, 1)
        for replica in (0, 1)
        for what in ("forward", "slice")
    ]


def test_a_tensor_without_a_batch_axis_cannot_be_split() -> None:
    functions = (
        function("stage0/forward", "arg x", "boundary %table:0 float32[9,4]"),
        function("stage0/backward"),
        function("stage1/forward", "boundary %table:0 float32[9,4]", "loss loss"),
        function("stage1/backward", "seed loss"),
    )
    before = Microbatch(2, 1)(call_graph(X, *functions))
    verify(SplitConcat((2, 2))(before))
    with refused(
        PartitionError,
        "%table:0 crosses between stage 0 and its neighbour, whose replica counts differ ((1, 2))",
        "(its shape is (9, 4)): cut elsewhere, or give both stages equal replicas",
    ):
        SplitConcat((1, 2))(before)


# --- what every replica has alike

SHARING = (
    function("stage0/forward", "arg x", "boundary h, boundary t float32[], boundary n int32[]"),
    function("stage0/backward", "gradient h, gradient t float32[]", "variable w"),
    function("stage1/forward", "boundary h, boundary t float32[], boundary n int32[]", "loss loss"),
    function("stage1/backward", "seed loss", "gradient h, gradient t float32[]"),
)
SHARED = frozenset({"t", "n"})
CALLS = """
    inputs %x
    %x = input() -> (float32[?,4])
    %batch/size = batch_size(%x:0) -> (int64[])
    %stage0/replica0/mb0/forward = forward(%x:0) {call} -> (float32[?,4], float32[], int32[])
    %stage1/replica0/mb0/forward = forward(%stage0/replica0/mb0/forward:0, %stage0/replica0/mb0/forward:1,
    | %stage0/replica0/mb0/forward:2) {call} -> (float32[])
    %stage1/replica0/mb0/backward = backward(%stage1/replica0/mb0/forward:0) {call} -> (float32[?,4], float32[])
    %stage0/replica0/mb0/backward = backward(%stage1/replica0/mb0/backward:0, %stage1/replica0/mb0/backward:1) {call}
    | -> (float32[4])
"""


def test_one_to_many_sends_shared_tensors_whole_and_adds_their_gradients() -> None:
    assert_graph(
        SplitConcat((1, 2), SHARED)(call_graph(CALLS, *SHARING)),
        f"""
        {CALLS[: CALLS.index("%stage1")]}
        %stage0/replica0/mb0/split_forward = split(%batch/size:0, %stage0/replica0/mb0/forward:0)
        | {{place, axes=[0], micro_batches=1, of=2, receivers=[0, 1], replicas=1}} -> (float32[?,4], float32[?,4])
        %stage1/replica0/mb0/forward = forward(%stage0/replica0/mb0/split_forward:0, %stage0/replica0/mb0/forward:1,
        | %stage0/replica0/mb0/forward:2) {{call}} -> (float32[])
        %stage1/replica1/mb0/forward = forward(%stage0/replica0/mb0/split_forward:1, %stage0/replica0/mb0/forward:1,
        | %stage0/replica0/mb0/forward:2) {{call}} -> (float32[])
        %stage1/replica0/mb0/backward = backward(%stage1/replica0/mb0/forward:0) {{call}} -> (float32[?,4], float32[])
        %stage1/replica1/mb0/backward = backward(%stage1/replica1/mb0/forward:0) {{call}} -> (float32[?,4], float32[])
        %stage0/replica0/mb0/concat_backward = concat(%stage1/replica0/mb0/backward:0, %stage1/replica1/mb0/backward:0)
        | {{place, axes=[0], pieces=2}} -> (float32[?,4])
        %stage0/replica0/mb0/add_backward = add(%stage1/replica0/mb0/backward:1, %stage1/replica1/mb0/backward:1)
        | {{place, pieces=2}} -> (float32[])
        %stage0/replica0/mb0/backward = backward(%stage0/replica0/mb0/concat_backward:0,
        | %stage0/replica0/mb0/add_backward:0) {{call}} -> (float32[4])
        """,
    )


def test_many_to_one_takes_shared_tensors_from_the_first_replica_and_sends_their_gradients_there() -> None:
    result = SplitConcat((2, 1), SHARED)(call_graph(CALLS, *SHARING))
    texts = {node.name: " ".join(map(str, node.inputs)) for node in result.nodes}
    assert texts["stage1/replica0/mb0/forward"] == (
        "%stage1/replica0/mb0/concat_forward:0 %stage0/replica0/mb0/forward:1 %stage0/replica0/mb0/forward:2"
    )
    assert texts["stage0/replica0/mb0/backward"] == (
        "%stage1/replica0/mb0/split_backward:0 %stage1/replica0/mb0/backward:1"
    )
    assert texts["stage0/replica1/mb0/backward"] == (
        "%stage1/replica0/mb0/split_backward:1 %stage0/replica1/mb0/add_backward:0"
    )
    assert texts["stage0/replica1/mb0/add_backward"] == ""  # zeros


def test_equal_counts_are_connected_one_to_one_for_shared_tensors_too() -> None:
    plain, shared = (SplitConcat((2, 2), names)(call_graph(CALLS, *SHARING)) for names in (frozenset[str](), SHARED))
    assert plain == shared


def test_a_scalar_that_depends_on_the_batch_cannot_be_split() -> None:
    with refused(PartitionError, "t crosses between stage 0 and its neighbour", "its shape is ()"):
        SplitConcat((1, 2), frozenset({"n"}))(call_graph(CALLS, *SHARING))


ROUTED = (
    function("stage0/forward", "arg x", "boundary a, boundary t float32[]"),
    function("stage0/backward", "gradient a, gradient t float32[]", "variable u"),
    function("stage1/forward", "boundary a, boundary t float32[]", "boundary b, boundary t float32[]"),
    function("stage1/backward", "gradient b, gradient t float32[]", "gradient a, gradient t float32[]"),
    function("stage2/forward", "boundary b, boundary t float32[]", "loss loss"),
    function("stage2/backward", "seed loss", "gradient b, gradient t float32[]"),
)


@given(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)), st.integers(1, 2))
def test_each_part_of_a_shared_gradient_arrives_at_one_replica(replicas: tuple[int, int, int], m: int) -> None:
    result = SplitConcat(replicas, frozenset({"t"}))(Microbatch(3, m)(call_graph(X, *ROUTED)))
    verify(result)
    parts: dict[Value, list[str]] = {}  # of the gradient of t: the calls that it comes from
    arrived: list[str] = []
    for node in result.nodes:
        if node.op == "add":
            n = node.integer("pieces")
            for k, value in enumerate(node.values()):
                parts[value] = [name for piece in node.inputs[k * n : (k + 1) * n] for name in parts[piece]]
        elif node.op == "backward":
            came = parts[node.inputs[1]] if node.integer("stage") < 2 else []
            if node.integer("stage"):
                parts[Value(node.name, 1)] = [*came, node.name]
            else:
                arrived += came
    calls_after = [node.name for node in result.nodes if node.op == "backward" and node.integer("stage")]
    assert sorted(arrived) == sorted(calls_after)


def test_stages_that_are_replicated_already_are_refused() -> None:
    replicated = SplitConcat((1, 2))(Microbatch(2, 1)(call_graph(X, *two_stages())))
    with refused(PartitionError, "the stages have (1, 2) replicas already"):
        SplitConcat((1, 2))(replicated)


@pytest.mark.parametrize("replicas", [(1,), (1, 2, 1), (1, 0)])
def test_a_replica_count_for_each_stage_is_required(replicas: tuple[int, ...]) -> None:
    before = Microbatch(2, 1)(call_graph(X, *two_stages()))
    with refused(PartitionError, f"replicas {replicas} do not give each of 2 stages at least one device"):
        SplitConcat(replicas)(before)


# --- which rows arrive where


Shares = tuple[tuple[int, ...], ...]


def bounds(low: int, high: int, i: int, r: int, shares: tuple[int, ...] = ()) -> range:
    """Rows of part i of r of the rows from ``low`` to ``high``; of unequal parts those of ``shares``."""
    parts = shares or (1,) * r
    before, own, whole = sum(parts[:i]), parts[i], sum(parts)
    return range(low + (high - low) * before // whole, low + (high - low) * (before + own) // whole)


def rows_of(node: Node, size: int, micro_batches: int, replicas: tuple[int, ...], shares: Shares = ()) -> range:
    """The rows of a batch of ``size`` that a call must take: those of its replica of its micro-batch."""
    whole, stage = bounds(0, size, node.integer("micro_batch"), micro_batches), node.integer("stage")
    own = shares[stage] if shares else ()
    return bounds(whole.start, whole.stop, node.integer("replica"), replicas[stage], own)


def run_rows(
    graph: Graph, size: int, micro_batches: int, replicas: tuple[int, ...], shares: Shares = ()
) -> dict[str, list[range | list[int]]]:
    """Run the graph on row numbers instead of tensors, and return what each call took."""
    values: dict[Value, list[int]] = {}
    taken: dict[str, list[range | list[int]]] = {}
    for node in graph.nodes:
        inputs = [values.get(value, []) for value in node.inputs]
        outputs: list[list[int]] = [[] for _ in node.outputs]
        if node.op == "input":
            outputs = [list(range(size))]
        elif node.op == "slice":
            assert (node.integer("micro_batches"), node.integer("replicas")) == (
                micro_batches,
                replicas[node.integer("stage")],
            )
            mine = rows_of(node, size, micro_batches, replicas, shares)
            outputs = [[], *([row for row in rows if row in mine] for rows in inputs[1:])]
        elif node.op in ("forward", "backward"):
            ports = [p for p in graph.function(node.string("function")).inputs if p.role != "variable"]
            taken[node.name] = [rows for rows, port in zip(inputs, ports, strict=True) if port.role != "seed"]
            outputs = [list(rows_of(node, size, micro_batches, replicas, shares)) for _ in node.outputs]
        elif node.op == "split":
            mine = bounds(0, size, node.integer("micro_batch"), node.integer("micro_batches"))
            of = node.integer("of"), node.integers("of_shares") if node.has("of_shares") else ()
            parts = [bounds(mine.start, mine.stop, j, *of) for j in node.integers("receivers")]
            outputs = [[row for row in rows if row in part] for rows in inputs[1:] for part in parts]
        elif node.op == "concat":
            n = node.integer("pieces")
            outputs = [functools.reduce(operator.iadd, inputs[k : k + n], []) for k in range(0, len(inputs), n)]
        values.update(zip(node.values(), outputs, strict=True))
    return taken


THREE_STAGES = (
    function("stage0/forward", "arg x", "boundary a, boundary b, stash s"),
    function("stage0/backward", "gradient b, gradient a, stash s", "variable u"),
    function("stage1/forward", "boundary a, boundary b", "boundary b, boundary c, stash s"),
    function("stage1/backward", "boundary b, gradient c, gradient b, stash s", "gradient a, gradient b"),
    function("stage2/forward", "boundary b, boundary c, arg x", "loss loss, stash s"),
    function("stage2/backward", "arg x, boundary c, seed loss, stash s", "gradient b, gradient c"),
)


@given(
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    st.integers(1, 3),
    st.integers(1, 30),
)
def test_every_call_takes_exactly_its_own_rows_in_order(replicas: tuple[int, ...], m: int, size: int) -> None:
    result = SplitConcat(replicas)(Microbatch(3, m)(call_graph(X, *THREE_STAGES)))
    verify(result)
    taken = run_rows(result, size, m, replicas)
    assert len(taken) == 2 * m * sum(replicas)
    for name, rows in taken.items():
        wanted = list(rows_of(result.node(name), size, m, replicas))
        assert rows == [wanted] * len(rows), name


PARTS = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(st.tuples(PARTS, PARTS, PARTS), st.integers(1, 3), st.integers(1, 30))
def test_every_call_takes_exactly_its_own_rows_of_unequal_shares(parts: Shares, m: int, size: int) -> None:
    replicas = tuple(map(len, parts))
    shares = tuple(whole_shares(own) for own in parts)
    result = SplitConcat(replicas, shares=shares)(Microbatch(3, m)(call_graph(X, *THREE_STAGES)))
    verify(result)
    for name, rows in run_rows(result, size, m, replicas, parts).items():
        wanted = list(rows_of(result.node(name), size, m, replicas, parts))
        assert rows == [wanted] * len(rows), name


def test_shares_are_attributes_of_slices_splits_and_forwards() -> None:
    assert_graph(
        SplitConcat((2, 2), shares=((3, 1), ()))(call_graph(BEFORE)),
        f"""
        {HEAD}
        %stage0/replica0/mb0/slice = slice(%batch/size:0, %x:0) {{place, micro_batches=1, replicas=2, shares=[3, 1]}}
        | -> (float64[], float32[?,4])
        %stage0/replica1/mb0/slice = slice(%batch/size:0, %x:0) {{place, micro_batches=1, replicas=2, shares=[3, 1]}}
        | -> (float64[], float32[?,4])
        %stage0/replica0/mb0/forward = forward(%stage0/replica0/mb0/slice:1) {{place, shares=[3, 1]}}
        | -> (float32[?,4], int32[2,?])
        %stage0/replica1/mb0/forward = forward(%stage0/replica1/mb0/slice:1) {{place, shares=[3, 1]}}
        | -> (float32[?,4], int32[2,?])
        %stage0/replica0/mb0/split_forward = split(%batch/size:0, %stage0/replica0/mb0/forward:0,
        | %stage0/replica0/mb0/forward:1)
        | {{place, axes=[0, 1], micro_batches=1, of=2, receivers=[0, 1], replicas=2, shares=[3, 1]}}
        | -> (float32[?,4], float32[?,4], int32[2,?], int32[2,?])
        %stage1/replica0/mb0/forward = forward(%stage0/replica0/mb0/split_forward:0,
        | %stage0/replica0/mb0/split_forward:2) {{place}} -> (float32[])
        %stage1/replica1/mb0/concat_forward = concat(%stage0/replica0/mb0/split_forward:1,
        | %stage0/replica1/mb0/forward:0, %stage0/replica0/mb0/split_forward:3, %stage0/replica1/mb0/forward:1)
        | {{place, axes=[0, 1], pieces=2}} -> (float32[?,4], int32[2,?])
        %stage1/replica1/mb0/forward = forward(%stage1/replica1/mb0/concat_forward:0,
        | %stage1/replica1/mb0/concat_forward:1) {{place}} -> (float32[])
        """,
    )


def test_equal_counts_and_shares_are_connected_one_to_one() -> None:
    result = SplitConcat((2, 2), shares=((3, 1), (3, 1)))(call_graph(BEFORE))
    assert not any(node.op in ("split", "concat") for node in result.nodes)
    assert SplitConcat((2, 2), shares=((), ()))(call_graph(BEFORE)) == SplitConcat((2, 2))(call_graph(BEFORE))


@pytest.mark.parametrize("shares", [((1,), ()), ((1, 0), ())])
def test_wrong_shares_are_refused(shares: Shares) -> None:
    with pytest.raises(PartitionError, match=r"stage 0 has 2 replicas, and the shares .*: give one above 0 for each"):
        SplitConcat((2, 1), shares=shares)(call_graph(BEFORE))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 40))
def test_the_slices_of_a_stage_cover_the_batch_exactly_once(r: int, m: int, size: int) -> None:
    result = SplitConcat((r,))(Microbatch(1, m)(call_graph(X, *ONE_STAGE)))
    slices = [node for node in result.nodes if node.op == "slice"]
    places = [(node.integer("micro_batch"), node.integer("replica")) for node in slices]
    assert places == [(i, j) for i in range(m) for j in range(r)]
    taken = run_rows(result, size, m, (r,))
    assert functools.reduce(
        operator.iadd, (taken[f"stage0/replica{j}/mb{i}/forward"][0] for i, j in places), []
    ) == list(range(size))


ONE_STAGE = (
    function("stage0/forward", "arg x, variable w", "loss loss, stash a"),
    function("stage0/backward", "seed loss, stash a", "variable w"),
)


@pytest.mark.parametrize(
    ("i", "r", "q", "found"),
    [
        (0, 1, 3, (0, 1, 2)),
        (2, 3, 1, (0,)),
        (0, 2, 3, (0, 1)),
        (1, 2, 3, (1, 2)),
        (1, 3, 2, (0, 1)),
        (1, 2, 4, (2, 3)),
        (2, 4, 4, (2,)),
    ],
)
def test_the_replicas_that_have_samples_in_common(i: int, r: int, q: int, found: tuple[int, ...]) -> None:
    assert overlaps(i, range(r + 1), range(q + 1)) == found


def test_replicas_with_unequal_shares_have_samples_in_common() -> None:
    points, others = (0, 3, 4), (0, 1, 2)  # 3/4 and 1/4 of the rows, against halves
    assert [overlaps(i, points, others) for i in (0, 1)] == [(0, 1), (1,)]
    assert [overlaps(i, others, points) for i in (0, 1)] == [(0,), (0, 1)]


@given(st.integers(1, 6), st.integers(1, 6), st.data(), st.integers(0, 60))
def test_replicas_that_share_a_row_overlap_and_those_that_overlap_share_some_row(
    r: int, q: int, data: st.DataObject, size: int
) -> None:
    i = data.draw(st.integers(0, r - 1))

    def sharing(n: int) -> set[int]:
        return {j for j in range(q) if set(bounds(0, n, i, r)) & set(bounds(0, n, j, q))}

    found = set(overlaps(i, range(r + 1), range(q + 1)))
    assert sharing(size) <= found
    assert sharing(r * q) == found  # in a batch that both counts divide, all of them do
