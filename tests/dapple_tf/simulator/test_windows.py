"""Simulated asynchronous windows: times by hand, and the same as synchronous steps where these are the same."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.errors import ScheduleError, TraceError
from dapple_tf.graph_passes.schedules.schedule import Action
from dapple_tf.plans import Plan
from dapple_tf.profiler.cluster import Cluster, Link, Server
from dapple_tf.simulator.execution import execute
from dapple_tf.simulator.simulate import simulate
from dapple_tf.simulator.simulated_window import window_events
from dapple_tf.simulator.window_costs import uniform_costs, window_costs
from dapple_tf.simulator.window_execution import WindowExecution, execute_window
from dapple_tf.timeline.critical_path import find_critical_path, sum_by_kind
from dapple_tf.timeline.figures import WindowPhases, find_phases
from dapple_tf.timeline.stage_costs import StageCosts
from dapple_tf.timeline.trace_file import read_recording
from dapple_tf.window_plan import WindowPlan
from tests.dapple_tf.simulator.builders import (
    cost,
    make_cluster,
    make_plan,
    make_profile,
    order_of,
    seconds,
    stage_costs,
)

PROFILE = make_profile((1, 2), (2, 4))


def plan_window(window: WindowPlan, *stages: tuple[int, int, tuple[int, ...]], size: int = 4) -> Plan:
    """A plan of windows whose minibatches (or micro-batches) have ``size`` samples."""
    replicas = [len(devices) for _, _, devices in stages]
    count = window.versions(replicas).window.size
    name = "K=" + ",".join(str(min(k, count)) for k in window.warm_up(replicas))
    sizes = {"global_batch_size": size * count, "micro_batch_size": size, "micro_batches": count}
    return make_plan(*stages, **sizes, schedule=name, window=window)


def run(
    window: WindowPlan, replicas: tuple[int, ...], costs: tuple[StageCosts, ...], update: float = 0.0
) -> WindowExecution:
    """A window on stages of these costs; every pair of replicas has a route of the same seconds."""
    return execute_window(window.versions(replicas), uniform_costs(costs, replicas, (update,) * len(costs)))


def places(replicas: tuple[int, ...]) -> list[tuple[int, int, str]]:
    devices = itertools.count()
    return [(s, r, f"device:{next(devices)}") for s, count in enumerate(replicas) for r in range(count)]


def spans(execution: WindowExecution, stage: int, replica: int) -> dict[str, tuple[float, float]]:
    """The times of a replica's actions, by their text."""
    return {
        str(action): (timed.start, timed.end)
        for (action, of), timed in execution.actions.items()
        if (action.stage, of) == (stage, replica)
    }


def test_a_window_simulated_by_hand() -> None:
    # Minibatches of four samples: F = 1 and 2, B = 2 and 4; 8 bytes over 4 B/s after 0.5 s: 2.5 s each way. K = 2, 1.
    timeline = simulate(plan_window(WindowPlan(3), (0, 0, (0,)), (1, 1, (1,))), PROFILE, make_cluster())
    times = {str(e): (e.start, e.end) for e in timeline.events}
    assert times == {
        "0F0 v0": (0, 1),
        "0F1 v0": (1, 2),
        "1F0 v0": (3.5, 5.5),
        "1B0 v0": (5.5, 9.5),
        "1F1 v1": (9.5, 11.5),
        "1B1 v1": (11.5, 15.5),
        "0B0 v0": (12, 14),
        "0F2 v1": (14, 15),
        "1F2 v2": (17.5, 19.5),
        "0B1 v0": (18, 20),
        "1B2 v2": (19.5, 23.5),
        "0B2 v1": (26, 28),
    }
    assert [(str(t), t.start, t.end) for t in timeline.transfers if t.source == 0] == [
        ("0>1 F0", 1, 3.5),
        ("0>1 F1", 3.5, 6),
        ("0>1 F2", 15, 17.5),
    ]
    # The three last ends on the last stage are 9.5, 15.5 and 23.5.
    assert timeline.phases == WindowPhases(9.5, 7, 4.5)
    assert timeline.step_seconds == 28
    assert timeline.speedup == pytest.approx(3 * 9 / 28)
    assert timeline.utilisation == pytest.approx((9 / 28, 18 / 28))
    assert "start-up 9.5 s (until the last stage's first backward ends), then 7 s a minibatch, drain 4.5 s" in str(
        timeline
    )


