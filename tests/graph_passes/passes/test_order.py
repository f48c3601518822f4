"""Control edges of a schedule: DAPPLE, Fig. 11."""

from __future__ import annotations

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.passes.order import Order
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec, parse_schedule
from tests.graph_passes.builders import assert_graph, function, graph, refused, two_stages

# The data edges of Fig. 11(b): two stages, two micro-batches. M stands for the micro-batch.
DATA = """
    %stage0/replica0/mbM/forward = forward() {place} -> (float32[])
    %stage1/replica0/mbM/forward = forward(%stage0/replica0/mbM/forward:0) {place} -> (float32[])
    %stage1/replica0/mbM/backward = backward(%stage1/replica0/mbM/forward:0) {place} -> (float32[])
    %stage0/replica0/mbM/backward = backward(%stage1/replica0/mbM/backward:0) {place} -> (float32[])
"""
TWO = graph(DATA.replace("M", "0") + DATA.replace("M", "1"))


def test_dapple_on_two_stages_adds_the_edges_of_figure_11_b() -> None:
    assert_graph(
        Order(ScheduleSpec.parse("dapple-a").build(2, 2))(TWO),
        """
        %stage0/replica0/mb0/forward = forward() {place} -> (float32[])
        %stage1/replica0/mb0/forward = forward(%stage0/replica0/mb0/forward:0) {place} -> (float32[])
        %stage1/replica0/mb0/backward = backward(%stage1/replica0/mb0/forward:0) {place} -> (float32[])
        %stage0/replica0/mb1/forward = forward() {place} -> (float32[])
        | ^%stage0/replica0/mb0/forward 'order: 0F1 after 0F0'
        %stage0/replica0/mb0/backward = backward(%stage1/replica0/mb0/backward:0) {place} -> (float32[])
        | ^%stage0/replica0/mb1/forward 'order: 0B0 after 0F1'
        %stage1/replica0/mb1/forward = forward(%stage0/replica0/mb1/forward:0) {place} -> (float32[])
        | ^%stage1/replica0/mb0/backward 'order: 1F1 after 1B0'
        %stage1/replica0/mb1/backward = backward(%stage1/replica0/mb1/forward:0) {place} -> (float32[])
        %stage0/replica0/mb1/backward = backward(%stage1/replica0/mb1/backward:0) {place} -> (float32[])
        | ^%stage0/replica0/mb0/backward 'order: 0B1 after 0B0'
        """,
    )


# The same where micro-batch M is split on both stages.
HALVES = """
    %stage0/replica0/mbM/forward = forward() {place} -> (float32[])
    %stage1/replica0/mbM/forward = forward(%stage0/replica0/mbM/forward:0) {place} -> (float32[])
    %stage1/replica0/mbM/inputs = inputs(%stage1/replica0/mbM/forward:0) {place} -> (float32[])
    %stage0/replica0/mbM/inputs = inputs(%stage1/replica0/mbM/inputs:0) {place} -> (float32[])
    %stage1/replica0/mbM/weights = weights(%stage1/replica0/mbM/inputs:0) {place} -> (float32[])
    %stage0/replica0/mbM/weights = weights(%stage0/replica0/mbM/inputs:0) {place} -> (float32[])
"""


def test_weight_gradients_are_ordered_as_scheduled() -> None:
    split = graph("".join(HALVES.replace("M", m) for m in "012"))
    result = Order(ScheduleSpec.parse("zb-h1").build(2, 3))(split)
    edges = [control.reason for node in result.nodes for control in node.controls]
    wanted = ["0F1 after 0F0", "0I0 after 0F1", "0F2 after 0W0", "0I1 after 0F2", "0I2 after 0W1"]
    wanted += ["1F1 after 1I0", "1W0 after 1I1", "1F2 after 1W0", "1W1 after 1I2", "1W2 after 1W1"]
    assert sorted(edges) == sorted(f"order: {edge}" for edge in wanted)


def test_whole_backwards_are_ordered_among_those_that_are_split() -> None:
    """Micro-batch 1 is whole on both stages."""
    order = "0F0 0F1 0I0 0F2 0B1 0W0 0I2 0W2; 1F0 1I0 1F1 1B1 1F2 1W0 1I2 1W2"
    mixed = graph(HALVES.replace("M", "0") + DATA.replace("M", "1") + HALVES.replace("M", "2"))
    result = Order(ScheduleSpec.parse(order).build(2, 3))(mixed)
    edges = [control.reason for node in result.nodes for control in node.controls]
    wanted = ["0F1 after 0F0", "0I0 after 0F1", "0F2 after 0I0", "0B1 after 0F2", "0W0 after 0B1", "0I2 after 0W0"]
    wanted += ["1F1 after 1I0", "1F2 after 1B1", "1W0 after 1F2", "1I2 after 1W0"]
    assert sorted(edges) == sorted(f"order: {edge}" for edge in wanted)


