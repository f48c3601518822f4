"""A rank's part of a pipelined graph: its own nodes, and one exchange for each edge to or from another rank."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value
from dapple_tf.graph_passes.ir.verify import verify
from dapple_tf.graph_passes.passes.expose_gradients import ExposeGradients, exposed_gradients
from dapple_tf.graph_passes.passes.project import Project, parse_exchange_name
from dapple_tf.graph_passes.passes.verify_ranks import verify_ranks
from tests.graph_passes.builders import assert_graph, call_graph, graph, refused, two_stages
from tests.graph_passes.whole import Kind, graph_for_ranks, kinds, ranks_of, whole_graph

# --- before and after

CHAIN = """
    inputs %x
    %x = input() -> (float32[?,4])
    %stage0/replica0/mb0/forward = forward(%x:0) {call} -> (float32[?,4], float32[?,4])
    %stage1/replica0/mb0/forward = forward(%stage0/replica0/mb0/forward:0) {call} -> (float32[], float32[?,4])
    | ^%stage0/replica0/mb0/forward 'dropped: it lives elsewhere' ^%x 'kept: it is here too'
    %loss = merge(%stage1/replica0/mb0/forward:0) -> (float32[])
    outputs %loss:0
"""


def test_an_edge_between_stages_becomes_an_exchange_on_both_ranks() -> None:
    before = call_graph(CHAIN, *two_stages())
    first, second = (Project(((0,), (1,)), rank)(before) for rank in (0, 1))
    assert_graph(
        first,
        """
        inputs %x
        %x = input() -> (float32[?,4])
        %stage0/replica0/mb0/forward = forward(%x:0) {call} -> (float32[?,4], float32[?,4])
        %exchange/stage0_to_stage1/mb0/forward = exchange(%stage0/replica0/mb0/forward:0)
        | {dtypes=['float32'], header=False, micro_batch=0, ranks=[0, 1], source=[], to=[1]} -> (int64[])
        %exchange/outputs = exchange()
        | {dtypes=['float32'], header=False, ranks=[0, 1], source=[1], to=[]} -> (float32[], int64[])
        %loss = merge(%exchange/outputs:0) -> (float32[])
        %tokens = collect_tokens(%exchange/stage0_to_stage1/mb0/forward:0, %exchange/outputs:1) -> (int64[])
        outputs %loss:0 %tokens:0
        """,
    )
    assert_graph(
        second,
        """
        inputs %x
        %exchange/stage0_to_stage1/mb0/forward = exchange()
        | {dtypes=['float32'], header=False, micro_batch=0, ranks=[0, 1], source=[0], to=[]} -> (float32[?,4], int64[])
        %x = input() -> (float32[?,4])
        %stage1/replica0/mb0/forward = forward(%exchange/stage0_to_stage1/mb0/forward:0) {call}
        | -> (float32[], float32[?,4]) ^%x 'kept: it is here too'
        %exchange/outputs = exchange(%stage1/replica0/mb0/forward:0)
        | {dtypes=['float32'], header=False, ranks=[0, 1], source=[], to=[0]} -> (int64[])
        %loss = merge(%stage1/replica0/mb0/forward:0) -> (float32[])
        %tokens = collect_tokens(%exchange/stage0_to_stage1/mb0/forward:1, %exchange/outputs:0) -> (int64[])
        outputs %loss:0 %tokens:0
        """,
    )
    assert [function.name for function in first.functions] == ["stage0/forward"]
    assert [function.name for function in second.functions] == ["stage1/forward"]


LOOPED = """
    inputs %x
    %x = input() -> (float32[?,4])
    %stage0/replica0/mb0/forward = forward(%x:0) {place} -> (float32[?,4])
    %stage1/replica0/mb0/forward = forward(%stage0/replica0/mb0/forward:0) {place} -> (float32[?,4])
    %stage2/replica0/mb0/forward = forward(%stage1/replica0/mb0/forward:0) {place} -> (float32[?,4])
    | ^%stage0/replica0/mb0/forward 'order: 2F0 after 0F0'
    %stage3/replica0/mb0/forward = forward(%stage2/replica0/mb0/forward:0) {place} -> (float32[])
    | ^%stage1/replica0/mb0/forward 'order: 3F0 after 1F0'
    %stage3/replica0/mb0/backward = backward(%stage3/replica0/mb0/forward:0) {place}
