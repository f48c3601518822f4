"""Which stage owns a variable, which replicas use copies of it, and when copies are refreshed and committed."""

from __future__ import annotations

from dapple_tf.graph_passes.analysis.variable_use import Variables, find_variables
from dapple_tf.graph_passes.ir.graph import ancestors
from dapple_tf.graph_passes.ir.names import Site
from dapple_tf.graph_passes.passes.copy_variables import CopyVariables
from dapple_tf.graph_passes.passes.microbatch import Microbatch
from dapple_tf.graph_passes.passes.order import Order
from dapple_tf.graph_passes.passes.split_concat import SplitConcat
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from tests.graph_passes.builders import assert_graph, call_graph, function

TIED = (  # the table of stage 0 is used again in stage 1; stage 0 counts in ``mean``
    function("stage0/forward", "arg x, variable table, variable mean", "boundary h", writes=["mean"]),
    function("stage0/backward", "gradient h", "variable table"),
    function("stage1/forward", "boundary h, variable w", "loss loss"),
    function("stage1/backward", "boundary h, seed loss, variable table", "gradient h, variable table, variable w"),
)

FORWARDS = """
    %stage0/replica0/mb0/forward = forward() {place}
    %stage0/replica0/mb1/forward = forward() {place}
    %stage1/replica0/mb0/forward = forward() {place}
    %stage1/replica0/mb1/forward = forward() {place}
"""


PLAIN = (
    function("stage0/forward", "arg x, variable v", "boundary h"),
    function("stage0/backward", "gradient h", "variable v"),
    function("stage1/forward", "boundary h, variable w", "loss loss"),
    function("stage1/backward", "seed loss", "gradient h, variable w"),
)


def test_the_first_stage_that_uses_a_variable_owns_it() -> None:
    variables = find_variables(call_graph("", *TIED))
    assert variables == Variables((("table", (0, 1)), ("mean", (0,)), ("w", (1,))), frozenset({"mean"}))
    assert (variables.owned(0), variables.owned(1)) == (("table", "mean"), ("w",))
    assert (variables.used(0), variables.used(1)) == (("table", "mean"), ("table", "w"))
    assert (variables.owner("table"), variables.owner("w")) == (0, 1)


def test_copies_are_of_variables_owned_elsewhere_and_of_those_that_forward_writes() -> None:
    variables = find_variables(call_graph("", *TIED))
    assert variables.copied(0, 0) == ("mean",)
    assert variables.copied(0, 1) == ("table", "mean")
    assert variables.copied(1, 0) == ("table",)
    assert variables.copied(1, 1) == ("table", "w")


def test_where_the_update_is_sharded_each_replica_copies_what_another_one_keeps() -> None:
    variables = find_variables(call_graph("", *TIED), (("table", 1), ("w", 0)))
    assert (variables.sharded, variables.home("table"), variables.home("mean")) == ({0, 1}, Site(0, 1), Site(0))
    assert variables.copied(0, 0) == ("table", "mean")
    assert variables.copied(0, 1) == ("mean",)
    assert variables.copied(1, 0) == ("table",)
    assert variables.copied(1, 1) == ("table", "w")


def test_copies_are_refreshed_before_every_call_whichever_comes_first() -> None:
    result = CopyVariables()(call_graph(FORWARDS, *TIED))
    uncommitted = result.replace(nodes=tuple(node for node in result.nodes if node.op != "commit"))
    assert_graph(
        uncommitted,
        """
        %stage0/replica0/refresh = refresh() {place, variables=['mean']}
        %stage0/replica0/mb0/forward = forward() {place}
        | ^%stage0/replica0/refresh "refresh: the copies of variables hold this step's values"
        %stage0/replica0/mb1/forward = forward() {place}
        | ^%stage0/replica0/refresh "refresh: the copies of variables hold this step's values"
        %stage1/replica0/refresh = refresh() {place, variables=['table']}
        %stage1/replica0/mb0/forward = forward() {place}
        | ^%stage1/replica0/refresh "refresh: the copies of variables hold this step's values"
        %stage1/replica0/mb1/forward = forward() {place}
        | ^%stage1/replica0/refresh "refresh: the copies of variables hold this step's values"
        """,
    )


def test_gradients_of_weights_wait_for_the_copies_too() -> None:
    call = "%stage1/replica0/mbM/weights = weights() {micro_batch=M, replica=0, stage=1}\n"
    split = (*TIED[:3], function("stage1/backward", "seed loss", "gradient h"))
    weights = function("stage1/weights", "boundary h, variable table", "variable table, variable w")
    other = function("stage0/weights", "gradient h", "variable table")
    text = FORWARDS + call.replace("M", "0") + call.replace("M", "1")
    result = CopyVariables()(call_graph(text, *split, weights, other))
    waits = {node.name: [control.source for control in node.controls] for node in result.nodes if node.op == "weights"}
    assert waits == {
        "stage1/replica0/mb0/weights": ["stage1/replica0/refresh"],
        "stage1/replica0/mb1/weights": ["stage1/replica0/refresh"],
    }


def test_what_forward_writes_is_committed_by_its_owner_over_its_replicas() -> None:
    replica = FORWARDS.replace("replica0", "replica1").replace("replica=0", "replica=1")
    commits = [node for node in CopyVariables()(call_graph(FORWARDS + replica, *TIED)).nodes if node.op == "commit"]
    assert [(node.name, dict(node.attrs)) for node in commits] == [
        ("stage0/commit", {"replica": 0, "replicas": 2, "stage": 0, "variables": ("mean",)})
    ]