def test_a_call_waits_for_the_sums_of_both_kinds_of_backward() -> None:
    """Gradients are added in micro-batch order: those of 0B1 only after those of 0W0."""
    sums = """
        %stage0/replica0/mbM/accumulate = accumulate(%stage0/replica0/mbM/OP:0) {place, first=False, variables=["w"]}
    """
    first = HALVES + sums.replace("OP", "weights")
    second = DATA + sums.replace("OP", "backward")
    nodes = graph(first.replace("M", "0") + second.replace("M", "1") + second.replace("M", "2"))

    def edges(order: str) -> set[str]:
        result = Order(ScheduleSpec.parse(order + "; 1F0 1I0 1W0 1F1 1B1 1F2 1B2").build(2, 3))(nodes)
        return {f"{n.name} {c.source}" for n in result.nodes for c in n.controls if c.source.endswith("accumulate")}

    at = "stage0/replica0"
    assert edges("0F0 0F1 0I0 0B1 0W0 0F2 0B2") == {f"{at}/mb2/forward {at}/mb0/accumulate"}
    assert edges("0F0 0F1 0I0 0W0 0B1 0F2 0B2") == {
        f"{at}/mb1/backward {at}/mb0/accumulate",
        f"{at}/mb2/forward {at}/mb1/accumulate",
    }


def test_one_micro_batch_on_two_stages_needs_one_control_edge() -> None:
    result = Order(ScheduleSpec.parse("dapple-a").build(2, 1))(graph(DATA.replace("M", "0")))
    edges = [(control.reason, node.name) for node in result.nodes for control in node.controls]
    assert edges == [("order: 0B0 after 0F0", "stage0/replica0/mb0/backward")]


def test_gpipe_runs_all_forwards_before_the_first_backward() -> None:
    result = Order(ScheduleSpec.parse("gpipe").build(2, 2))(TWO)
    edges = [control.reason for node in result.nodes for control in node.controls]
    assert sorted(edges) == [
        "order: 0B0 after 0F1",
        "order: 0B1 after 0B0",
        "order: 0F1 after 0F0",
        "order: 1B0 after 1F1",
        "order: 1B1 after 1B0",
        "order: 1F1 after 1F0",
    ]


def test_each_replica_has_its_own_order() -> None:
    lines = [
        f"%stage0/replica{r}/mb0/{op} = {op}() {{micro_batch=0, replica={r}, stage=0}}"
        for r in (0, 1)
        for op in ("forward", "backward")
    ]
    result = Order(ScheduleSpec.parse("dapple-a").build(1, 1))(graph("\n".join(lines)))
    assert_graph(
        result,
        """
        %stage0/replica0/mb0/forward = forward() {place}
        %stage0/replica0/mb0/backward = backward() {place} ^%stage0/replica0/mb0/forward 'order: 0B0 after 0F0'
        %stage0/replica1/mb0/forward = forward() {place}
        %stage0/replica1/mb0/backward = backward() {place} ^%stage0/replica1/mb0/forward 'order: 0B0 after 0F0'
        """,
    )


def test_a_schedule_for_other_stages_or_micro_batches_is_refused() -> None:
    with refused(ScheduleError, "the schedule is for 3 stages x 4 micro-batches, the graph has 2 x 2"):
        Order(ScheduleSpec.parse("dapple-a").build(3, 4))(TWO)


def test_calls_of_several_stages_of_one_device_run_in_the_order_of_the_schedule() -> None:
    result = Order(ScheduleSpec.parse("0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1").build(2, 2))(TWO)
    controls = {node.name: {control.source for control in node.controls} for node in result.nodes}
    assert controls == {
        "stage0/replica0/mb0/forward": set(),
        "stage0/replica0/mb1/forward": {"stage0/replica0/mb0/forward"},
        "stage1/replica0/mb0/forward": {"stage0/replica0/mb1/forward"},
        "stage1/replica0/mb0/backward": set(),  # takes the result of the call before
        "stage1/replica0/mb1/forward": {"stage1/replica0/mb0/backward"},
        "stage1/replica0/mb1/backward": set(),
        "stage0/replica0/mb0/backward": {"stage1/replica0/mb1/backward"},
        "stage0/replica0/mb1/backward": {"stage0/replica0/mb0/backward"},
    }