def test_versions_stashes_and_the_working_set_are_its_memory() -> None:
    timeline = simulate(plan_window(WindowPlan(3), (0, 0, (0,)), (1, 1, (1,))), PROFILE, make_cluster())
    # Weights, gradients and two slots of 10 bytes. Stage 0 keeps versions 0 and 1, and stashes of 6 bytes of two
    # minibatches; stage 1 uses the weights themselves. Gradients of 8 bytes go out, and at stage 1 come in too.
    assert timeline.peak_memory_bytes == (40 + 2 * 10 + 2 * 6 + 8, 40 + 6 + 16)
    assert timeline.memory(1) == (
        (0, 3.5, 9.5, 9.5, 15.5, 17.5, 23.5),
        (56, 62, 56, 62, 56, 62, 56),
    )
    double = simulate(
        plan_window(WindowPlan(3, "2bw"), (0, 0, (0,)), (1, 1, (1,))), PROFILE, make_cluster(), optimizer_slots=0
    )
    assert double.peak_memory_bytes == (20 + 2 * 10 + 2 * 6 + 8, 20 + 2 * 10 + 6 + 16)


def test_replicas_in_turn_wait_for_the_update_of_their_group() -> None:
    costs = cost(1, 2, allreduce_seconds=0.5), cost(1, 1)
    found = run(WindowPlan(6), (2, 1), costs, update=0.25)
    assert spans(found, 0, 0) == {
        "0F0": (0, 1),
        "0F2": (1, 2),
        "0B0": (3, 5),
        "0F4": (8, 9),  # B1 ends on the other replica at 7.25, then 0.5 + 0.25 s
        "0B2": (9, 11),
        "0B4": (12, 14),
    }
    assert spans(found, 0, 1) == {
        "0F1": (0, 1),
        "0F3": (1, 2),
        "0B1": (5.25, 7.25),
        "0F5": (8, 9),
        "0B3": (9.75, 11.75),
        "0B5": (14.25, 16.25),
    }
    assert spans(found, 1, 0)["1F4"] == (10, 11)
    assert {key: (t.start, t.end) for key, t in found.reductions.items() if key[0] == 0} == {
        (0, 0): (7.25, 7.75),
        (0, 1): (11.75, 12.25),
        (0, 2): (16.25, 16.75),
    }
    assert found.seconds == 17
    events = window_events(found, places((2, 1)))
    # Backwards of the last stage end at 3, 5.25, 7.5, 9.75, 12 and 14.25: two rounds of two replicas.
    assert find_phases(events, found.window) == WindowPhases(3, 2.25, 2.75)
    reduced = [(e.replica, e.micro_batch, e.start) for e in events.stage_events if e.kind == "allreduce"]
    assert reduced[:2] == [(0, 1, 7.25), (1, 1, 7.25)]
    assert [str(e) for e in events.stage_events if e.kind == "update"][:1] == ["update 0 of stage 1"]


def test_the_newest_weights_are_waited_for_by_backwards_too() -> None:
    costs = cost(1, 1), cost(1, 1)
    late = run(WindowPlan(2, "latest"), (1, 1), costs, update=5)
    # B0 of stage 0 ends at 4, its update at 9; F1 of stage 1 waits for the update from 3 to 8, its B1 ends at 10.
    assert spans(late, 0, 0)["0B1"] == (10, 11)
    slow = run(WindowPlan(2, "latest"), (1, 1), (cost(1, 1), cost(0.25, 0.25)), update=5)
    assert spans(slow, 0, 0) == {"0F0": (0, 1), "0F1": (1, 2), "0B0": (2, 3), "0B1": (8, 9)}
    stashing = run(WindowPlan(2), (1, 1), (cost(1, 1), cost(0.25, 0)), update=0.25)
    assert spans(stashing, 0, 0)["0B1"] == (3, 4)  # the update of B0 runs beside it, from 3 to 3.25


@pytest.mark.parametrize(("replicas", "starts"), [((2, 1), [1, 3]), ((2, 2), [1, 1]), ((1, 1), [1, 3])])
def test_a_replica_receives_one_thing_at_a_time(replicas: tuple[int, ...], starts: list[float]) -> None:
    found = run(WindowPlan(2), replicas, (cost(1, 1, 2), cost(1, 1)))
    assert [found.transfers[Action(0, "F", m)].start for m in (0, 1)] == starts


