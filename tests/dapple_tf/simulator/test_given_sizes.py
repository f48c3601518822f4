"""Steps of micro-batches of given sizes: by hand, and the same as without given sizes where they are equal."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.schedule import Schedule
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec, parse_schedule
from dapple_tf.simulator.execution import Execution, execute
from dapple_tf.simulator.memory import memory_over_time, peak_bytes
from dapple_tf.simulator.order import encode, named_order
from dapple_tf.simulator.simulate import simulate
from dapple_tf.timeline.critical_path import sum_by_kind
from dapple_tf.timeline.events import Transfer
from dapple_tf.timeline.picture import make_chart
from dapple_tf.timeline.stage_costs import StageCosts
from tests.dapple_tf.simulator.builders import cost, make_cluster, make_plan, make_profile, runs

PROFILE = make_profile((1, 2), (2, 4))
PLAN = make_plan((0, 0, (0,)), (1, 1, (1,)), micro_batch_size=3, micro_batch_sizes=(1, 3))


def test_a_step_of_one_and_three_samples_by_hand() -> None:
    # Of one sample of four: F = 0.25 and 0.5, B = 0.5 and 1, transfers 0.5 + 2/4 = 1 s; of three: F = 0.75 and 1.5,
    # B = 1.5 and 3, transfers 0.5 + 6/4 = 2 s. GPipe:
    #   stage 0: F0 0  F1 0.25                                                      B0 6.75        B1 10.75
    #   0 to 1:        0.25     1.25                             1 to 0: 5.75  8.75
    #   stage 1:                F0 1.25  F1 3.25  B0 4.75  B1 5.75
    timeline = simulate(PLAN, PROFILE, make_cluster())
    assert {str(e.action): (e.start, e.end) for e in timeline.events} == {
        "0F0": (0, 0.25),
        "0F1": (0.25, 1),
        "1F0": (1.25, 1.75),
        "1F1": (3.25, 4.75),
        "1B0": (4.75, 5.75),
        "1B1": (5.75, 8.75),
        "0B0": (6.75, 7.25),
        "0B1": (10.75, 12.25),
    }
    assert [(t.source, t.micro_batch, t.start, t.end) for t in timeline.transfers] == [
        (0, 0, 0.25, 1.25),
        (0, 1, 1.25, 3.25),
        (1, 0, 5.75, 6.75),
        (1, 1, 8.75, 10.75),
    ]
    assert timeline.step_seconds == 12.25
    assert timeline.utilisation == pytest.approx((3 / 12.25, 6 / 12.25))
    assert timeline.bubble == pytest.approx(1 - 9 / 24.5)
    assert timeline.speedup == pytest.approx(9 / 12.25)
    # Weights, gradients and two slots of 10 bytes. A sample keeps 1.5 bytes; the working set is that of three samples:
    # gradients of 2 bytes a sample going out and, at stage 1, as many coming in.
    assert timeline.memory(0) == ((0, 0, 0.25, 7.25, 12.25), (46, 47.5, 52, 50.5, 46))
    assert timeline.memory(1) == ((0, 1.25, 3.25, 5.75, 8.75), (52, 53.5, 58, 56.5, 52))
    assert timeline.peak_memory_bytes == (52, 58)
    assert [(s.forward_seconds, s.backward_seconds) for s in timeline.stages] == [(0.75, 1.5), (1.5, 3)]  # of three


def test_results_that_travel_together_by_hand() -> None:
    # As above, but both forwards leave at 1 and arrive at 4; both backwards leave at 10 and arrive 3 s later.
    schedule = "0F0+ 0F1 0B0 0B1; 1F0 1F1 1B0+ 1B1"
    timeline = simulate(dataclasses.replace(PLAN, schedule=schedule), PROFILE, make_cluster())
    assert {str(e.action): (e.start, e.end) for e in timeline.events if e.action.stage == 1} == {
        "1F0": (4, 4.5),
        "1F1": (4.5, 6),
        "1B0": (6, 7),
        "1B1": (7, 10),
    }
    assert timeline.transfers == (Transfer(0, 1, 1, 1, 4, count=2), Transfer(1, 0, 1, 10, 13, count=2))
    assert [(str(part), part.start) for part in timeline.critical_path] == [
        *[("0F0", 0), ("0F1", 0.25), ("0>1 F0+F1", 1), ("1F0", 4), ("1F1", 4.5), ("1B0", 6), ("1B1", 7)],
        *[("1>0 B0+B1", 10), ("0B0", 13), ("0B1", 13.5)],
    ]
    assert sum_by_kind(timeline.critical_path)["waiting"] == 0
    assert timeline.to_json()["critical_path"][2] == "0>1 F0+F1"
    spans = [(span.name, span.start, span.end) for span in make_chart(timeline).spans if ">" in span.name]
    assert spans == [("0>1 F0+F1", 1, 4), ("1>0 B0+B1", 10, 13)]


def test_equal_sizes_may_travel_together() -> None:
    plan = make_plan((0, 0, (0,)), (1, 1, (1,)), micro_batch_size=2, micro_batches=2)
    schedule = "0F0+ 0F1 0B0 0B1; 1F0 1F1 1B0 1B1"
    timeline = simulate(dataclasses.replace(plan, schedule=schedule), PROFILE, make_cluster())
    starts = {str(e.action): e.start for e in timeline.events}
    assert (starts["0F1"], starts["1F0"]) == (0.5, 1 + 2 * 1.5)


def test_planners_do_not_simulate_what_travels_together() -> None:
    with pytest.raises(ScheduleError, match=r"planners do not simulate .* travel together \(0F0\+\): leave out"):
        named_order("0F0+ 0F1 0B0 0B1; 1F0 1F1 1B0 1B1", 2, 2)


def test_allreduce_hides_behind_the_backward_of_the_last_micro_batch() -> None:
    # Data parallel; the last of the given sizes is the size of the equal micro-batches.
    plan = make_plan((0, 1, (0, 1)), micro_batch_size=4, micro_batch_sizes=(4, 2), global_batch_size=6, overlap=True)
    sized = simulate(plan, PROFILE, make_cluster())
    equal = simulate(
        make_plan((0, 1, (0, 1)), micro_batch_size=2, global_batch_size=4, overlap=True), PROFILE, make_cluster()
    )
    assert sized.costs[0].exposed_seconds == equal.costs[0].exposed_seconds
    assert sized.costs[0].forward_seconds == 2 * equal.costs[0].forward_seconds
    # Of the first micro-batch, two samples more take (1 + 2 + 2 + 4) / 4 s each, on two devices.
    assert sized.step_seconds == pytest.approx(equal.step_seconds + 2 * 9 / 4 / 2)


def assert_equal(found: Execution, wanted: Execution) -> None:
    for field in dataclasses.fields(Execution):
        if field.name not in ("order", "costs", "of_micro_batches"):
            np.testing.assert_array_equal(getattr(found, field.name), getattr(wanted, field.name), field.name)
    assert found.step_seconds == wanted.step_seconds
    assert found.busy_seconds == pytest.approx(wanted.busy_seconds)
    assert peak_bytes(found) == peak_bytes(wanted)
    for stage in range(found.stages):
        for got, want in zip(memory_over_time(found, stage), memory_over_time(wanted, stage), strict=True):
            np.testing.assert_array_equal(got, want)


@given(runs())
def test_equal_sizes_run_as_in_the_engine(drawn: tuple[Schedule, tuple[StageCosts, ...]]) -> None:
    schedule, costs = drawn
    found = execute(encode(schedule), costs, of_micro_batches=[costs] * schedule.micro_batches)
    assert_equal(found, execute(encode(schedule), costs))


@given(runs(), st.data())
def test_a_worker_runs_one_action_at_a_time_for_its_own_seconds(
    drawn: tuple[Schedule, tuple[StageCosts, ...]], data: st.DataObject
) -> None:
    schedule, costs = drawn
    scales = [data.draw(st.integers(1, 4)) for _ in range(schedule.micro_batches)]
    scaled = [[_scale(cost, scale) for cost in costs] for scale in scales]
    done = execute(encode(schedule), costs, of_micro_batches=scaled)
    for actions in done.actions:
        free = 0.0
        for action in actions:
            key, own = (action.stage, action.micro_batch), scaled[action.micro_batch][action.stage]
            start, end, seconds = {
                "F": (done.times.start_forward, done.times.end_forward, own.forward_seconds),
                "B": (done.times.start_backward, done.times.end_backward, own.backward_seconds),
                "I": (done.times.start_backward, done.times.end_backward, own.backward_seconds - own.weights_seconds),
                "W": (done.times.start_weights, done.times.end_weights, own.weights_seconds),
            }[action.kind]
            assert start[key] >= free
            assert end[key] == start[key] + seconds
            free = end[key]
    longest = execute(encode(schedule), costs, of_micro_batches=[scaled[np.argmax(scales)]] * len(scales))
    assert done.step_seconds <= longest.step_seconds


def _scale(cost: StageCosts, factor: int) -> StageCosts:
    return dataclasses.replace(
        cost, **{f.name: factor * getattr(cost, f.name) for f in dataclasses.fields(cost) if "seconds" in f.name}
    )


def test_costs_of_another_schedule_are_refused() -> None:
    schedule, costs = ScheduleSpec.parse("gpipe").build(2, 2), [cost(1, 1)] * 2
    for of_micro_batches in ([costs] * 3, [costs, costs[:1]]):
        with pytest.raises(ScheduleError, match="the schedule has 2 stages x 2 micro-batches, but there are costs of"):
            execute(encode(schedule), costs, of_micro_batches=of_micro_batches)


def test_a_deadlock_is_an_error() -> None:
    first, second = ScheduleSpec.parse("gpipe").build(2, 1).workers
    with pytest.raises(ScheduleError, match="the schedule deadlocks"):
        execute(encode(Schedule((first, second[::-1]))), [cost()] * 2, of_micro_batches=[[cost()] * 2])


def test_stages_of_one_worker_send_nothing() -> None:
    schedule = parse_schedule("0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1")
    costs = [[cost(1, 2, 5), cost(1, 2)], [cost(2, 4, 9), cost(2, 4)]]
    assert execute(encode(schedule), costs[1], of_micro_batches=costs).step_seconds == 18


def test_a_simulated_plan_with_sizes_is_saved_as_any_other(tmp_path: Path) -> None:
    timeline = simulate(PLAN, PROFILE, make_cluster())
    timeline.save(tmp_path / "t.json")
    rows = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {row["name"] for row in rows} >= {"0F0", "1B1"}
    assert timeline.to_json()["step_seconds"] == 12.25
