"""Control edges of a window: the order of a replica, and forwards that wait for the update before them."""

from __future__ import annotations

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.ir.graph import Graph
from dapple_tf.graph_passes.passes.windows.order_window import OrderWindow
from dapple_tf.graph_passes.schedules.weight_versions import WeightPolicy, weight_versions
from dapple_tf.graph_passes.schedules.window import Window
from tests.graph_passes.builders import assert_graph, graph, refused


def nodes(window: Window, updates: bool = True) -> Graph:
    """The calls of a window of one stage without data edges, and its updates."""
    lines = []
    for m in range(window.size):
        for r in window.replicas_of(0, m):
            lines += [
                f"%stage0/replica{r}/mb{m}/{op} = {op}() {{micro_batch={m}, replica={r}, stage=0}}"
                for op in ("forward", "backward")
            ]
    for group in window.updates[0] if updates else ():
        name = f"%minibatch{group[-1] // window.micro_batches}/stage0/update"
        lines.append(f"{name} = update() {{function='u', replica=0, stage=0}}")
    return graph("\n".join(lines))


def edges(window: Window, policy: WeightPolicy, before: Graph | None = None) -> list[str]:
    """The edges that the pass adds: ``F1 B0`` where the forward of 1 waits for the backward of 0, ``U0`` an update."""
    result = OrderWindow(weight_versions(window, policy))(before or nodes(window))
    found = []
    for node in result.nodes:
        for control in node.controls:
            assert control.reason.startswith("order: 0")
            found.append(f"{short(node.name)} {short(control.source)}")
    return sorted(found)


def short(name: str) -> str:
    if name.endswith(("run_once", "update")):
        return name.split("/")[-1][0].upper() + name.split("/")[0].removeprefix("minibatch")
    *_, m, op = name.split("/")
    return op[0].upper() + m.removeprefix("mb")


def test_each_call_waits_for_the_one_before_and_a_forward_for_the_update_before_it() -> None:
    """F0 F1 B0 F2 B1 B2."""
    assert edges(Window(3, (1,), (2,)), "stash") == ["B0 F1", "B1 F2", "B2 B1", "F1 F0", "F2 B0", "F2 U0"]


def test_backward_waits_for_the_update_too_where_it_uses_the_newest_weights() -> None:
    """F2 comes after U0, and B1 after F2; B2 waits for U1."""
    assert edges(Window(3, (1,), (2,)), "latest") == ["B0 F1", "B1 F2", "B2 B1", "B2 U1", "F1 F0", "F2 B0", "F2 U0"]


def test_the_next_forward_of_every_replica_waits_for_the_update_of_its_group() -> None:
    assert edges(Window(4, (2,), (1,)), "stash") == [
        "B0 F0",
        "B1 F1",
        "B2 F2",
        "B3 F3",
        "F2 B0",
        "F2 U1",
        "F3 B1",
        "F3 U1",
    ]


def test_the_first_micro_batch_of_a_minibatch_waits_for_the_update_before_it() -> None:
    """Two minibatches of two micro-batches, K = 1."""
    found = edges(Window(2, (1,), (1,), 2, in_turn=False), "2bw")
    assert found == ["B0 F0", "B1 F1", "B2 F2", "B3 F3", "F1 B0", "F2 B1", "F2 U0", "F3 B2"]


def test_a_stage_that_is_not_trained_is_ordered_too() -> None:
    window = Window(2, (1,), (1,))
    assert edges(window, "stash", nodes(window, updates=False)) == ["B0 F0", "B1 F1", "F1 B0"]


def test_what_runs_once_a_minibatch_comes_between_the_calls() -> None:
    """It waits for the update before the forward, since it may read the weights."""
    window = Window(2, (1,), (1,))
    once = "".join(f"%minibatch{t}/stage0/replica0/run_once = run_once() {{replica=0, stage=0}}\n" for t in (0, 1))
    before = nodes(window).replace(nodes=(*graph(once).nodes, *nodes(window).nodes))
    assert edges(window, "stash", before) == ["B0 F0", "B1 F1", "F0 R0", "F1 R1", "R1 B0", "R1 U0"]


def test_replicas_in_turn_run_once_for_all_minibatches_of_a_group() -> None:
    window = Window(2, (2,), (1,))
    once = "".join(
        f"%minibatch{t}/stage0/replica{r}/run_once = run_once() {{replica={r}, stage=0}}\n"
        for t in (0, 1)
        for r in (0, 1)
    )
    before = nodes(window).replace(nodes=(*graph(once).nodes, *nodes(window).nodes))
    result = OrderWindow(weight_versions(window, "stash"))(before)
    found = {node.name: [control.source for control in node.controls] for node in result.nodes}
    for r in (0, 1):
        assert found[f"minibatch1/stage0/replica{r}/run_once"] == [f"minibatch0/stage0/replica{r}/run_once"]
        assert found[f"stage0/replica{r}/mb{r}/forward"] == [f"minibatch1/stage0/replica{r}/run_once"]


def test_a_call_that_takes_the_result_of_the_one_before_needs_no_edge() -> None:
    before = """
        %stage0/replica0/mb0/forward = forward() {place} -> (float32[])
        %stage0/replica0/mb0/backward = backward(%stage0/replica0/mb0/forward:0) {place}
    """
    assert_graph(OrderWindow(weight_versions(Window(1, (1,), (1,)), "stash"))(graph(before)), before)


def test_a_window_for_other_replicas_is_refused() -> None:
    with refused(ScheduleError, "the window has (2,) replicas, the graph (1,)"):
        OrderWindow(weight_versions(Window(2, (2,), (1,)), "stash"))(nodes(Window(2, (1,), (1,))))