def test_servers_share_their_interface_and_pairs_have_links_of_their_own() -> None:
    plan = plan_window(WindowPlan(4), (0, 0, (0, 1)), (1, 1, (2, 3)))
    servers = Server("a", 2), Server("b", 2)
    shared = Cluster(servers, 1e6, Link(8, 0.5), Link(4, 0.25))
    routes = window_costs(plan, PROFILE, shared).routes
    assert {forward.seconds for forward, _ in routes.values()} == {0.25 + 8 / 4}
    assert len({forward.channels for forward, _ in routes.values()}) == 1
    timeline = simulate(plan, PROFILE, shared)
    forward = [t for t in timeline.transfers if t.source == 0]
    assert [(t.start, t.end) for t in forward[:2]] == [(1, 3.25), (3.25, 5.5)]
    inside = window_costs(plan, PROFILE, make_cluster(4)).routes
    assert not set(inside[0, 0, 0][0].channels) & set(inside[0, 1, 1][0].channels)
    own = Cluster(servers, 1e6, Link(8, 0.5), Link(4, 0.25), {("a", "b"): Link(16, 0)})
    linked = window_costs(plan, PROFILE, own).routes[0, 1, 1][1]
    assert linked.seconds == 0.5
    assert linked.channels == ("link of servers 0 and 1",)


def test_the_gradients_of_a_group_are_reduced_whole() -> None:
    timeline = simulate(plan_window(WindowPlan(4), (0, 0, (0,)), (1, 1, (1, 2))), PROFILE, make_cluster(3))
    assert [cost.allreduce_seconds for cost in timeline.costs] == [0, 2 * 0.5 + 2 * 1 / 2 * 10 / 4]
    assert [cost.forward_seconds for cost in timeline.costs] == [1, 2]  # replicas compute whole minibatches
    reduced = [e for e in timeline.stage_events if e.kind == "allreduce"]
    assert [(e.stage, e.replica, e.micro_batch) for e in reduced] == [(1, 0, 1), (1, 1, 1), (1, 0, 3), (1, 1, 3)]


@given(st.data())
def test_a_pipeline_whose_updates_take_no_time_runs_as_one_that_never_updates(data: st.DataObject) -> None:
    stages, minibatches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    depth = data.draw(st.none() | st.integers(1, 8))
    costs = data.draw(stage_costs(stages))
    window = WindowPlan(minibatches, data.draw(st.sampled_from(["stash", "vertical-sync", "latest"])), depth)
    found = run(window, (1,) * stages, costs)
    warm = ",".join(str(min(k, minibatches)) for k in window.warm_up((1,) * stages))
    expected = execute(order_of(f"K={warm}", stages, minibatches), costs)
    for (action, _), timed in found.actions.items():
        ends = expected.times.end_forward if action.kind == "F" else expected.times.end_backward
        assert timed.end == pytest.approx(ends[action.stage, action.micro_batch])


def test_one_minibatch_of_2bw_is_a_synchronous_step() -> None:
    stages = (0, 0, (0, 1)), (1, 1, (2,))
    window = simulate(plan_window(WindowPlan(1, "2bw", micro_batches=5), *stages), PROFILE, make_cluster(3))
    sizes = {"global_batch_size": 20, "micro_batch_size": 4, "micro_batches": 5}
    step = simulate(make_plan(*stages, **sizes, schedule="dapple-a"), PROFILE, make_cluster(3))
    assert window.step_seconds == pytest.approx(step.step_seconds)
    assert [t.start for t in window.transfers] == pytest.approx([t.start for t in step.transfers])


# With contention: as synchronous steps, whose engine has tests of its own.


def servers_of_two(count: int) -> Cluster:
    return Cluster(tuple(Server(name, 2) for name in "abc"[:count]), 1e6, Link(16, 0.5), Link(4, 0.25))


