"""What is proved of all ranks together: each check refuses graphs that were damaged."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest

from dapple_tf.errors import GraphError, ScheduleError
from dapple_tf.graph_passes.ir.graph import Graph
from dapple_tf.graph_passes.passes.order import call_name
from dapple_tf.graph_passes.passes.verify_ranks import verify_ranks
from dapple_tf.graph_passes.schedules.schedule import Action, Schedule, check
from dapple_tf.graph_passes.schedules.spec import parse_schedule
from tests.graph_passes.builders import graph, refused
from tests.graph_passes.whole import Kind, ranks_of

# Rank 0 sends a to rank 1, which sends b back; then all sum g, and meet.
FIRST = """
    %a = A() -> (float32[?,4])
    %over = exchange(%a:0) {dtypes=['float32'], header=False, ranks=[0, 1], source=[], to=[1]} -> (int64[])
    %back = exchange() {dtypes=['int32'], header=False, ranks=[0, 1], source=[1], to=[]} -> (int32[2], int64[])
    %sum = allreduce(%a:0) {ranks=[0, 1]} -> (float32[?,4], int64[])
    %meet = barrier() {ranks=[0, 1]} -> (int64[]) ^%sum 'barrier: after the sum'
    %tokens = collect_tokens(%over:0, %back:1, %sum:1, %meet:0) -> (int64[])
    outputs %tokens:0
"""
SECOND = """
    %over = exchange() {dtypes=['float32'], header=False, ranks=[0, 1], source=[0], to=[]} -> (float32[?,4], int64[])
    %b = B(%over:0) -> (int32[2])
    %back = exchange(%b:0) {dtypes=['int32'], header=False, ranks=[0, 1], source=[], to=[0]} -> (int64[])
    %sum = allreduce(%over:0) {ranks=[0, 1]} -> (float32[?,4], int64[])
    %meet = barrier() {ranks=[0, 1]} -> (int64[]) ^%sum 'barrier: after the sum'
    %tokens = collect_tokens(%over:1, %back:0, %sum:1, %meet:0) -> (int64[])
    outputs %tokens:0
"""


def damaged(text: str, *changes: tuple[str, str]) -> Graph:
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return graph(text)


def test_graphs_that_fit_together_pass() -> None:
    verify_ranks([graph(FIRST), graph(SECOND)])


def test_a_graph_of_one_rank_without_exchanges_passes() -> None:
    verify_ranks([graph("%a = A() -> (float32[])\noutputs %a:0")])


HERE = "%back = exchange() {dtypes=['int32'], header=False, ranks=[0, 1], source=[1], to=[]}"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            [(HERE, "%back = Const()"), ("%back:1, ", "")],
            "'back' on rank 1 waits for ranks [0, 1], but is on ranks [1]",
        ),
        (
            [(HERE, HERE.replace("[0, 1]", "[0, 1, 2]"))],
            "'back' on rank 0 waits for ranks [0, 1, 2], but is on ranks [0, 1]",
        ),
        (
            [(HERE, HERE.replace("[0, 1]", "[1, 0]"))],
            "'back' on rank 0 waits for ranks [1, 0], but is on ranks [0, 1]",
        ),
        ([(HERE, HERE.replace("False", "True"))], "'back' differs in 'header' between ranks [0, 1]"),
        ([(HERE, HERE.replace("'int32'", "'int64'"))], "'back' differs in 'dtypes' between ranks [0, 1]"),
        (
            [("(int32[2], int64[])", "(int32[3], int64[])")],
            "'back': rank 1 sends [int32[2]] to rank 0, which expects [int32[3]]",
        ),
        (
            [("(int32[2], int64[])", "(int64[2], int64[])")],
            "'back': rank 1 sends [int32[2]] to rank 0, which expects [int64[2]]",
        ),
        (
            [
                (HERE, HERE.replace("source=[1]", "source=[]")),
                ("(int32[2], int64[])", "(int64[])"),
                ("%back:1", "%back:0"),
            ],
            "'back': rank 1 sends [int32[2]] to rank 0, which expects []",
        ),
        ([("to=[1]", "to=[0]")], "'over': rank 0 sends [] to rank 1, which expects [float32[None, 4]]"),
        (
            [("-> (float32[?,4], int64[])", "-> (float32[?,5], int64[])")],
            "'sum' gives [float32[None, 5], int64[]] on rank 0, but [float32[None, 4], int64[]] on rank 1",
        ),
        ([("%meet = barrier() {ranks=[0, 1]} -> (int64[])", "%meet = exchange() {dtypes=['float32'], header=False, "
           "ranks=[0, 1], source=[], to=[]} -> (int64[])")], "'meet' is 'exchange' on rank 0, but 'barrier' on rank 1"),
        ([("%over:0, ", "")], "'over' on rank 0: no output of the graph takes its token"),
        ([(", %sum:1", "")], "'sum' on rank 0: no output of the graph takes its token"),
        ([(", %meet:0", "")], "'meet' on rank 0: no output of the graph takes its token"),
        ([("outputs %tokens:0", "outputs %a:0")], "'over' on rank 0: no output of the graph takes its token"),
    ],
)  # fmt: skip
def test_the_error_names_what_differs_between_ranks(changes: Sequence[tuple[str, str]], said: str) -> None:
    with refused(GraphError, said):
        verify_ranks([damaged(FIRST, *changes), graph(SECOND)])


def test_the_error_names_a_collective_that_a_rank_lacks() -> None:
    three = [
        graph(
            "%all = barrier() {ranks=[0, 1, 2]} -> (int64[])\n"
            "%tokens = collect_tokens(%all:0) -> (int64[])\noutputs %tokens:0"
        )
        for _ in range(3)
    ]
    verify_ranks(three)
    with refused(GraphError, "'all' on rank 0 waits for ranks [0, 1, 2], but is on ranks [0, 2]"):
        verify_ranks([three[0], graph("%a = A() -> (int64[])\noutputs %a:0"), three[2]])


AVERAGED = """
    %n = read_state() -> (int64[])
    %mean = merge_state(%n:0) {ranks=[0, 1]} -> (int64[])
    %meet = barrier() {ranks=[0, 1]} -> (int64[]) ^%mean 'barrier: averaged'
    %begin = set_updating() ^%meet 'barrier: begun'
    %commit = commit(%mean:0) ^%begin 'barrier: begun'
    %tokens = collect_tokens(%meet:0) -> (int64[])
    outputs %tokens:0