"""
THERE = "exchange/stage0_to_stage1/mb0/forward"
BACK = "exchange/stage1_to_stage2/mb0/forward"
AGAIN = "exchange/stage2_to_stage3/mb0/forward"


def test_ranks_of_several_stages_exchange_what_crosses_each_boundary_and_keep_the_order_of_calls() -> None:
    """Two workers, looped: three boundaries between the same ranks, two of them in the same direction."""
    ends = "{dtypes=['float32'], header=False, micro_batch=0, ranks=[0, 1], source=[%s], to=[%s]}"
    assert_graph(
        Project(((0,), (1,), (0,), (1,)), 0)(graph(LOOPED)),
        f"""
        inputs %x
        %x = input() -> (float32[?,4])
        %stage0/replica0/mb0/forward = forward(%x:0) {{place}} -> (float32[?,4])
        %{THERE} = exchange(%stage0/replica0/mb0/forward:0) {ends % ("", 1)} -> (int64[])
        %{BACK} = exchange() {ends % (1, "")} -> (float32[?,4], int64[])
        %stage2/replica0/mb0/forward = forward(%{BACK}:0) {{place}} -> (float32[?,4])
        | ^%stage0/replica0/mb0/forward 'order: 2F0 after 0F0'
        %{AGAIN} = exchange(%stage2/replica0/mb0/forward:0) {ends % ("", 1)} -> (int64[])
        %tokens = collect_tokens(%{THERE}:0, %{BACK}:1, %{AGAIN}:0) -> (int64[])
        outputs %tokens:0
        """,
    )
    assert_graph(
        Project(((0,), (1,), (0,), (1,)), 1)(graph(LOOPED)),
        f"""
        inputs %x
        %{THERE} = exchange() {ends % (0, "")} -> (float32[?,4], int64[])
        %stage1/replica0/mb0/forward = forward(%{THERE}:0) {{place}} -> (float32[?,4])
        %{BACK} = exchange(%stage1/replica0/mb0/forward:0) {ends % ("", 0)} -> (int64[])
        %{AGAIN} = exchange() {ends % (0, "")} -> (float32[?,4], int64[])
        %x = input() -> (float32[?,4])
        %stage3/replica0/mb0/forward = forward(%{AGAIN}:0) {{place}} -> (float32[])
        | ^%stage1/replica0/mb0/forward 'order: 3F0 after 1F0'
        %stage3/replica0/mb0/backward = backward(%stage3/replica0/mb0/forward:0) {{place}}
        %tokens = collect_tokens(%{THERE}:1, %{BACK}:0, %{AGAIN}:1) -> (int64[])
        outputs %tokens:0
        """,
    )


def test_nothing_is_sent_between_two_stages_of_one_rank() -> None:
    """V-shaped: the second rank runs stages 1 and 2, and sends only what stage 3 takes."""
    part = Project(((0,), (1,), (1,), (0,)), 1)(graph(LOOPED))
    assert [node.name for node in part.nodes if node.op == "exchange"] == [THERE, AGAIN]
    assert part.node("stage2/replica0/mb0/forward").inputs == (Value("stage1/replica0/mb0/forward"),)


REPLICAS = """
    inputs %x
    %x = input() -> (float32[?,4])
    %stage0/replica0/mb0/forward = forward(%x:0) {place} -> (float32[4])
    %stage0/replica1/mb0/forward = forward(%x:0) {place} -> (float32[4])
    %stage0/allreduce = allreduce(%stage0/replica0/mb0/forward:0, %stage0/replica1/mb0/forward:0)
    | {place, replicas=2, variables=['w']} -> (float32[4])
    %stage0/reduced_gradients = reduced_gradients(%stage0/allreduce:0) {place, variables=['w']} -> (float32[4])
    %barrier = barrier() ^%stage0/reduced_gradients 'barrier: all gradients are there'
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_each_replica_has_its_own_sums_and_updates(rank: int) -> None:
    assert_graph(
        Project(((0, 1),), rank)(graph(REPLICAS)),
        f"""
        inputs %x
        %x = input() -> (float32[?,4])
        %stage0/replica{rank}/mb0/forward = forward(%x:0) {{micro_batch=0, replica={rank}, stage=0}} -> (float32[4])
        %stage0/allreduce = allreduce(%stage0/replica{rank}/mb0/forward:0)
        | {{place, ranks=[0, 1], replicas=2, variables=['w']}} -> (float32[4], int64[])
        %stage0/reduced_gradients = reduced_gradients(%stage0/allreduce:0) {{place, variables=['w']}} -> (float32[4])
        %barrier = barrier() {{ranks=[0, 1]}} -> (int64[]) ^%stage0/reduced_gradients 'barrier: all gradients are there'
        %tokens = collect_tokens(%stage0/allreduce:1, %barrier:0) -> (int64[])
        outputs %tokens:0
        """,
    )