@given(st.permutations(range(6)), st.lists(st.integers(0, 4), min_size=8, max_size=8), st.integers(1, 6))
def test_a_window_shares_interfaces_as_a_step_of_the_same_order(
    devices: list[int], n: list[int], minibatches: int
) -> None:
    profile = make_profile(*zip(n[:4], n[4:], strict=True))
    stages = tuple((i, i, (device,)) for i, device in enumerate(devices[:4]))
    plan = plan_window(WindowPlan(minibatches), *stages)
    sizes = {"global_batch_size": 4 * minibatches, "micro_batch_size": 4, "micro_batches": minibatches}
    step = make_plan(*stages, **sizes, schedule=plan.schedule)
    found, wanted = (simulate(p, profile, servers_of_two(3)) for p in (plan, step))
    ends = {event.action: event.end for event in wanted.events}
    for event in found.events:
        assert event.end == pytest.approx(ends[event.action], rel=1e-9)
    alone = simulate(plan, profile, servers_of_two(3), contention=False)
    assert alone.step_seconds <= found.step_seconds * (1 + 1e-9)


def test_rings_of_a_window_share_interfaces_with_transfers_by_hand() -> None:
    # 2BW, one minibatch of two micro-batches: a step. Stages on devices 0, 2 and 1, 3 of servers a and b: transfers
    # stay in their servers, and both rings use both interfaces.
    stages = (0, 0, (0, 2)), (1, 1, (1, 3))
    window = plan_window(WindowPlan(1, "2bw", micro_batches=2), *stages)
    step = make_plan(*stages, global_batch_size=8, micro_batch_size=4, micro_batches=2, schedule="dapple-a")
    found, wanted = (simulate(p, PROFILE, servers_of_two(2)) for p in (window, step))
    alone = simulate(window, PROFILE, servers_of_two(2), contention=False)
    # 10 bytes at 4 a second after 2 x 0.25 s: 3 s alone. Stage 1's last gradients are there 0.5 + 4 / 16 + 1 s sooner,
    # so its bytes move alone for 1.75 s and share for the 0.75 s left, for 1.5 s; then stage 0's 1.75 s left alone.
    ends = {e.stage: (e.start, e.end) for e in found.stage_events if e.kind == "allreduce"}
    start = ends[0][0]
    assert ends == {0: (start, start + 3.75), 1: (start - 1.75, start + 2)}
    assert {e.stage: (e.start, e.end) for e in wanted.stage_events if e.kind == "allreduce"} == ends
    assert found.step_seconds == wanted.step_seconds == alone.step_seconds + 0.75


@given(st.data())
def test_the_critical_path_of_a_window_has_no_gaps(data: st.DataObject) -> None:
    replicas = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 2, 1), (3, 1), (2, 2), (1, 3)]))
    policies = ["stash", "2bw", "latest"] + ["vertical-sync"] * (len(set(replicas)) == 1)
    window = WindowPlan(6, data.draw(st.sampled_from(policies)))
    whole = st.integers(0, 6).map(float)
    costs = tuple(
        cost(data.draw(whole), data.draw(whole), data.draw(whole), allreduce_seconds=data.draw(whole) * (r > 1))
        for r in replicas
    )
    found = run(window, replicas, costs, update=data.draw(whole))
    if found.seconds:
        path = find_critical_path(window_events(found, places(replicas)))
        assert sum_by_kind(path)["waiting"] == 0
        assert sum(part.seconds for part in path) == pytest.approx(found.seconds)


def test_the_steady_state_is_that_of_the_slowest_stage() -> None:
    first = run(WindowPlan(64), (1, 1, 1), (cost(2, 4), cost(1, 1), cost(1, 2)))
    last = run(WindowPlan(64), (1, 1, 1), (cost(1, 1), cost(1, 2), cost(2, 4)))
    split = run(WindowPlan(64), (2, 1), (cost(2, 4), cost(1, 1)))
    for found, expected in ((first, 6), (last, 6), (split, 3)):
        replicas = found.window.replicas
        phases = find_phases(window_events(found, places(replicas)), found.window)
        assert phases.minibatch_seconds == pytest.approx(expected)


