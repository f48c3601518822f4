"""The text that describes plans and a planner's result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dapple_tf.planner.api import make_problem, predict_plan, run_planner
from dapple_tf.planner.explain import describe_moves, describe_plan, describe_result
from dapple_tf.plans import Plan, StagePlan
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.profile import Profile, Timing
from tests.dapple_tf.planner.builders import make_cluster, make_profile
from tests.dapple_tf.simulator.builders import make_plan

# Seconds, bytes sent, kept, trained of 4 samples: even in two stages, and DP has 30 bytes to reduce at 10 a second.
PROFILE = make_profile((1, 2, 4, 4, 10), (1, 2, 4, 4, 10), (2, 4, 4, 4, 10))


def say(profile: Profile, cluster: Cluster, batch: int = 8, **options: Any) -> str:
    problem = make_problem(profile, cluster, global_batch_size=batch, **options)
    decision = run_planner(problem, "best")
    others = [predict_plan(problem, candidate, "best") for candidate in decision.runners_up]
    return describe_result(problem, decision, predict_plan(problem, decision.chosen, "best"), others)


@pytest.mark.parametrize(
    ("plan", "written", "layers"),
    [
        (make_plan((0, 4, (0,))), "one device", "5"),
        (make_plan((0, 4, (0, 1, 2))), "DP", "5"),
        (make_plan((0, 0, (0,)), (1, 4, (1,))), "straight", "1:4"),
        (make_plan((0, 2, (0, 1)), (3, 3, (2, 3)), (4, 4, (4,))), "2:2:1", "3:1:1"),
        (make_plan((0, 22, tuple(range(8))), (23, 47, tuple(range(8, 16)))), "8:8", "23:25"),
        (make_plan((0, 1, (0,)), (2, 2, (0,))), "one device, 2 stages per device", "2:1"),
        (make_plan((0, 0, (0, 1)), (1, 1, (0, 1))), "DP, 2 stages per device", "1:1"),
        (make_plan(*[(i, i, (i % 2,)) for i in range(4)]), "straight, 2 stages per device", "1:1:1:1"),
        (
            make_plan(*[(i, i, devices) for i, devices in enumerate(((0, 1), (2,), (0, 1)))]),
            "2:1, 1 to 2 stages per device",
            "1:1:1",
        ),
    ],
)
def test_plans_are_written_in_the_papers_notation(plan: Plan, written: str, layers: str) -> None:
    assert plan.notation == written
    assert plan.headline.startswith(f"plan {written}, layers {layers}, ")


def test_a_plan_is_described_in_a_few_lines() -> None:
    problem = make_problem(
        PROFILE, make_cluster(2), global_batch_size=8, micro_batch_size=4, recompute=True, overlap=True
    )
    plan, timeline = predict_plan(problem, run_planner(problem, "dp").chosen, "dp")
    task, head, *table, stage = describe_plan(plan, PROFILE, problem.cluster, timeline).splitlines()
    assert task == "net on 2 devices, a batch of 8 samples"
    assert head == (
        "plan DP, layers 3, 2 micro-batches of 4 samples, schedule dapple-a, recompute of all layers, AllReduce "
        "overlaps backward"
    )
    assert "\n".join(table) == str(timeline)
    assert stage == "stage 0: layer0 .. layer2"


def test_devices_that_a_plan_leaves_idle_are_told() -> None:
    problem = make_problem(PROFILE, make_cluster(2), global_batch_size=8)
    plan, timeline = predict_plan(problem, run_planner(problem, "gpipe", stages=1).chosen, "gpipe")
    task = describe_plan(plan, PROFILE, problem.cluster, timeline).splitlines()[0]
    assert task == "net on 2 devices, a batch of 8 samples; the plan uses 1 of the devices"


def test_long_layer_names_are_shortened() -> None:
    profile = make_profile((1, 1))
    profile = Profile("net", 4, "test", (type(profile.layers[0])("n" * 80, 1, 1, 0, 0, 0),))
    problem = make_problem(profile, make_cluster(1), global_batch_size=4)
    text = describe_plan(*_described(problem, profile))
    assert text.endswith(f"stage 0: {'n' * 57}... .. {'n' * 57}...")


def _described(problem: Any, profile: Profile) -> tuple[Any, ...]:
    plan, timeline = predict_plan(problem, run_planner(problem, "best").chosen, "best")
    return plan, profile, problem.cluster, timeline


def test_runners_up_are_listed_with_how_much_slower_they_are_and_why() -> None:
    lines = say(PROFILE, make_cluster(2)).splitlines()
    # Straight is 13.7 s: eight times 1.5 s, 0.5 s + 0.1 s there, 1 s + 0.1 s back. DP halves 24 s, reduces for 3 s.
    assert lines[0] == (
        "runner-up DP, 4 micro-batches, dapple-a: 15.000 s, 9.5% slower: "
        "AllReduce after the last backward takes 3.000 s against 0.000 s"
    )
    assert lines[1].startswith("runner-up one device, 8 micro-batches, dapple-a: 24.000 s, 75.2% slower: computing on ")
    assert "at most 14.2% above any plan: devices must compute for 12.000 s" in lines


def test_the_busiest_device_computes_all_of_its_stages() -> None:
    """Eight layers of 1 + 2 s a sample on four devices: 4 x 6 s, and 3 x 6 / 2 s idle where devices have two stages."""
    text = say(make_profile(*[(4.0, 8.0)] * 8), make_cluster(4), batch=4, micro_batch_size=1)
    assert "runner-up one device, 4 micro-batches, dapple-a: 96.000 s, 2.9 times as long: " in text
    assert "computing on the busiest device takes 96.000 s against 24.000 s" in text
    assert "runner-up straight" in text


def test_times_of_one_batch_size_only_are_pointed_out() -> None:
    doubt = "the profile has times of one batch size (4); times of smaller slices were assumed proportional"
    assert doubt in say(PROFILE, make_cluster(2))
    assert doubt not in say(PROFILE, make_cluster(1), micro_batch_size=4)
    timed = make_profile(*[(1, 2, 4, 4, 10)] * 2, timings=(Timing(8, (2, 2), (4, 4)),))
    assert doubt not in say(timed, make_cluster(2))


def test_equally_fast_runners_up_are_called_as_fast() -> None:
    text = say(make_profile((0, 0), (0, 0)), make_cluster(2))
    assert "runner-up DP" in text, "of equals the one with the fewest devices is chosen"
    assert "0.0 ms, as fast" in text


def test_no_percentage_is_given_over_a_step_of_zero_seconds() -> None:
    text = say(make_profile((0, 0, 0, 0, 10)), make_cluster(2), batch=4)
    # DP reduces 2 (2 - 1)/2 x 10 bytes at 10 a second; one device has nothing to do.
    assert "dapple-a: 1.000 s, slower: AllReduce after the last backward takes 1.000 s against 0.000 s" in text


def test_no_part_of_a_step_is_negative() -> None:
    # Six times 0.1 s and 0.1 s come to less when added one by one than when multiplied.
    text = say(make_profile((0.4, 0.4), (0.4, 0.4)), make_cluster(2), batch=12, micro_batch_size=2)
    assert "waiting for other stages and transfers takes 400.0 ms against 0.0 ms" in text


def moves(profile: Profile, cluster: Cluster, planner: str, **options: Any) -> list[str]:
    problem = make_problem(profile, cluster, global_batch_size=8, **options)
    return describe_moves(problem, *predict_plan(problem, run_planner(problem, planner).chosen, planner))


def test_what_would_help_is_simulated() -> None:
    """The straight plan above with half of its transfers; and DP of 24 s of compute, which computes forward again."""
    links, recompute = moves(PROFILE, make_cluster(2), "best")
    assert links == "with links twice as fast these stages would take 13.600 s, 0.7% less"
    assert recompute.startswith("with re-computation these stages would take ")
    links, device, recompute = moves(PROFILE, make_cluster(2), "dp", micro_batch_size=4)
    assert links == "with links twice as fast these stages would take 13.500 s, 10.0% less"
    # Of four rows one replica of three still computes two: 12 s, and reduces 2 x 2/3 x 30 bytes at 10 a second.
    assert device == "with one more device, for stage 0, these stages would take 16.000 s, 6.7% more"
    assert recompute == "with re-computation these stages would take 19.000 s, 26.7% more"  # without stashes to save


def test_of_a_plan_that_re_computes_re_computation_is_no_move() -> None:
    assert len(moves(PROFILE, make_cluster(2), "dp", micro_batch_size=4, recompute=True)) == 2
    assert moves(PROFILE, make_cluster(1), "dp", recompute=True, micro_batch_size=1) == []


def test_a_stage_gets_no_further_device_where_what_crosses_its_cuts_cannot_be_split() -> None:
    """Of three stages with such cuts none may have a replica more; with one such cut the stage without it may."""
    profile = make_profile(*[(1, 2, 4, 4, 10)] * 3)
    for unsplittable, gaining in (((1, 2), 0), ((1,), 1)):
        found = moves(replace(profile, unsplittable=unsplittable), make_cluster(3), "gpipe", micro_batch_size=4)
        assert sum(line.startswith("with one more device, for stage 2,") for line in found) == gaining


def test_a_policy_that_holds_less_and_takes_little_longer_is_a_move() -> None:
    """Without transfers eight forwards ahead gain nothing; transfers of 5 s between stages of 3 s need five ahead."""
    stages = (StagePlan(0, 0, (0,)), StagePlan(1, 1, (1,)))
    for activation, offered in ((0, True), (50, False)):
        profile = make_profile(*[(4, 8, activation, 40, 10)] * 2)
        problem = make_problem(profile, make_cluster(2), global_batch_size=16, micro_batch_size=1)
        ahead = problem.make_plan(stages, 1, "K=8,1", "test")
        last = describe_moves(problem, ahead, problem.simulate(ahead))[-1]
        held = ", and hold up to 60 B on a device where this plan holds 120 B"
        assert last.startswith("with schedule dapple-a these stages would take 51.000 s, as long" + held) is offered