def test_a_sum_that_a_rank_does_not_need_keeps_its_token() -> None:
    """Stage 1 has only the tied weight, whose gradient its first replica alone sends to the owner."""
    text = """
        %stage0/replica0/mb0/forward = forward() {replica=0, stage=0} -> (float32[4])
        %stage1/replica0/mb0/forward = forward() {replica=0, stage=1} -> (float32[4])
        %stage1/replica1/mb0/forward = forward() {replica=1, stage=1} -> (float32[4])
        %stage1/allreduce = allreduce(%stage1/replica0/mb0/forward:0, %stage1/replica1/mb0/forward:0)
        | {place, replicas=2, variables=['t']} -> (float32[4])
        %stage0/tied_sum_0 = tied_sum(%stage0/replica0/mb0/forward:0, %stage1/allreduce:0) {place, variable='t'}
        | -> (float32[4])
    """
    assert_graph(
        Project(((0,), (1, 2)), 2)(graph(text)),
        """
        %stage1/replica1/mb0/forward = forward() {replica=1, stage=1} -> (float32[4])
        %stage1/allreduce = allreduce(%stage1/replica1/mb0/forward:0)
        | {place, ranks=[1, 2], replicas=2, variables=['t']} -> (float32[4], int64[])
        %tokens = collect_tokens(%stage1/allreduce:1) -> (int64[])
        outputs %tokens:0
        """,
    )


def test_the_name_of_an_exchange_has_its_stages_and_micro_batch() -> None:
    names = {name for graph in ranks_of(Kind((2, 1), 2, tied=True)) for name in graph.by_name if "exchange" in name}
    pairs = {(source, target, m, m) for source, target in ((0, 1), (1, 0)) for m in (0, 1)}
    assert {parse_exchange_name(name) for name in names} == {*pairs, None}
    assert parse_exchange_name("exchange/stage10_to_stage9/mb11/backward") == (10, 9, 11, 11)
    assert parse_exchange_name("exchange/stage10_to_stage9/mb11-13/backward") == (10, 9, 11, 13)


def test_the_exchanges_of_a_schedule_with_results_that_travel_together() -> None:
    """Stage 0 is on ranks 0 and 1; each message has the tensors of both replicas and of both micro-batches."""
    graphs = ranks_of(Kind((2, 1), 3, "0F0+ 0F1 0F2 0B0 0B1 0B2; 1F0 1F1 1F2 1B0 1B1+ 1B2"))
    for part in graphs:
        verify(part)
        assert {name for name in part.by_name if "_to_stage" in name} == {
            "exchange/stage0_to_stage1/mb0-1/forward",
            "exchange/stage0_to_stage1/mb2/forward",
            "exchange/stage1_to_stage0/mb0/backward",
            "exchange/stage1_to_stage0/mb1-2/backward",
        }
    verify_ranks(graphs)
    received = graphs[2].node("exchange/stage0_to_stage1/mb0-1/forward")
    assert received.integers("source") == (0, 0, 1, 1)
    assert received.attr("header")  # of two tensors with unknown rows
    assert not graphs[2].node("exchange/stage0_to_stage1/mb2/forward").attr("header")