def test_the_figures_of_a_window_are_in_its_json_and_its_replicas_in_its_files(tmp_path: Path) -> None:
    plan = plan_window(WindowPlan(4), (0, 0, (0, 1)), (1, 1, (2,)))
    timeline = simulate(plan, PROFILE, make_cluster(3))
    data: dict[str, Any] = timeline.to_json()
    assert {"startup_seconds", "minibatch_seconds", "drain_seconds"} <= data.keys()
    assert data["stages"][0]["actions"] == "0F0 0F2 0B0 0B2"
    assert data["stages"][0]["other_replicas"] == ["0F1 0F3 0B1 0B3"]
    assert "other_replicas" not in data["stages"][1]
    timeline.save(tmp_path / "window.json")
    saved = json.loads((tmp_path / "window.json").read_text())
    names = {row["args"]["name"] for row in saved["traceEvents"] if row["name"] == "thread_name"}
    assert {"stage 0, replica 0 (device:0)", "stage 0, replica 1 (device:1)"} <= names
    assert any(row["name"] == "1F3 v3" for row in saved["traceEvents"])
    timeline.save(tmp_path / "window.png")
    timeline.save(tmp_path / "window.html")
    assert "0F1 v0" in (tmp_path / "window.html").read_text()


def test_a_plan_of_a_window_is_read_again_where_a_later_stage_runs_further_ahead(tmp_path: Path) -> None:
    plan = plan_window(WindowPlan(8), (0, 0, (0, 1, 2, 3)), (1, 1, (4,)), (2, 2, (5,)), (3, 3, (6,)))
    assert plan.versions.window.warm_up == (2, 3, 2, 1)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    layers = make_profile((1, 2), (1, 2), (1, 2), (1, 2))
    assert simulate(plan, layers, make_cluster(7)).step_seconds > 0


def test_costs_of_other_stages_are_refused() -> None:
    with pytest.raises(ScheduleError, match="the window has 2 stages, but there are costs of 1 stage"):
        execute_window(WindowPlan(2).versions((1, 1)), uniform_costs((cost(),), (1,), (0.0,)))


@given(seconds)
def test_updates_come_one_after_the_other(update: float) -> None:
    found = run(WindowPlan(5), (1, 1), (cost(1, 1), cost(1, 1)), update=update)
    for stage in (0, 1):
        ends = [0.0, *(found.updates[stage, number].end for number in range(5))]
        starts = [found.updates[stage, number].start for number in range(5)]
        assert all(start >= end for start, end in zip(starts, ends, strict=False))


def test_a_trace_of_a_window_is_read_as_it_was_saved(tmp_path: Path) -> None:
    timeline = simulate(plan_window(WindowPlan(4), (0, 0, (0,)), (1, 1, (1, 2))), PROFILE, make_cluster(3))
    timeline.save(tmp_path / "window.json")
    read = read_recording(tmp_path / "window.json").predicted
    assert read.timeline == timeline
    assert read.timeline.phases == timeline.phases
    assert [event.version for event in read.timeline.events] == [event.version for event in timeline.events]


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("window", {"minibatches": 3}, "minibatches=3 is no multiple of the 2 replicas of stage 1"),
        ("window", {"minibatches": 2}, "actions are not those of predicted.timeline.window: 8 differ"),
        ("window", {"minibatches": 10**6}, "has more than 1000000 micro-batches"),
        ("window", {"replicas": []}, "give a number from 1 on"),
        ("window", {"warm_up": [3, 0]}, "give a number from 1 on for each of 2 stages"),
        ("window", {"in_turn": 1}, "in_turn is 1, not true or false"),
        ("stage_events", {"micro_batch": 2}, r"stage_events\[0\].micro_batch is 2, not the last one of an update"),
    ],
)
def test_a_trace_whose_window_or_updates_are_wrong_is_refused(
    tmp_path: Path, part: str, change: dict[str, Any], message: str
) -> None:
    timeline = simulate(plan_window(WindowPlan(4), (0, 0, (0,)), (1, 1, (1, 2))), PROFILE, make_cluster(3))
    path = tmp_path / "window.json"
    timeline.save(path)
    data = json.loads(path.read_text())
    saved = data["dapple"]["predicted"]["timeline"][part]
    (saved if part == "window" else saved[0]).update(change)
    path.write_text(json.dumps(data))
    with pytest.raises(TraceError, match=message):
        read_recording(path)


def test_a_plan_says_how_its_window_is_cut() -> None:
    stages = (0, 0, (0,)), (1, 1, (1,))
    assert plan_window(WindowPlan(8), *stages).describe_micro_batches() == "8 minibatches of 4 samples"
    double = plan_window(WindowPlan(8, "2bw", micro_batches=3), *stages)
    assert double.describe_micro_batches() == "8 minibatches of 3 micro-batches of 4 samples"
