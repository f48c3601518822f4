"""``stages=2`` or names: cuts, replicas and re-computed layers of requested stages, and impossible requests."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from dapple_tf.autoplan.layer_estimates import EstimatedCosts
from dapple_tf.autoplan.options import Options
from dapple_tf.autoplan.recompute_option import StageNumbers
from dapple_tf.autoplan.stages_requested import plan_requested_stages, stages_at_home
from dapple_tf.errors import DappleWarning, PartitionError, PlanError, ScheduleError
from dapple_tf.graph_passes.analysis.layers import Layers, find_layers
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value, tensor
from dapple_tf.plans import Plan, StagePlan


def model(*shapes: tuple[int | None, ...]) -> Layers:
    """A chain of layers a, b, c ...; each gives a tensor of its shape."""
    nodes = [Node("x", "arg", outputs=(tensor("float32", None, 2),))]
    for name, shape in zip("abcdefgh", shapes, strict=False):
        nodes.append(Node(name, "Exp", (Value(nodes[-1].name),), (tensor("float32", *shape),)))
    return find_layers(Graph("net", tuple(nodes), ("x",), (Value(nodes[-1].name),)))


FOUR = model((None, 2), (None, 2), (None, 2), ())


def plan(layers: Layers = FOUR, costs: Any = None, batch: int = 16, devices: int = 8, **request: Any) -> Plan:
    count = len(layers.layers)
    costs = costs or EstimatedCosts([1.0] * count, [0.0] * (count - 1))
    return plan_requested_stages(Options(**request), layers, costs, batch, devices)


def stages(found: Plan) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(stage.first_layer, stage.last_layer, stage.devices) for stage in found.stages]


def test_a_number_of_stages_is_balanced_by_cost() -> None:
    assert stages(plan(stages=2)) == [(0, 1, (0,)), (2, 3, (1,))]
    assert stages(plan(stages=2, costs=EstimatedCosts([9.0, 1, 1, 1], [0.0] * 3))) == [(0, 0, (0,)), (1, 3, (1,))]


def test_a_cut_that_many_bytes_cross_is_avoided() -> None:
    assert stages(plan(stages=2, costs=EstimatedCosts([1.0] * 4, [0.0, 9.0, 9.0])))[1][0] == 1


def test_names_start_stages_and_the_first_may_be_named_too() -> None:
    expected = [(0, 0, (0,)), (1, 2, (1,)), (3, 3, (2,))]
    assert stages(plan(stages=["b", "d"])) == expected
    assert stages(plan(stages=["a", "b", "d"])) == expected


def test_the_first_layer_alone_gives_one_stage_and_a_warning() -> None:
    with pytest.warns(DappleWarning, match="'a' starts at the model's first layer, .*: name the .* or give stages=1"):
        assert stages(plan(stages=["a"])) == [(0, 3, (0,))]


def test_replicas_take_devices_in_order() -> None:
    found = plan(stages=3, replicas=[2, 1, 3], micro_batches=4)
    assert [stage.devices for stage in found.stages] == [(0, 1), (2,), (3, 4, 5)]
    assert found.replicas == (2, 1, 3)


def test_stages_with_different_replicas_meet_only_where_the_batch_can_be_split() -> None:
    layers = model((None, 2), (2, 2), (None, 2), ())
    cheap = EstimatedCosts([9.0, 9.0, 9.0, 9.0], [0.0, 0.0, 0.0])
    assert stages(plan(layers, cheap, stages=2, replicas=[1, 1]))[1][0] == 2
    assert stages(plan(layers, cheap, stages=2, replicas=[2, 1]))[1][0] in (1, 3)


def test_too_few_cuts_that_can_be_split_are_an_error() -> None:
    layers = model((None, 2), (2, 2), (2, 2), ())
    assert len(plan(layers, stages=3, replicas=[1, 1, 1]).stages) == 3
    with pytest.raises(
        PlanError,
        match=r"3 stages with different replicas \[2, 1, 1\] .* has a batch axis, and .* only 1 such cut:",
    ):
        plan(layers, stages=3, replicas=[2, 1, 1])


def test_replicas_alone_give_the_number_of_stages() -> None:
    assert len(plan(replicas=[1, 2, 1]).stages) == 3


@pytest.mark.parametrize(
    ("recompute", "expected"),
    [
        (True, True),
        (False, False),
        ([], False),
        ([True, True, True], True),
        ([False, False, False], False),
        ([True, False, True], (0, 3)),
        ([False, True, False], (1, 2)),
        (StageNumbers((1,)), (1, 2)),
        (StageNumbers((2, 0, 1)), True),
        (["d", "b"], (1, 3)),
        (("c",), (2,)),
    ],
)
def test_layers_to_recompute_are_those_of_stages_or_named(recompute: Any, expected: Any) -> None:
    assert plan(stages=["b", "d"], recompute=recompute).recompute == expected


def test_the_other_fields_of_the_plan() -> None:
    found = plan(stages=2, micro_batches=5, batch=16)
    assert (found.model, found.planner) == ("net", "requested")
    assert (found.global_batch_size, found.micro_batches, found.micro_batch_size) == (16, 5, 4)
    assert (found.schedule, found.recompute, found.predicted) == ("dapple-a", False, None)
    assert plan(stages=2, schedule="gpipe").schedule == "gpipe"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 0}, "stages=0: there must be at least one"),
        ({"stages": -2}, "stages=-2: there must be at least one"),
        ({"stages": 2, "replicas": [1]}, r"replicas=\[1\] names 1 stage, but there are 2"),
        ({"stages": 2, "replicas": [1, 0]}, r"replicas=\[1, 0\]: every stage needs at least one device"),
        (
            {"stages": 2, "replicas": [8, 1]},
            r"2 stages with replicas \[8, 1\] need 9 devices, but there are 8: .* dapple.init\(devices=n\)",
        ),
        ({"stages": 2, "recompute": [True]}, r"recompute=\[True\] is for 1 stage, but there are 2"),
        ({"stages": 2, "recompute": StageNumbers((0, 2))}, "recompute names stage 2, but the stages are 0 to 1"),
        ({"stages": ["c", "b"]}, r"stages=\['c', 'b'\]: 'b' does not come after 'c' in the model"),
        ({"stages": ["b", "b"]}, "'b' is given twice: name each layer that starts a stage once"),
        ({"stages": ["a", "a"]}, "'a' is given twice"),
        ({"stages": ["a", "c", "b"]}, "'b' does not come after"),
        (
            {"stages": 1, "micro_batches": 17},
            "micro_batches=17 is more than the 16 samples of the batch: use at most 16",
        ),
        ({"stages": 1, "micro_batches": 0}, "micro_batches=0: it must be at least 1"),
        (
            {"stages": 2, "micro_batches": 8, "replicas": [3, 1]},
            "a batch of 16 samples in 8 micro-batches gives some only 2 samples, too few for 3 replicas: use fewer",
        ),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "K=3,2,1"}, "K=3,2,1 gives K of 3 stages, but there are 2"),
        ({"schedule": "K=9,1"}, "K_0 = 9 is not between 1 and M = 8"),
        ({"schedule": "gpipe:D=2"}, "gpipe holds all M=8 micro-batches, but D=2"),
        ({"schedule": "0F0 0B0"}, "the schedule's text is for 1 stage x 1 micro-batch, but there are 2"),
        ({"schedule": "K=3,2,1", "micro_batches": "auto"}, "K=3,2,1 gives K of 3 stages, but there are 2"),
        ({"schedule": "K=0,1", "micro_batches": "auto"}, "K_0 = 0 is not between 1 and M = 16"),
        ({"schedule": "0F0 0B0", "micro_batches": "auto"}, "the schedule's text is for 1 stage, but there are 2"),
    ],
)
def test_a_schedule_for_other_stages_or_micro_batches_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        plan(stages=2, **options)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(
        PartitionError, match=r"5 stages are wanted, but .* in 3 places only \(4 layers\): ask for at most 4"
    ):
        plan(stages=5)


def test_an_unknown_layer_is_refused() -> None:
    with pytest.raises(PartitionError, match="no layer is called 'z'; the nearest are"):
        plan(stages=["z"])
    with pytest.raises(PartitionError, match="no layer is called 'y'; the nearest are"):
        plan(recompute=["a", "y"])


@pytest.mark.parametrize(
    ("homes", "starts"),
    [
        ({}, (2, 4, 6)),
        ({2: 0}, (3, 4, 6)),  # layer 2 goes to device 0
        ({4: 0, 5: 3}, None),  # no cut is left for the stages between them
        ({1: 1, 7: 2}, (1, 4, 8)),
        ({6: 9}, (2, 4, 6)),  # no stage begins on device 9
        ({1: 3, 6: 0}, None),
    ],
    ids=str,
)
def test_cuts_move_as_little_as_needed_so_that_layers_are_at_home(homes: Any, starts: Any) -> None:
    bounds = [0, 2, 4, 6, 9]
    made = [StagePlan(a, b - 1, (i,)) for i, (a, b) in enumerate(itertools.pairwise(bounds))]
    found = stages_at_home(Plan("m", "test", 8, 2, 4, "gpipe", False, tuple(made)), homes, range(1, 9))
    assert (found and tuple(stage.first_layer for stage in found[1:])) == starts
    if found:
        assert [stage.last_layer + 1 for stage in found] == [*starts, 9]
