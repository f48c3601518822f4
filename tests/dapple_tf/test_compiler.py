"""The order of the passes, for each kind of plan and each variant of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import pytest
import tensorflow as tf

from dapple_tf.compiler import StepVariant, job_graphs, local_graph, pipeline_graph, rank_graphs
from dapple_tf.errors import PlanError
from dapple_tf.frontend.capture import capture
from dapple_tf.frontend.trace import trace_loss
from dapple_tf.graph_passes.analysis.input_needs import find_inputs
from dapple_tf.graph_passes.analysis.layers import find_layers
from dapple_tf.graph_passes.ir.graph import Graph
from dapple_tf.graph_passes.ir.names import nodes_of
from dapple_tf.graph_passes.ir.ops import OPS, OpName
from dapple_tf.graph_passes.ir.text import parse_graph, print_graph
from dapple_tf.graph_passes.passes.place import PlaceRank
from dapple_tf.plans import Plan
from dapple_tf.staged_model import StagedModel, stage_model
from tests.dapple_tf.builders import X, chain, make_plan

DEVICES = [f"/device:CPU:{i}" for i in range(4)]
CALLS = ["microbatch", "split_concat", "copy_variables", "accumulate", "allreduce", "order", "add_in_place"]
CHECKS = ["place", "verify_pipeline"]


@pytest.fixture(scope="module")
def loss() -> Any:
    return chain()[1]


def model_of(loss: Any, recompute: Sequence[int] = (), optimizer: bool = True) -> StagedModel:
    captured = capture(loss, (X,))
    layers = find_layers(captured.graph)
    start = layers.find("d1")
    return stage_model(captured, layers, [start], keras.optimizers.SGD(0.1) if optimizer else None, recompute)


def plan_of(model: StagedModel, *replicas: int, **changes: Any) -> Plan:
    """A plan of two stages; the layers do not matter here, since the model is cut already."""
    first, second = replicas or (1, 1)
    devices = tuple(range(first)), tuple(range(first, first + second))
    return make_plan((0, 0, devices[0]), (1, 1, devices[1]), **changes)


def names_of(model: StagedModel, plan: Plan, variant: StepVariant = StepVariant.PLAIN) -> list[str]:
    """The names of the passes that make a step's graph, in order."""
    seen: list[str] = []
    pipeline_graph(model, plan, DEVICES, DEVICES[0], variant=variant, observers=[lambda name, _: seen.append(name)])
    return seen


@pytest.mark.parametrize(
    ("variant", "added"),
    [
        (StepVariant.PLAIN, []),
        (StepVariant.TIMED, ["instrument"]),
        (StepVariant.WITH_GRADIENTS, ["expose_gradients"]),
        (StepVariant.CHECKED, ["check_numerics"]),
    ],
)
def test_each_variant_of_a_step_adds_its_pass_before_the_nodes_are_placed(
    loss: Any, variant: StepVariant, added: list[str]
) -> None:
    model = model_of(loss)
    assert names_of(model, plan_of(model), variant) == [*CALLS, "apply", *added, *CHECKS]


@pytest.mark.parametrize("replicas", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("schedule", ["dapple-a", "gpipe", "K=2,1"])
def test_replicas_and_the_order_of_calls_do_not_change_the_passes(
    loss: Any, replicas: tuple[int, int], schedule: str
) -> None:
    model = model_of(loss)
    assert names_of(model, plan_of(model, *replicas, schedule=schedule)) == [*CALLS, "apply", *CHECKS]


def test_overlap_comes_between_the_sums_of_replicas_and_allreduce(loss: Any) -> None:
    model = model_of(loss)
    names = names_of(model, plan_of(model, 2, 1, overlap=True))
    assert names == [*CALLS[:4], "overlap", *CALLS[4:], "apply", *CHECKS]


def test_stage_functions_are_rewritten_before_they_are_called_recomputation_first(loss: Any) -> None:
    recomputed = model_of(loss, recompute=range(20))
    assert any(recomputed.pass_facts.runs)
    plan = plan_of(recomputed, recompute=True)
    assert names_of(recomputed, plan) == ["recompute", *CALLS, "apply", *CHECKS]
    both = plan_of(recomputed, recompute=True, schedule="zb-h1")
    assert names_of(recomputed, both) == ["recompute", "split_weights", *CALLS, "apply", *CHECKS]
    model = model_of(loss)
    assert names_of(model, plan_of(model, schedule="zb-h1")) == ["split_weights", *CALLS, "apply", *CHECKS]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"schedule": "zb-h1"},
        {"overlap": True},
        {"micro_batch_sizes": (1, 2) * 30, "micro_batch_size": 2, "global_batch_size": 90},
    ],
    ids=["plain", "zb-h1", "overlap", "sizes"],
)
def test_passes_run_for_a_few_of_many_micro_batches(loss: Any, changes: dict[str, Any]) -> None:
    model = model_of(loss)
    plan = plan_of(model, 2, 1, **{"micro_batches": 60, **changes})
    counts: list[int] = []

    def observe(_: str, graph: Graph) -> None:
        counts.append(len(nodes_of(graph, OpName.FORWARD)))

    graph = local_graph(model, plan, DEVICES, DEVICES[0], observers=[observe])
    check_same(graph, pipeline_graph(model, plan, DEVICES, DEVICES[0]))
    assert 4 * max(counts) < len(nodes_of(graph, OpName.FORWARD)) == 3 * 60