def test_one_exchange_carries_what_travels_together() -> None:
    """The rank of stage 1 has no ``together`` node: its forwards take the outputs of the exchange."""
    together = """
        %stage0/replica0/mb0/forward = forward() {place} -> (float32[2,4])
        %stage0/replica0/mb1/forward = forward() {place} -> (float32[3,4])
        %stage0/replica0/mb1/together_forward = together(%stage0/replica0/mb0/forward:0,
        | %stage0/replica0/mb1/forward:0) {place} -> (float32[2,4], float32[3,4])
        %stage1/replica0/mb0/forward = forward(%stage0/replica0/mb1/together_forward:0) {place} -> (float32[])
        %stage1/replica0/mb1/forward = forward(%stage0/replica0/mb1/together_forward:1) {place} -> (float32[])
    """
    name = "exchange/stage0_to_stage1/mb0-1/forward"
    ends = "{dtypes=['float32'], header=False, ranks=[0, 1], source=[%s], to=[%s]}"
    assert_graph(
        Project(((0,), (1,)), 0)(graph(together)),
        f"""
        %stage0/replica0/mb0/forward = forward() {{place}} -> (float32[2,4])
        %stage0/replica0/mb1/forward = forward() {{place}} -> (float32[3,4])
        %stage0/replica0/mb1/together_forward = together(%stage0/replica0/mb0/forward:0,
        | %stage0/replica0/mb1/forward:0) {{place}} -> (float32[2,4], float32[3,4])
        %{name} = exchange(%stage0/replica0/mb1/together_forward:0, %stage0/replica0/mb1/together_forward:1)
        | {ends % ("", "1, 1")} -> (int64[])
        %tokens = collect_tokens(%{name}:0) -> (int64[])
        outputs %tokens:0
        """,
    )
    assert_graph(
        Project(((0,), (1,)), 1)(graph(together)),
        f"""
        %{name} = exchange() {ends % ("0, 0", "")} -> (float32[2,4], float32[3,4], int64[])
        %stage1/replica0/mb0/forward = forward(%{name}:0) {{place}} -> (float32[])
        %stage1/replica0/mb1/forward = forward(%{name}:1) {{place}} -> (float32[])
        %tokens = collect_tokens(%{name}:2) -> (int64[])
        outputs %tokens:0
        """,
    )


# --- shapes that do not follow from the number of elements

CROSSING = """
    %stage0/replica0/mb0/forward = forward() {{place}} -> ({types})
    %stage1/replica0/mb0/forward = forward({values}) {{place}}
"""


def crossing(*types: str) -> Graph:
    values = ", ".join(f"%stage0/replica0/mb0/forward:{i}" for i in range(len(types)))
    return graph(CROSSING.format(types=", ".join(types), values=values))


@pytest.mark.parametrize(
    ("types", "header"),
    [
        (["float32[2,3]", "float32[7]"], False),
        (["float32[?,3]", "float32[7]"], False),
        (["float32[?,3]", "int32[?]"], False),  # each dtype travels by itself
        (["float32[?,?]"], True),
        (["float32[?,3]", "float32[?]"], True),
        (["float32[?,0]"], True),  # no number of elements tells how many rows
        (["float32[0,3]"], False),
    ],
)
def test_shapes_are_sent_where_they_do_not_follow_from_the_number_of_elements(types: list[str], header: bool) -> None:
    result = Project(((0,), (1,)), 0)(crossing(*types))
    assert result.node("exchange/stage0_to_stage1/mb0/forward").attr("header") is header


def test_a_tensor_of_unknown_rank_cannot_be_sent() -> None:
    with refused(GraphError, "a tensor with an unknown number of axes would have to be sent", "tf.ensure_shape"):
        Project(((0,), (1,)), 0)(crossing("float32[*]"))


# --- which ranks


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (((0,), (1, 2)), "the stages have (1, 1) replicas, but there are (1, 2) ranks for them"),
        (((0,),), "the stages have (1, 1) replicas, but there are (1,) ranks for them"),
        (((0,), (2,)), "the stages are on ranks [[0], [2]]: use all ranks from 0 on"),
    ],
)
def test_every_replica_needs_a_rank(ranks: tuple[tuple[int, ...], ...], said: str) -> None:
    with refused(GraphError, said):
        Project(ranks, 0)(call_graph(CHAIN, *two_stages()))


@pytest.mark.parametrize("ranks", [((0, 1), (1, 0)), ((0, 1), (1, 2))])
def test_stages_have_the_same_ranks_in_the_same_order_or_none_in_common(ranks: tuple[tuple[int, ...], ...]) -> None:
    with refused(GraphError, f"the stages are on ranks {[list(r) for r in ranks]}", "are the same, in the same order"):
        Project(ranks, 0)(whole_graph(Kind((2, 2), 1)))


def test_ranks_may_be_in_any_order() -> None:
    kind = Kind((2, 1), 2, tied=True, state=True)
    graphs = ranks_of(kind, ((2, 0), (1,)))
    verify_ranks(graphs)
    stages = [{n.integer("stage") for n in g.nodes if n.op == "forward"} for g in graphs]
    assert stages == [{0}, {1}, {0}]
    assert graphs[2].node("stage0/replica0/mb0/forward").op == "forward"


# --- random plans