"""


@pytest.mark.parametrize(
    ("edge", "said"),
    [
        ("^%mean 'barrier: averaged'", "no path orders 'meet' after 'mean' on rank 1"),
        ("^%begin 'barrier: begun'", "no path orders 'commit' after 'meet' on rank 1"),
    ],
)
def test_state_that_is_averaged_after_the_barrier_or_written_before_it_is_refused(edge: str, said: str) -> None:
    verify_ranks([graph(AVERAGED), graph(AVERAGED)])
    with refused(GraphError, said):
        verify_ranks([graph(AVERAGED), damaged(AVERAGED, (edge, ""))])


# --- deadlocks

CROSSED = """
    %{first} = barrier() {{ranks=[0, 1]}} -> (int64[])
    %work = Work(%{first}:0) -> (int64[])
    %{second} = barrier() {{ranks=[0, 1]}} -> (int64[]) ^%work 'order: later'
    %tokens = collect_tokens(%one:0, %two:0) -> (int64[])
    outputs %tokens:0
"""


def test_two_exchanges_in_crossed_order_deadlock_and_the_cycle_is_named() -> None:
    one, other = (graph(CROSSED.format(first=a, second=b)) for a, b in (("one", "two"), ("two", "one")))
    verify_ranks([one, one])
    verify_ranks([other, other])
    with refused(
        GraphError, "the ranks would deadlock, each waiting for another: ", "one -> rank 0: work -> two -> rank 1: work"
    ):
        verify_ranks([one, other])


def with_order(part: Graph, actions: Sequence[Action]) -> Graph:
    """A rank's graph whose calls run in another order."""
    names = [call_name(action, 0) for action in actions]
    before = dict(zip(names[1:], names, strict=False))
    nodes = []
    for node in part.nodes:
        node = dataclasses.replace(node, controls=tuple(c for c in node.controls if not c.reason.startswith("order")))
        nodes.append(node.after(before[node.name], "order: another") if node.name in before else node)
    return part.replace(nodes=tuple(nodes))


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize(
    "schedule", ["0F0 2F0 2B0 0B0; 1F0 3F0 3B0 1B0", "0F0 3F0 3B0 0B0; 1F0 2F0 2B0 1B0"], ids=["looped", "V-shaped"]
)
def test_of_all_orders_of_a_rank_s_stages_those_that_cannot_run_are_refused(schedule: str, worker: int) -> None:
    """Several boundaries join the two ranks, in both directions."""
    workers = parse_schedule(schedule).workers
    graphs = ranks_of(Kind((1, 1, 1, 1), 1, schedule))
    outcomes = set()
    for order in itertools.permutations(workers[worker]):
        rows = [order if w == worker else actions for w, actions in enumerate(workers)]
        parts = [with_order(part, row) for part, row in zip(graphs, rows, strict=True)]
        try:
            check(Schedule(tuple(rows)))
        except ScheduleError:
            with refused(GraphError, "the ranks would deadlock, each waiting for another: "):
                verify_ranks(parts)
            outcomes.add("deadlock")
        else:
            verify_ranks(parts)
            outcomes.add("runs")
    assert outcomes == {"deadlock", "runs"}


def test_three_ranks_that_wait_in_a_ring_deadlock() -> None:
    """Any two of them could go on without the third."""
    texts = []
    for rank in range(3):
        receives, sends = f"from{(rank - 1) % 3}", f"from{rank}"
        pairs = {name: sorted({int(name[4:]), (int(name[4:]) + 1) % 3}) for name in (receives, sends)}
        texts.append(
            f"""
            %{receives} = barrier() {{ranks={pairs[receives]}}} -> (int64[])
            %{sends} = barrier() {{ranks={pairs[sends]}}} -> (int64[]) ^%{receives} 'order: after what comes'
            %tokens = collect_tokens(%{receives}:0, %{sends}:0) -> (int64[])
            outputs %tokens:0
            """
        )
    with refused(GraphError, "the ranks would deadlock, each waiting for another: ", "from0", "from1", "from2"):
        verify_ranks([graph(text) for text in texts])