def test_a_model_without_state_and_shared_variables_has_no_copies() -> None:
    assert CopyVariables()(call_graph(FORWARDS, *PLAIN)).nodes == call_graph(FORWARDS).nodes


def test_state_is_committed_after_every_forward_that_writes_it_also_without_an_optimizer() -> None:
    graph = Microbatch(2, 3)(call_graph("inputs %x\n%x = input() -> (float32[?,4])", *TIED))
    graph = Order(ScheduleSpec.parse("dapple-a").build(2, 3))(CopyVariables()(SplitConcat((2, 1))(graph)))
    forwards = {f"stage0/replica{replica}/mb{m}/forward" for replica in (0, 1) for m in range(3)}
    assert forwards <= ancestors(graph, ["stage0/commit"])


READ_LATER = (  # stage 1 reads what stage 0 writes
    function("stage0/forward", "arg x, variable scale", "boundary h", writes=["scale"]),
    function("stage0/backward", "gradient h"),
    function("stage1/forward", "boundary h, variable scale", "loss loss"),
    function("stage1/backward", "seed loss", "gradient h"),
)


def test_a_commit_waits_until_other_stages_have_copied_what_it_replaces() -> None:
    """In a window no barrier comes between: a stage that is late would copy what the next window should begin with."""
    commit = CopyVariables()(call_graph(FORWARDS, *READ_LATER)).node("stage0/commit")
    assert {control.source: control.reason for control in commit.controls} == {
        "stage0/replica0/mb0/forward": "commit: every write to the copies is done",
        "stage0/replica0/mb1/forward": "commit: every write to the copies is done",
        "stage1/replica0/refresh": "commit: the copies of other stages hold this step's values",
    }


ONCE = (  # stage 0 counts once a step, and has statistics of each micro-batch
    function("stage0/run_once", "variable count", writes=["count"]),
    function("stage0/forward", "arg x, variable mean", "boundary h", writes=["mean"]),
    function("stage0/backward", "gradient h"),
)


def test_variables_written_once_a_step_only_are_known() -> None:
    variables = find_variables(call_graph("", *ONCE))
    assert variables.state == {"count", "mean"}
    assert variables.once == {"count"}


def test_a_variable_that_micro_batches_write_too_is_not_written_once() -> None:
    both = function("stage0/run_once", "variable mean", writes=["mean"])
    assert find_variables(call_graph("", both, *ONCE[1:])).once == frozenset()


def test_what_is_written_once_is_committed_apart_from_what_replicas_average() -> None:
    text = "%stage0/replica0/run_once = run_once() {replica=0, stage=0}\n" + "".join(
        f"%stage0/replica{i}/mb0/forward = forward() {{micro_batch=0, replica={i}, stage=0}}\n" for i in (0, 1)
    )
    graph = CopyVariables()(call_graph(text, *ONCE))
    commits = {node.name: dict(node.attrs) for node in graph.nodes if node.op == "commit"}
    assert commits == {
        "stage0/commit": {"replica": 0, "replicas": 2, "stage": 0, "variables": ("mean",)},
        "stage0/commit_once": {"replica": 0, "replicas": 1, "stage": 0, "variables": ("count",)},
    }
    sources = {control.source for control in graph.node("stage0/commit_once").controls}
    assert sources == {"stage0/replica0/run_once", "stage0/replica0/mb0/forward", "stage0/replica1/mb0/forward"}


def test_sums_that_replicas_add_to_a_variable_start_from_0_and_are_added_up() -> None:
    text = "".join(
        f"%stage0/replica{i}/mb0/forward = forward() {{micro_batch=0, replica={i}, stage=0}}\n" for i in (0, 1)
    )
    adding = function("stage0/forward", "arg x, variable total", "boundary h", writes=["total"], adds=True)
    graph = CopyVariables()(call_graph(text, adding, function("stage0/backward", "gradient h")))
    attrs = {node.name: dict(node.attrs) for node in graph.nodes if node.op in ("refresh", "commit")}
    assert attrs == {
        "stage0/replica0/refresh": {"replica": 0, "stage": 0, "variables": ("total",)},
        "stage0/replica1/refresh": {"replica": 1, "stage": 0, "summed": ("total",), "variables": ("total",)},
        "stage0/commit": {"replica": 0, "replicas": 2, "stage": 0, "summed": ("total",), "variables": ("total",)},
    }


def test_a_variable_that_is_assigned_too_is_not_summed() -> None:
    adding = function("stage0/forward", "arg x, variable total", "boundary h", writes=["total"], adds=True)
    assigning = function("stage0/backward", "gradient h, variable total", writes=["total"])
    assert find_variables(call_graph("", adding, function("stage0/backward", "gradient h"))).summed == {"total"}
    assert find_variables(call_graph("", adding, assigning)).summed == frozenset()


def test_what_runs_once_waits_for_the_copies() -> None:
    text = """
        %stage0/replica0/run_once = run_once() {place}
        %stage0/replica0/mb0/forward = forward() {place}
    """
    controls = CopyVariables()(call_graph(text, *ONCE)).node("stage0/replica0/run_once").controls
    assert [control.source for control in controls] == ["stage0/replica0/refresh"]
