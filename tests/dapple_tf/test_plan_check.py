"""Plans that do not fit a profile or a cluster."""

from __future__ import annotations

import dataclasses

import pytest

from dapple_tf.errors import PlanError, ScheduleError
from dapple_tf.plan_check import check_plan
from dapple_tf.plans import Plan
from dapple_tf.profiler.profile import Profile
from dapple_tf.simulator.simulate import simulate
from tests.dapple_tf.simulator.builders import make_cluster, make_plan, make_profile
from tests.graph_passes.builders import refused

FOUR = make_profile((1, 2), (1, 2), (1, 2), (1, 2))
GOOD = make_plan((0, 1, (0,)), (2, 3, (1,)))


def test_a_plan_that_fits_passes() -> None:
    check_plan(GOOD, FOUR, make_cluster())
    check_plan(dataclasses.replace(GOOD, micro_batch_size=3, micro_batch_sizes=(1, 3)), FOUR, make_cluster())
    check_plan(make_plan((0, 1, (0, 1)), (2, 3, (2,))), dataclasses.replace(FOUR, unsplittable=(1, 3)), make_cluster(3))
    check_plan(GOOD, dataclasses.replace(FOUR, uncuttable=(1, 3), unsplittable=(2,)), make_cluster())


@pytest.mark.parametrize(
    ("plan", "profile", "message"),
    [
        (
            dataclasses.replace(GOOD, global_batch_size=5),
            FOUR,
            "micro_batch_size 2 x micro_batches 2 is not global_batch_size 5: choose micro-batches that divide",
        ),
        (
            make_plan((0, 1, (0, 1)), (2, 3, (2,)), micro_batch_size=3, micro_batch_sizes=(1, 3)),
            FOUR,
            "stage 0 has 2 replicas, but a micro-batch has 1 sample: use larger micro-batches or fewer replicas",
        ),
        (
            dataclasses.replace(GOOD, global_batch_size=0, micro_batch_size=0),
            FOUR,
            "micro_batch_size 0 x micro_batches 2 is not global_batch_size 0",
        ),
        (
            make_plan((0, 1, (0,)), (2, 4, (1,))),
            FOUR,
            "the stages end at layer 4 (stage 1), but the profile of 'net' has the layers 0 to 3: give the profile",
        ),
        (make_plan((0, 2, (0,))), FOUR, "the stages end at layer 2 (stage 0), but the profile of 'net' has"),
        (
            make_plan((0, 1, (0,)), (2, 3, (1, 2))),
            FOUR,
            "stage 1 is on device 2, but the cluster has the devices 0 to 1: give the cluster that the plan was made",
        ),
        (
            make_plan((0, 1, (0,)), (2, 2, (1,)), (3, 3, (0,))),
            FOUR,
            "device 0 is in stage 0 and in stage 2: a device can be in only one stage",
        ),
        (
            GOOD,
            dataclasses.replace(FOUR, uncuttable=(2,)),
            "stage 1 starts at layer 2 (layer2), where the model cannot be cut: start it at one of 1 (layer1), 3 (lay",
        ),
        (
            GOOD,
            dataclasses.replace(FOUR, uncuttable=(1, 2, 3)),
            "where the model cannot be cut: start it at one of none (use one stage)",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: Plan, profile: Profile, message: str) -> None:
    with refused(PlanError, message):
        check_plan(plan, profile, make_cluster())
    with refused(PlanError, message):
        simulate(plan, profile, make_cluster())


def test_different_replicas_cannot_meet_where_a_tensor_cannot_be_split() -> None:
    plan = make_plan((0, 1, (0, 1)), (2, 3, (2,)))
    message = (
        "stages 0 and 1 have 2 and 1 replicas, but what crosses the cut at layer 2 (layer2) cannot be split: "
        "give both stages the same number of replicas, or cut elsewhere"
    )
    with refused(PlanError, message):
        check_plan(plan, dataclasses.replace(FOUR, unsplittable=(2,)), make_cluster(3))


def test_an_impossible_schedule_is_refused() -> None:
    with refused(ScheduleError, "no schedule is called 'best'"):
        simulate(dataclasses.replace(GOOD, schedule="best"), FOUR, make_cluster())
