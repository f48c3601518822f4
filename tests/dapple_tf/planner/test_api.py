"""``dapple.plan``: invalid arguments, advice where nothing fits, and the planners that need no search."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

import dapple_tf as dapple
from dapple_tf.errors import PlanError, ScheduleError
from dapple_tf.planner.api import make_problem, predict_plan, run_planner
from dapple_tf.planner.best import least_plan_seconds
from dapple_tf.planner.explain import describe_result
from dapple_tf.plans import Plan, StagePlan
from dapple_tf.profiler.cluster import Cluster, DeviceKind, Server
from dapple_tf.profiler.profile import Profile
from tests.dapple_tf.planner.builders import Case, cases, make_cluster, make_profile
from tests.graph_passes.builders import refused

# Of each layer: seconds, bytes sent, kept and trained of 4 samples. Fixed bytes of one: 4 x 10.
PROFILE = make_profile(*[(1, 2, 8, 40, 10)] * 4)
THREE = make_profile(*[(1, 2, 8, 40, 10)] * 3)
ONE_STAGE = "one stage per device: use planner 'best', 'gpipe' or 'even'"


def plan(profile: Profile = PROFILE, cluster: Cluster | None = None, batch: int = 8, **options: Any) -> Plan:
    return dapple.plan(profile, cluster or make_cluster(4), global_batch_size=batch, **options)


def test_a_sharded_optimizer_makes_room_where_memory_binds() -> None:
    """Of 40 bytes a layer (weight, gradient, two slots of 10) two replicas hold 30 each, or 40 without sharing."""
    layer = make_profile((1, 2, 8, 4, 10))
    cluster = make_cluster(2, memory=38)
    with refused(PlanError, "does not fit"):
        plan(layer, cluster)
    found = plan(layer, cluster, shard_optimizer=True)
    assert (found.replicas, found.shard_optimizer) == ((2,), True)
    assert 30 < found.predicted["peak_memory_bytes"][0] <= 38
    assert dapple.Plan.from_json(found.to_json()) == found
    assert "sharded optimizer" in found.headline


@pytest.mark.parametrize("planner", ["dapple", "best", "gpipe", "spp", "alpa-inter", "piper"])
def test_planners_that_search_find_stages_that_only_fit_with_a_sharded_optimizer(planner: str) -> None:
    """Two stages of two replicas each hold two layers: 60 bytes of weights, gradients and shared slots."""
    cluster = make_cluster(4, memory=76)
    found = plan(make_profile(*[(1, 2, 1, 1, 10)] * 4), cluster, planner=planner, shard_optimizer=True)
    assert max(found.predicted["peak_memory_bytes"]) <= 76


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"planner": "bets"},
            r"no planner is called 'bets' \(did you mean 'best'\?\); there are best, dapple, dp, gpipe, pipedream",
        ),
        ({"planner": "x"}, "no planner is called 'x'; there are best, dapple, dp, gpipe, pipedream"),
        ({"planner": "best", "stages": 2}, "planner 'best' has no option 'stages'; it has chunks"),
        ({"planner": "gpipe", "stage": 2}, "planner 'gpipe' has no option 'stage'; it has stages"),
        ({"micro_batch_size": 3}, "micro_batch_size=3 does not divide global_batch_size=8: use 1 or 2 or 4"),
        ({"micro_batch_size": 0}, "micro_batch_size=0 does not divide global_batch_size=8"),
        ({"batch": 0}, "global_batch_size is 0; it must be from 1 to 1000000000000"),
        ({"batch": 10**30}, "it must be from 1 to 1000000000000"),
        ({"optimizer_slots": -1}, "optimizer_slots is -1; it must be at least 0"),
        ({"planner": None}, "no planner is called None; there are best, dapple"),
        ({"planner": ["best"]}, r"no planner is called \['best'\] .*; there are best, dapple"),
        ({"schedule": None}, "schedule is None, not a string: give 'auto' or the name of a schedule"),
        ({"contention": None}, "contention is None, not True or False"),
        ({"recompute": [0]}, r"recompute is \[0\], not True or False"),
        ({"optimizer_slots": "2"}, "optimizer_slots is '2', not a finite number of at least 0"),
        ({"optimizer_slots": math.nan}, "optimizer_slots is nan, not a finite number of at least 0"),
        ({"planner": "gpipe", "stages": "2"}, "stages is '2', not a whole number of at least 1"),
        ({"planner": "even", "chunks": 2}, "chunks is 2, not a list of whole numbers"),
        ({"planner": "pipedream", "flat": "no"}, "flat is 'no', not True or False"),
        ({"planner": "gpipe", "stages": 5}, "stages=5: 'net' on 4 devices can have at least 1 and at most 4 stages"),
        ({"planner": "gpipe", "stages": 0}, "stages=0: 'net' on 4 devices can have at least 1 and at most 4 stages"),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(**options)


def test_recompute_takes_the_words_of_the_command_line() -> None:
    assert plan(planner="dp", recompute="all") == plan(planner="dp", recompute=True)
    assert plan(planner="dp", recompute="none") == plan(planner="dp", recompute=False)


def test_gpipe_refuses_more_stages_than_blocks_of_layers() -> None:
    profile = make_profile((1, 1), (1, 1), (0, 0, 5), (1, 1), uncuttable=(1,))
    with pytest.raises(PlanError, match=r"stages=3: .* its 4 layers form 2 blocks that can be a stage"):
        plan(profile, planner="gpipe", stages=3)


def test_zb_h1_is_planned_and_limited_by_memory() -> None:
    """Three stages of one layer: 10 bytes of weights, 30 of gradients and slots, 4 bytes of stash for one sample."""
    profile = make_profile(*[(4, 8, 0, 16, 10)] * 3)
    options: dict[str, Any] = {"micro_batch_size": 1, "planner": "gpipe", "stages": 3}
    whole = plan(profile, make_cluster(3), schedule="zb-h1", **options)
    assert whole.schedule == "zb-h1"
    assert whole.predicted
    assert whole.predicted["step_seconds"] == 8 * 3 + 2 * (1 + 1 - 1)  # F = B = W = 1
    assert whole.predicted["peak_memory_bytes"] == [40 + 4 * 3] * 3
    tight = plan(profile, make_cluster(3, memory=40 + 4 * 2), schedule="zb-h1", **options)
    assert tight.schedule == "zb-h1:D=2"
    assert tight.predicted
    assert tight.predicted["peak_memory_bytes"] == [40 + 4 * 2] * 3
    with pytest.raises(PlanError, match=r"planner .gpipe. has no plan that fits|does not fit"):
        plan(profile, make_cluster(3, memory=42), schedule="zb-h1", **options)


def test_a_schedule_given_as_text_is_planned_for_its_number_of_stages() -> None:
    text = "0F0 0F1 0B0 0B1; 1F0 1B0 1F1 1B1"
    profile = make_profile((1, 2), (1, 2), (1, 2))
    found = plan(profile, make_cluster(3), micro_batch_size=4, schedule=text)
    assert (len(found.stages), found.micro_batches, found.schedule) == (2, 2, text)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ScheduleError, match="no schedule is called 'dapple'"):
        plan(schedule="dapple")


# --- nothing fits


def test_where_dp_does_not_fit_the_error_names_planner_best() -> None:
    profile = make_profile(*[(1, 2, 1, 4, 100)] * 4)
    cluster = make_cluster(4, memory=420)  # one layer's 400 bytes a device
    with pytest.raises(
        PlanError, match=r"planner 'dp' has no plan that fits the devices' memory .*: use planner 'best'"
    ):
        plan(profile, cluster, planner="dp")
    found = plan(profile, cluster)
    assert found.replicas == (1, 1, 1, 1)
    assert all(dapple.simulate(found, profile, cluster).fits)


def test_where_samples_are_too_few_memory_is_not_blamed() -> None:
    message = (
        "planner 'dp' has no plan on 4 devices with micro-batches of at most 2 samples, in which each replica gets at "
        "least one sample: use planner 'best', which has one"
    )
    with pytest.raises(PlanError, match=f"^{message}$"):
        plan(planner="dp", micro_batch_size=2)
    row = dapple.compare(PROFILE, make_cluster(4), global_batch_size=8, micro_batch_size=2, planners=["dp"]).rows[0]
    assert row.reason == message.partition("'dp' ")[2].partition(": use")[0]


def test_on_unequal_devices_planner_best_is_named_where_it_has_a_plan() -> None:
    kinds = {"V100": DeviceKind(420.0, 1.0), "T4": DeviceKind(420.0, 0.5)}  # one layer's 400 bytes a device
    servers = (Server.of_kinds("a", [("V100", 2)]), Server.of_kinds("b", [("T4", 2)]))
    cluster = replace(make_cluster(1), servers=servers, kinds=kinds)
    profile = make_profile(*[(1, 2, 1, 4, 100)] * 4)
    with pytest.raises(
        PlanError, match=r"planner 'dp' has no plan that fits the devices' memory .* use planner 'best'"
    ):
        plan(profile, cluster, planner="dp")
    assert plan(profile, cluster).replicas == (1, 1, 1, 1)


@pytest.mark.parametrize("name", ["plan", "profile", "cluster"])
def test_simulate_names_an_argument_that_is_a_path(name: str) -> None:
    given: dict[str, Any] = {"plan": plan(planner="dp"), "profile": PROFILE, "cluster": make_cluster(4)}
    message = rf"{name} is a str: read a file with dapple.{name.capitalize()}.load\(path\)"
    with pytest.raises(PlanError, match=message):
        dapple.simulate(*{**given, name: "file.json"}.values())


def test_planners_that_use_all_devices_refuse_more_devices_than_samples() -> None:
    one = make_profile((1, 2, 8, 4, 10))
    for planner in ("dp", "dapple", "pipedream", "spp"):
        with pytest.raises(
            PlanError, match=rf"'{planner}' has no plan .* each replica gets at least one sample: use planner 'best'"
        ):
            plan(one, make_cluster(2), planner=planner, micro_batch_size=1)
    assert plan(one, make_cluster(2), micro_batch_size=1).replicas == (1,)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("K=0,1", "K_0 = 0 is not between 1 and M = 4"),
        ("K=5,1", "K_0 = 5 is not between 1 and M = 4"),
        ("K=1,2", "the schedule deadlocks; blocked actions are marked:\nstage 0: 0F0   0B0!"),
    ],
)
@pytest.mark.parametrize("planner", ["best", "gpipe"])
def test_impossible_warm_ups_are_not_reported_as_a_lack_of_memory(planner: str, schedule: str, said: str) -> None:
    with refused(ScheduleError, said):
        plan(cluster=make_cluster(2), batch=16, micro_batch_size=4, planner=planner, schedule=schedule)


@pytest.mark.parametrize(
    ("schedule", "options", "error", "said"),
    [
        (
            "interleaved-1f1b:v=5",
            {},
            PlanError,
            "schedule 'interleaved-1f1b:v=5' needs at least 5 stages, but the 4 layers of 'net' form 4 blocks",
        ),
        (
            "0F0 1F0 2F0 3F0 4F0 4B0 3B0 2B0 1B0 0B0",
            {"micro_batch_size": 16},
            PlanError,
            "needs at least 5 stages, but the 4 layers of 'net' form 4 blocks",
        ),
        (
            "interleaved-1f1b:v=2",
            {"planner": "gpipe", "stages": 3},
            ScheduleError,
            "gives each worker 2 stages, but there are 3 in all: ask for a multiple of 2",
        ),
        (
            "interleaved-1f1b:v=2",
            {"planner": "gpipe", "stages": 6},
            PlanError,
            "stages=6: 'net' on 2 devices can have at least 1 and at most 4 stages",
        ),
        *(
            ("looped-bfs", {"planner": planner}, PlanError, f"planner '{planner}' makes plans of {ONE_STAGE}")
            for planner in ("dapple", "autopipe", "bapipe", "pipedream", "spp")
        ),
        ("looped-bfs", {"planner": "dp"}, PlanError, "schedule 'looped-bfs' runs several stages on a device"),
        ("interleaved-1f1b:D=2", {}, ScheduleError, "interleaved-1f1b has no option D"),
        (
            "0F0 3F0 3B0 0B0; 1F0 1B0; 2F0 2B0",
            {"micro_batch_size": 16},
            PlanError,
            "is for 4 stages on 3 devices, but the cluster has 2 devices",
        ),
        (
            "0F0+ 0F1 0B0 0B1; 1F0 1F1 1B0 1B1",
            {},
            ScheduleError,
            "planners do not simulate schedules in which results travel together (0F0+): leave out the '+'",
        ),
        ("0F0 1F0 1B0 0B0", {}, ScheduleError, "the schedule's text is for 2 stages x 1 micro-batch,"),
        ("auto", {"chunks": [1, 2]}, PlanError, "chunks=[1, 2]: one stage per device is always considered, so give"),
    ],
)
def test_requests_for_several_stages_per_device_that_cannot_be_met_are_refused(
    schedule: str, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with refused(error, said):
        plan(cluster=make_cluster(2), batch=16, schedule=schedule, **{"micro_batch_size": 4, **options})


def test_gpipe_makes_even_stages_that_share_devices() -> None:
    found = plan(cluster=make_cluster(3), planner="gpipe", micro_batch_size=2, schedule="interleaved-1f1b:v=2")
    assert [(s.first_layer, s.last_layer, s.devices) for s in found.stages] == [
        (0, 0, (0,)),
        (1, 1, (1,)),
        (2, 2, (0,)),
        (3, 3, (1,)),
    ]
    one = plan(planner="gpipe", micro_batch_size=2, schedule="looped-bfs:v=2", stages=2)
    assert [s.devices for s in one.stages] == [(0,), (0,)]


def test_warm_ups_for_more_stages_than_devices_are_refused() -> None:
    with refused(PlanError, "schedule 'K=3,2,1' is for 3 stages, but the cluster has 2 devices"):
        plan(cluster=make_cluster(2), batch=16, micro_batch_size=4, schedule="K=3,2,1")
    assert len(plan(cluster=make_cluster(3), batch=16, micro_batch_size=4, schedule="K=3,2,1").stages) == 3


def test_a_schedule_that_stashes_too_much_is_refused_with_advice() -> None:
    cluster = make_cluster(4, memory=80)
    with pytest.raises(PlanError, match=r"under schedule 'gpipe': use schedule 'auto'$"):
        plan(cluster=cluster, batch=16, micro_batch_size=1, schedule="gpipe")
    assert plan(cluster=cluster, batch=16, micro_batch_size=1).schedule != "gpipe"


def test_best_recomputes_where_a_schedule_fits_with_recompute_only() -> None:
    profile, cluster = make_profile(*[(1, 2, 1, 40, 0)] * 2), make_cluster(1, memory=90)
    with pytest.raises(PlanError, match=r"planner 'dp' has no plan that fits .* use planner 'best', which has one"):
        plan(profile, cluster, micro_batch_size=4, schedule="gpipe", planner="dp")
    # One stage of two layers that keep 40 each and work on 2: with recompute 80 + 2, and nothing more for a second.
    found = plan(profile, cluster, micro_batch_size=4, schedule="gpipe")
    assert (found.micro_batches, found.recompute) == (2, True)
    assert all(dapple.simulate(found, profile, cluster).fits)
    kept = plan(profile, cluster, micro_batch_size=4)
    assert (kept.schedule, kept.recompute) == ("dapple-a", False)


def test_recompute_of_single_stages_is_chosen_where_memory_is_short() -> None:
    """Only the first layer keeps too much for a second micro-batch in flight; its forward is short."""
    profile = make_profile((1, 26, 1, 80, 100), (9, 18, 1, 4, 100))
    cluster = make_cluster(1, 1, memory=490, between=(1, 0))  # 400 bytes of weights, gradients and slots of one layer
    problem = make_problem(profile, cluster, global_batch_size=32, micro_batch_size=4)
    found = run_planner(problem, "best")
    whole = run_planner(replace(problem, recompute=True), "best", chunks=())
    assert found.chosen.recompute == (0,)
    assert found.chosen.seconds < whole.chosen.seconds
    assert least_plan_seconds(problem) < found.chosen.seconds
    planned, timeline = predict_plan(problem, found.chosen, "best")
    assert planned.recompute == (0,)
    assert all(timeline.fits)
    assert "recompute was chosen, not asked for" in describe_result(
        problem, replace(found, runners_up=()), (planned, timeline), []
    )


def test_a_refusal_does_not_search() -> None:
    """A search for a plan, and one for each remedy, would take minutes on 256 devices."""
    profile = make_profile(*[(1, 2, 1, 4, 100)] * 300)
    for planner in ("best", "dapple", "dp", "gpipe"):
        with pytest.raises(
            PlanError, match=r"'net' does not fit 256 devices of 405 B: .* It would fit with 300 devices$"
        ):
            plan(profile, make_cluster(*[8] * 32, memory=405), batch=512, planner=planner)


def test_an_error_of_memory_names_bytes_and_layers() -> None:
    with pytest.raises(PlanError) as caught:
        plan(cluster=make_cluster(4, memory=100), micro_batch_size=8)
    # A layer's 40 fixed bytes, 80 kept and a working set of 32 (input and output) of 8 samples.
    assert str(caught.value).startswith(
        "'net' does not fit 4 devices of 100 B: with stages balanced by memory and one micro-batch of 8 samples in "
        "flight, the stage of layers 3 to 3 (layer3 .. layer3) needs 152 B and lacks 52 B. Re-computation would not "
        "help: it saves nothing of a single micro-batch in flight. It would fit with "
    )


def test_a_refusal_does_not_rule_out_what_fits_with_some_layers_recomputed() -> None:
    """Kept layers between them make runs of re-computed ones short, so less is computed again at a time."""
    profile, cluster = make_profile(*[(1, 2, 0, 100, 0)] * 5), make_cluster(1, memory=350)
    by_hand = Plan("net", "by hand", 4, 4, 1, "dapple-a", (0, 2, 4), (StagePlan(0, 4, (0,)),))
    assert all(dapple.simulate(by_hand, profile, cluster).fits)
    with pytest.raises(PlanError, match=r"lacks 150 B\. Re-computation of whole stages would not help: "):
        plan(profile, cluster, batch=4, micro_batch_size=4)


def follow(advice: str, profile: Profile, cluster: Cluster, options: dict[str, Any]) -> Plan:
    """Return the plan after following ``advice``."""
    options = dict(options)
    if found := re.search(r"micro-batches of (\d+) samples", advice):
        options["micro_batch_size"] = int(found[1])
    if found := re.search(r"(\d+) devices", advice):
        cluster = make_cluster(int(found[1]), memory=cluster.device_memory)
    if "no recompute" in advice:
        options["recompute"] = False
    return plan(profile, cluster, **options)


@pytest.mark.parametrize(
    ("profile", "devices", "memory", "options", "remedies"),
    [
        # Seven samples would fit as well, but do not divide 8.
        (PROFILE, 4, 145, {"micro_batch_size": 8}, ["micro-batches of 4 samples", "7 devices"]),
        (PROFILE, 2, 170, {"micro_batch_size": 4}, ["micro-batches of 2 samples", "4 devices"]),
        (PROFILE, 2, 80, {"micro_batch_size": 8}, ["15 devices", "micro-batches of 2 samples and 4 devices"]),
        # 40 fixed, 80 kept or made again, 32 worked on, and 16 that enter: at least 160 in all but the first stage. On
        # two workers of two devices each, four layers in four stages would fit; so would half of it on a device.
        (
            THREE,
            3,
            155,
            {"micro_batch_size": 8, "recompute": True},
            ["micro-batches of 4 samples", "5 devices", "no recompute"],
        ),
        (PROFILE, 2, 10, {}, []),
    ],
)
def test_following_the_advice_gives_a_plan_that_fits(
    profile: Profile, devices: int, memory: float, options: dict[str, Any], remedies: list[str]
) -> None:
    cluster = make_cluster(devices, memory=memory)
    with pytest.raises(PlanError) as caught:
        plan(profile, cluster, **options)
    text = str(caught.value)
    found = text.partition("It would fit with ")[2]
    advice = found.split(", or with ") if found else []
    if not remedies:
        assert text.endswith(": divide the model's largest layers into smaller ones")
    assert advice == remedies
    for one in advice:
        planned = follow(one, profile, cluster, options)
        count = 1 + max(device for stage in planned.stages for device in stage.devices)
        assert all(dapple.simulate(planned, profile, make_cluster(count, memory=memory)).fits), one


# --- planners without a search


def test_dp_equals_a_calculation_by_hand_with_and_without_overlap() -> None:
    profile = make_profile((1, 2, 0, 0, 8), (1, 2, 0, 0, 8), batch_size=4)
    cluster = make_cluster(2, inside=(2, 0))
    options = {"cluster": cluster, "batch": 4, "micro_batch_size": 4, "planner": "dp"}
    # Half the batch each: 1 + 2 s; 16 bytes at 2 x 1/2 / 2 s a byte: 8 s.
    plain, overlapped = plan(profile, **options), plan(profile, overlap=True, **options)
    assert plain.replicas == (2,)
    assert plain.predicted["step_seconds"] == 1 + 2 + 8
    # The later layer's 4 s start after 1 s of backward, the earlier's follow: 1 + 1 + 8.
    assert overlapped.predicted["step_seconds"] == 10
    assert (plain.overlap, overlapped.overlap) == (False, True)


def test_gpipe_is_an_even_straight_pipeline_with_all_forwards_first() -> None:
    profile = make_profile((1, 2), (1, 2), (2, 4), (4, 8))
    found = plan(profile, make_cluster(3), planner="gpipe", micro_batch_size=2)
    assert [(s.first_layer, s.last_layer, s.devices) for s in found.stages] == [
        (0, 1, (0,)),
        (2, 2, (1,)),
        (3, 3, (2,)),
    ]
    assert found.schedule == "gpipe"
    # Forward 1 s and 1 s to the last stage, whose 2 + 4 s are the longest, four times; then 2 s and 2 s back.
    assert found.predicted["step_seconds"] == 1 + 1 + 4 * (2 + 4) + 2 + 2
    two = plan(profile, make_cluster(3), planner="gpipe", stages=2, schedule="dapple-a")
    assert [s.last_layer for s in two.stages] == [2, 3]
    assert two.schedule == "dapple-a"


@given(cases(4))
def test_the_prediction_of_every_planner_equals_the_simulation_of_its_plan(case: Case) -> None:
    profile, cluster, batch, options = case
    for planner in ("autopipe", "bapipe", "best", "dapple", "dp", "gpipe", "pipedream", "spp"):
        try:
            found = dapple.plan(profile, cluster, global_batch_size=batch, planner=planner, **options)
        except PlanError:  # nothing fits
            continue
        timeline = dapple.simulate(replace(found, predicted=None), profile, cluster)
        assert all(timeline.fits)
        assert found.predicted["step_seconds"] == timeline.step_seconds
        assert found.predicted["peak_memory_bytes"] == list(timeline.peak_memory_bytes)
        assert found.planner == planner
        assert max(found.replicas) <= found.micro_batch_size


def test_a_model_whose_layers_cost_nothing_is_planned() -> None:
    found = plan(make_profile((0, 0), (0, 0)))
    assert found.predicted["step_seconds"] == 0


def test_micro_batch_sizes_are_the_divisors_of_the_global_batch() -> None:
    assert make_problem(PROFILE, make_cluster(1), global_batch_size=12).micro_batch_sizes == (1, 2, 3, 4, 6, 12)