def home_of(node: Node, kind: Kind) -> set[int]:
    """The ranks of a node by its name: a replica's node is on its rank, another node of a stage on all its ranks."""
    parts = node.name.split("/")
    stage = next((int(p[5:]) for p in parts[:1] if p.startswith("stage")), None)
    if stage is None:
        return set(range(kind.size))
    if parts[1].startswith("replica"):
        return {kind.ranks[stage][int(parts[1][7:])]}
    return {kind.ranks[stage][0]} if parts[1] == "read_variable" else set(kind.ranks[stage])


@given(st.one_of(kinds(), kinds(shared=True)))
def test_every_node_is_on_its_ranks_and_on_no_other(kind: Kind) -> None:
    whole, graphs = graph_for_ranks(kind), ranks_of(kind)
    for rank, part in enumerate(graphs):
        own = {node.name for node in whole.nodes if rank in home_of(node, kind)}
        made = {node.name for node in part.nodes if node.op in ("exchange", "collect_tokens")}
        assert {node.name for node in part.nodes} == own | made
        used = {node.string("function") for node in part.nodes if node.has("function")}
        assert {function.name for function in part.functions} == used


@given(st.one_of(kinds(), kinds(shared=True)))
def test_every_edge_is_local_or_carried_by_one_exchange(kind: Kind) -> None:
    whole, graphs = graph_for_ranks(kind), ranks_of(kind)
    for rank, part in enumerate(graphs):
        for node in part.nodes:
            if node.op in ("exchange", "collect_tokens"):
                continue
            wanted = list(whole.node(node.name).inputs)
            if node.op in ("allreduce", "merge_state"):  # the ranks' own parts make up the whole
                wanted = [value for value in wanted if home_of(whole.node(value.node), kind) == {rank}]
            assert [origin(graphs, rank, value) for value in node.inputs] == wanted, node.name
        for node in part.nodes:
            controls = {control.source for control in node.controls}
            if node.op not in ("exchange", "collect_tokens"):
                elsewhere = {c.source for c in whole.node(node.name).controls} - controls
                assert all(rank not in home_of(whole.node(source), kind) for source in elsewhere)


def origin(graphs: tuple[Graph, ...], rank: int, value: Value) -> Value:
    """The value of the whole graph that ``rank`` has as ``value``: its own, or the one that was sent to it."""
    exchange = graphs[rank].node(value.node)
    if exchange.op != "exchange":
        return value
    sources = exchange.integers("source")
    source = sources[value.index]
    place = sources[: value.index].count(source)  # the values of a pair of ranks keep their order
    sender = graphs[source].node(value.node)
    pairs = zip(sender.inputs, sender.integers("to"), strict=True)
    return [sent for sent, to in pairs if to == rank][place]


@given(st.one_of(kinds(), kinds(shared=True)))
def test_a_rank_returns_the_loss_and_the_gradients_of_its_stages(kind: Kind) -> None:
    whole = ExposeGradients()(graph_for_ranks(kind))
    parts = [Project(kind.ranks, rank)(whole) for rank in range(kind.size)]
    verify_ranks(parts)
    exposed = [exposed_gradients(part) for part in parts]
    for rank in range(kind.size):
        stages = kind.stages_of(rank)
        shared = [name for name, used in (("tied", kind.tied), ("e", kind.sparse)) if used and 0 in stages]
        assert set(exposed[rank]) == {*(f"w{stage}" for stage in stages), *shared}
    for part, names in zip(parts, exposed, strict=True):
        verify(part)
        assert part.outputs[0] == whole.outputs[0]  # the loss
        assert len(part.outputs) == 1 + len(names) + any(node.op == "collect_tokens" for node in part.nodes)


@given(st.one_of(kinds(), kinds(shared=True)))
def test_nothing_is_sent_twice_or_for_nothing(kind: Kind) -> None:
    graphs = ranks_of(kind)
    for part in graphs:
        taken = {value for node in part.nodes if node.op != "collect_tokens" for value in node.inputs}
        for node in part.nodes:
            if node.op == "exchange":
                pairs = list(zip(node.inputs, node.integers("to"), strict=True))
                assert not pairs or Counter(pairs).most_common(1)[0][1] == 1
                assert set(node.values()[:-1]) <= taken
                assert node.inputs or node.integers("source")


@given(st.one_of(kinds(), kinds(shared=True)))
def test_the_ranks_of_random_plans_fit_together(kind: Kind) -> None:
    graphs = ranks_of(kind)
    for part in graphs:
        verify(part)
    verify_ranks(graphs)