@pytest.mark.parametrize("schedule", ["dapple-a", "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n2F0 2B0 2F1 2B1"])
def test_a_model_that_only_runs_forward_is_built_for_a_few_of_many_micro_batches_too(loss: Any, schedule: str) -> None:
    """It may have other stages than training, for which the text of a schedule is."""
    trained = model_of(loss, optimizer=False)
    forwards = tuple(f for f in trained.graph.functions if f.name.endswith("/forward"))
    model = dataclasses.replace(trained, graph=trained.graph.replace(functions=forwards))
    plan = plan_of(model, micro_batches=60, schedule=schedule)
    check_same(local_graph(model, plan, DEVICES, DEVICES[0]), pipeline_graph(model, plan, DEVICES, DEVICES[0]))


def test_a_timed_step_has_the_stamps_of_all_micro_batches_in_order(loss: Any) -> None:
    model = model_of(loss)
    plan = plan_of(model, micro_batches=60)
    found, built = (
        make(model, plan, DEVICES, DEVICES[0], variant=StepVariant.TIMED) for make in (local_graph, pipeline_graph)
    )
    assert found == built


def check_same(found: Graph, built: Graph) -> None:
    """Check that two graphs are the same but for the order of their nodes."""
    assert found.by_name == built.by_name
    assert found.replace(nodes=()) == built.replace(nodes=())


@pytest.mark.parametrize("local", [False, True])
def test_a_rank_lengthens_its_own_graph_only(loss: Any, local: bool) -> None:
    model = model_of(loss)
    plan = plan_of(model, 2, 1, micro_batches=60)
    for rank, whole in enumerate(rank_graphs(model, plan, 3, local=local)):
        graphs, own = job_graphs(model, plan, 3, rank, "/device:CPU:0", "/device:CPU:1", local=local)
        check_same(own, PlaceRank("/device:CPU:0", "/device:CPU:1")(whole))
        assert len(graphs) == 3
        assert all(4 * len(few.nodes) < len(own.nodes) for few in graphs)


def test_the_graphs_of_all_ranks_are_whole_where_a_few_micro_batches_do_not_show_them(loss: Any) -> None:
    model = model_of(loss)
    plan = plan_of(model, 2, 1, micro_batches=60, schedule="gpipe")
    graphs, own = job_graphs(model, plan, 3, 2, "/device:CPU:0", "/device:CPU:1")
    assert graphs == rank_graphs(model, plan, 3)
    assert own == PlaceRank("/device:CPU:0", "/device:CPU:1")(graphs[2])


def test_without_an_optimizer_nothing_is_applied(loss: Any) -> None:
    model = model_of(loss, optimizer=False)
    assert names_of(model, plan_of(model), StepVariant.WITH_GRADIENTS) == [*CALLS, "expose_gradients", *CHECKS]


@pytest.mark.parametrize(
    ("variant", "added"),
    [
        (StepVariant.PLAIN, []),
        (StepVariant.CHECKED, []),
        (StepVariant.WITH_GRADIENTS, []),
        (StepVariant.TIMED, ["instrument"]),
    ],
)
def test_a_rank_s_graph_is_projected_from_the_whole_one_and_timed_after_that(
    loss: Any, variant: StepVariant, added: list[str]
) -> None:
    model = model_of(loss)
    seen: list[str] = []
    plan = plan_of(model, 2, 1)
    graphs = rank_graphs(model, plan, 3, variant=variant, observers=[lambda name, _: seen.append(name)])
    assert seen == ["combine_statistics", "share_statistics", "rank_variables", *(["project", *added] * 3)]
    assert [any(node.op == "timestamp" for node in graph.nodes) for graph in graphs] == [bool(added)] * 3


@pytest.mark.parametrize("variant", [StepVariant.PLAIN, StepVariant.TIMED])
def test_ranks_take_their_own_rows_in_graphs_that_fit_together_too(loss: Any, variant: StepVariant) -> None:
    model = model_of(loss)
    seen: list[str] = []
    plan = plan_of(model, 2, 1)
    observers = [lambda name, _: seen.append(name)]
    graphs = rank_graphs(model, plan, 3, variant=variant, local=True, observers=observers)
    timed = ["instrument"] if variant is StepVariant.TIMED else []
    assert seen == [
        "combine_statistics",
        "share_statistics",
        "rank_variables",
        *(["project", "local_input", *timed] * 3),
    ]
    assert [graph.inputs[-1] for graph in graphs] == ["batch/size"] * 3
    whole = rank_graphs(model, plan, 3, variant=variant)
    assert [find_inputs(graph) for graph in graphs] == [find_inputs(graph) for graph in whole]


