"""Time stamps around calls, and gradients as outputs of the graph."""

from __future__ import annotations

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import topological
from dapple_tf.graph_passes.passes.expose_gradients import ExposeGradients, exposed_gradients
from dapple_tf.graph_passes.passes.instrument import Instrument, timed_nodes
from tests.graph_passes.builders import assert_graph, graph, refused

HALVES = ("inputs", "weights")
CALLS = """
    %x = input() -> (float32[?])
    %stage0/refresh = refresh()
    %stage0/replica0/mb0/forward = forward(%x:0, %x:0) {place} -> (float32[?]) ^%stage0/refresh 'refresh'
    %stage0/replica0/mb0/backward = backward() {place} ^%stage0/replica0/mb0/forward 'order: 0B0 after 0F0'
    outputs %stage0/replica0/mb0/forward:0
"""


def test_a_call_is_stamped_when_its_inputs_are_there_and_when_it_has_run() -> None:
    assert_graph(
        Instrument()(graph(CALLS)),
        """
        %x = input() -> (float32[?])
        %stage0/refresh = refresh()
        %stage0/replica0/mb0/forward/start = timestamp() {place} -> (float64[]) ^%x 'time: it could start'
        | ^%stage0/refresh 'time: it could start'
        %stage0/replica0/mb0/forward = forward(%x:0, %x:0) {place} -> (float32[?]) ^%stage0/refresh 'refresh'
        | ^%stage0/replica0/mb0/forward/start 'time: the start is taken before'
        %stage0/replica0/mb0/forward/end = timestamp() {place} -> (float64[])
        | ^%stage0/replica0/mb0/forward 'time: it has ended'
        %stage0/replica0/mb0/backward/start = timestamp() {place} -> (float64[])
        | ^%stage0/replica0/mb0/forward/end 'time: it could start'
        %stage0/replica0/mb0/backward = backward() {place} ^%stage0/replica0/mb0/forward 'order: 0B0 after 0F0'
        | ^%stage0/replica0/mb0/backward/start 'time: the start is taken before'
        %stage0/replica0/mb0/backward/end = timestamp() {place} -> (float64[])
        | ^%stage0/replica0/mb0/backward 'time: it has ended'
        %timeline = stack_timestamps(%stage0/replica0/mb0/forward/start:0, %stage0/replica0/mb0/forward/end:0,
        | %stage0/replica0/mb0/backward/start:0, %stage0/replica0/mb0/backward/end:0) -> (float64[4])
        outputs %stage0/replica0/mb0/forward:0 %timeline:0
        """,
    )


def test_what_follows_a_call_through_other_nodes_starts_after_the_end_of_the_call() -> None:
    """The end of a call and the start of the exchange behind a ``together`` node were once taken at the same time."""
    before = """
        %x = input() -> (float32[?])
        %stage0/replica0/mb0/forward = forward(%x:0) {place} -> (float32[?])
        %stage0/together = together(%stage0/replica0/mb0/forward:0) {place} -> (float32[?])
        %stage0/slice = slice(%stage0/together:0) -> (float32[?])
        %stage1/replica0/mb0/forward = forward(%stage0/slice:0) {place} -> (float32[?])
        outputs %stage1/replica0/mb0/forward:0
    """
    after = Instrument()(graph(before))
    seen, end = [], "stage0/replica0/mb0/forward/end"
    waiting = ["stage1/replica0/mb0/forward/start"]
    while waiting:
        seen.append(waiting.pop())
        waiting += after.node(seen[-1]).predecessors()
    assert end in seen
    (control,) = after.node("stage0/together").controls
    assert (control.source, control.reason) == (end, "time: the end is taken before")
    assert after.node("stage0/slice").controls == ()


def test_timed_nodes_are_calls_exchanges_reductions_and_updates_in_order() -> None:
    halves = "".join(f"%stage0/replica0/mb1/{op} = {op}() {{micro_batch=1, replica=0, stage=0}}\n" for op in HALVES)
    found = timed_nodes(Instrument()(graph(CALLS + halves)))
    assert [node.name.split("/")[-1] for node in found] == ["forward", "backward", *HALVES]


def test_timed_nodes_keep_the_order_of_their_times_where_a_later_pass_moves_nodes() -> None:
    before = """
        %x = input() -> (float32[?])
        %stage0/replica0/mb0/forward = forward(%x:0) {place} -> (float32[?])
        %stage0/replica1/mb0/forward = forward(%x:0) {place} -> (float32[?])
        outputs %stage0/replica0/mb0/forward:0
    """
    after = Instrument()(graph(before))
    moved = after.replace(nodes=(*topological(reversed(after.nodes[:-1])), after.nodes[-1]))
    wanted = ["stage0/replica0/mb0/forward", "stage0/replica1/mb0/forward"]
    assert [node.name for node in moved.nodes if node.op == "forward"] == wanted[::-1]
    assert [node.name for node in timed_nodes(moved)] == [node.name for node in timed_nodes(after)] == wanted


def test_exposed_gradients_are_the_last_outputs() -> None:
    before = """
        %loss = merge() -> (float32[])
        %stage0/reduced_gradients = reduced_gradients() {variables=['u', 'w']} -> (float32[4], float32[2])
        %stage1/reduced_gradients = reduced_gradients() {variables=['v']} -> (float32[4])
        outputs %loss:0
    """
    assert exposed_gradients(graph(before)) == ()
    assert exposed_gradients(ExposeGradients()(graph(before))) == ("u", "w", "v")
    assert_graph(
        ExposeGradients()(graph(before)),
        before.replace(
            "outputs %loss:0",
            "outputs %loss:0 %stage0/reduced_gradients:0 %stage0/reduced_gradients:1 %stage1/reduced_gradients:0",
        ),
    )


SPARSE = """
    %loss = merge() -> (float32[])
    %stage0/gather_slices/table = gather_slices() {place, rows=9, variable='table'} -> (float32[_,4], int64[_])
    %stage1/reduced_gradients = reduced_gradients() {variables=['v']} -> (float32[4])
    outputs %loss:0
"""


def test_exposed_sparse_gradients_are_dense() -> None:
    assert exposed_gradients(graph(SPARSE)) == ()
    assert exposed_gradients(ExposeGradients()(graph(SPARSE))) == ("v", "table")
    assert_graph(
        ExposeGradients()(graph(SPARSE)),
        SPARSE.replace(
            "    outputs %loss:0",
            """
            %stage0/densify/table = densify(%stage0/gather_slices/table:0, %stage0/gather_slices/table:1)
            | {place, variable='table'} -> (float32[9,4])
            outputs %loss:0 %stage1/reduced_gradients:0 %stage0/densify/table:0
            """,
        ),
    )


def test_gradients_are_exposed_once() -> None:
    with refused(GraphError, "the gradients are outputs already: run the pass once"):
        ExposeGradients()(ExposeGradients()(graph(SPARSE)))