def test_stages_of_one_device_with_different_replicas_are_refused() -> None:
    first = DATA.replace("M", "0")
    more = "%stage0/replica1/mb0/forward = forward() {micro_batch=0, replica=1, stage=0} -> (float32[])\n"
    with refused(ScheduleError, "stages [0, 1] share devices, so they need equal replicas, but have [2, 1]"):
        Order(ScheduleSpec.parse("0F0 1F0 1B0 0B0").build(2, 1))(graph(first + more))


def test_a_call_waits_until_the_gradients_before_it_are_accumulated() -> None:
    sums = """
        %stage1/replica0/mbM/accumulate = accumulate(%stage1/replica0/mbM/backward:0)
        | {place, first=False, variables=["w"]}
    """
    result = Order(ScheduleSpec.parse("dapple-a").build(2, 2))(
        graph("".join((DATA + sums).replace("M", m) for m in "01"))
    )
    edges = {(node.name, control.source) for node in result.nodes for control in node.controls}
    assert ("stage1/replica0/mb1/forward", "stage1/replica0/mb0/accumulate") in edges
    assert ("stage1/replica0/mb1/forward", "stage1/replica0/mb0/backward") in edges
    assert not any(target.startswith("stage0") for target, source in edges if source.endswith("accumulate"))


def test_no_call_waits_for_a_sum_that_waits_for_later_calls() -> None:
    """Sums are in micro-batch order: that of micro-batch 1 is complete only after 1B0."""
    sums = """
        %stage1/replica0/mbM/accumulate = accumulate(%stage1/replica0/mbM/backward:0)
        | {place, first=False, variables=["w"]}
    """
    order = parse_schedule("0F1 0F0 0B1 0B0; 1F1 1B1 1F0 1B0")
    result = Order(order)(graph("".join((DATA + sums).replace("M", m) for m in "01")))
    assert not [c for node in result.nodes for c in node.controls if c.source.endswith("accumulate")]


def test_a_schedule_that_writes_variables_out_of_micro_batch_order_is_refused() -> None:
    counting = (*two_stages()[:2], function("stage1/forward", writes=["seen"]), function("stage1/backward"))
    found = TWO.replace(functions=counting)
    with refused(ScheduleError, "runs 1F1 before 1F0, but forward of stage 1 writes 'seen'"):
        Order(parse_schedule("0F0 0F1 0B0 0B1; 1F1 1F0 1B0 1B1"))(found)
    Order(parse_schedule("0F1 0F0 0B1 0B0; 1F0 1F1 1B1 1B0"))(found)
    found = TWO.replace(functions=(function("stage0/forward"), function("stage0/backward", writes=["n"])))
    with refused(ScheduleError, "runs 0B1 before 0B0, but backward of stage 0 writes 'n'"):
        Order(parse_schedule("0F1 0F0 0B1 0B0; 1F0 1F1 1B1 1B0"))(found)


def test_both_kinds_of_backward_write_variables_in_micro_batch_order() -> None:
    """The gradients of inputs write what the whole backward does; those of weights may come in any order."""
    writing = [function(f"stage0/{name}", writes=["n"]) for name in ("backward", "inputs")]
    functions = (function("stage0/forward"), *writing, function("stage0/weights"))
    nodes = graph(DATA.replace("M", "0") + HALVES.replace("M", "1") + HALVES.replace("M", "2"))
    found = nodes.replace(functions=functions)
    after = "; 1F0 1F1 1F2 1B0 1I1 1I2 1W1 1W2"
    said = "but inputs of stage 0 writes 'n', which one device would write in the order of the samples: run the B and I"
    with refused(ScheduleError, f"the schedule runs 0I1 before 0B0, {said}"):
        Order(parse_schedule("0F0 0F1 0F2 0I1 0B0 0I2 0W1 0W2" + after))(found)
    with refused(ScheduleError, "the schedule runs 0I2 before 0B0, but inputs of stage 0 writes 'n'"):
        Order(parse_schedule("0F0 0F1 0F2 0I1 0I2 0B0 0W1 0W2" + after))(found)
    Order(parse_schedule("0F0 0F1 0F2 0B0 0I1 0I2 0W2 0W1" + after))(found)