@pytest.fixture(scope="module")
def joining() -> StagedModel:
    """A model of two stages, in the first of which replicas join the statistics of batch norm."""
    layers = [keras.layers.Dense(4, name="d0"), keras.layers.BatchNormalization(), keras.layers.Dense(4, name="d1")]
    model = keras.Sequential([keras.Input((X.shape[1],)), *layers])
    captured = trace_loss(lambda x: tf.reduce_mean(model(x, training=True) ** 2), (X,), 8, batch_norm="sync")
    found = find_layers(captured.graph)
    return stage_model(captured, found, [found.find("d1")], keras.optimizers.SGD(0.1))


def test_calls_are_in_parts_behind_all_passes_that_see_whole_calls(joining: StagedModel, loss: Any) -> None:
    plan = plan_of(joining, 2, 1)
    seen: list[str] = []
    graph = local_graph(joining, plan, DEVICES, DEVICES[0], observers=[lambda name, _: seen.append(name)])
    assert seen == [*CALLS, "apply", *CHECKS, "join_replicas"]
    assert {node.integer("stage") for node in nodes_of(graph, OpName.PART)} == {0}
    assert not nodes_of(pipeline_graph(joining, plan, DEVICES, DEVICES[0]), OpName.PART)
    assert parse_graph(print_graph(graph)) == graph
    other = model_of(loss)
    assert local_graph(other, plan, DEVICES, DEVICES[0]) == pipeline_graph(other, plan, DEVICES, DEVICES[0])


def test_ranks_exchange_what_replicas_join_and_are_timed_after_that(joining: StagedModel) -> None:
    graphs = rank_graphs(joining, plan_of(joining, 2, 1), 3, variant=StepVariant.TIMED)
    joins = [
        {node.name for node in graph.nodes if "/join" in node.name and node.op == OpName.EXCHANGE} for graph in graphs
    ]
    assert joins[0] == joins[1] != set()
    assert not joins[2]
    stamped = {node.name.rsplit("/", 1)[0] for node in nodes_of(graphs[1], OpName.TIMESTAMP)}
    assert "stage0/replica1/mb0/backward" in stamped
    assert not any("/part" in name for name in stamped)


def test_all_nodes_of_a_pipelined_graph_have_an_op_of_the_table(loss: Any) -> None:
    graphs: list[Graph] = []
    model = model_of(loss)
    graphs.append(pipeline_graph(model, plan_of(model, 2, 1), DEVICES, DEVICES[0], variant=StepVariant.TIMED))
    graphs += rank_graphs(model, plan_of(model, 2, 1), 3)
    assert {node.op for graph in graphs for node in graph.nodes} <= OPS.keys()


def test_a_plan_for_devices_that_are_not_there_is_refused(loss: Any) -> None:
    model = model_of(loss)
    with pytest.raises(PlanError, match=r"the plan uses devices 0-4, but"):
        names_of(model, plan_of(model, 3, 2))
    with pytest.raises(PlanError, match=r"the plan is for 2 ranks"):
        rank_graphs(model, plan_of(model), 3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_runs_all_stages_of_its_device(loss: Any, ranks: int) -> None:
    model = model_of(loss)
    devices = tuple(range(ranks))
    plan = make_plan((0, 0, devices), (1, 1, devices), schedule="looped-bfs:v=2")
    graphs = rank_graphs(model, plan, ranks)
    for rank, graph in enumerate(graphs):
        calls = {(node.integer("stage"), node.integer("replica")) for node in nodes_of(graph, OpName.FORWARD)}
        assert calls == {(0, rank), (1, rank)}
        assert not any("_to_stage" in node.name for node in nodes_of(graph, OpName.EXCHANGE))
    with pytest.raises(PlanError, match=rf"the plan is for {ranks} ranks?, .*, but the job has 3"):
        rank_graphs(model, plan, 3)


@pytest.mark.parametrize(
    ("devices", "schedule", "message"),
    [
        (
            ((0,), (1,)),
            "looped-bfs:v=2",
            r"runs stages \[0, 1\] on one worker, but stage 0 is on devices \[0\] and stage 1",
        ),
        (((0, 1), (1, 2)), "dapple-a", r"device 1 is in stage 0 and in stage 1: a device can be in only one stage, or"),
    ],
)
def test_stages_share_devices_only_as_the_schedule_says(loss: Any, devices: Any, schedule: str, message: str) -> None:
    model = model_of(loss)
    plan = make_plan((0, 0, devices[0]), (1, 1, devices[1]), schedule=schedule)
    with pytest.raises(PlanError, match=message):
        pipeline_graph(model, plan, DEVICES, DEVICES[0])
