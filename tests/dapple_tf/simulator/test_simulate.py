"""Simulated steps of plans: figures by hand, text, JSON and files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.drawing.table import format_ranges
from dapple_tf.errors import OutputError
from dapple_tf.simulator.simulate import simulate
from dapple_tf.timeline.stage_costs import StageCosts
from dapple_tf.timeline.timeline import SimulatedTimeline
from tests.dapple_tf.simulator.builders import (
    cost,
    make_cluster,
    make_plan,
    make_profile,
    make_step,
    make_timeline,
    stage_costs,
)
from tests.processes import run_python

PROFILE = make_profile((1, 2), (2, 4))
PLAN = make_plan((0, 0, (0,)), (1, 1, (1,)))


def test_a_plan_simulated_by_hand() -> None:
    # Two samples of four: F = 0.5 and 1, B = 1 and 2; 4 bytes over 4 B/s after 0.5 s: 1.5 s each way. GPipe, M = 2:
    #   stage 0: F0 0  F1 0.5                                           B0 8  B1 10
    #   0 to 1:        0.5     2                        1 to 0: 6.5  8.5
    #   stage 1:               F0 2  F1 3.5  B0 4.5  B1 6.5
    timeline = simulate(PLAN, PROFILE, make_cluster())
    assert timeline.step_seconds == 11
    assert timeline.speedup == pytest.approx(2 * 4.5 / 11)
    assert timeline.utilisation == pytest.approx((3 / 11, 6 / 11))
    assert timeline.bubble == pytest.approx(1 - 9 / 22)
    assert timeline.acr == pytest.approx(3 / 2.25)
    # Weights, gradients and two slots of 10 bytes; stashes of 3 bytes, two of them; gradients of 4 bytes going out
    # and, at stage 1, 4 more coming in.
    assert timeline.peak_memory_bytes == (40 + 2 * 3 + 4, 40 + 2 * 3 + 8)
    assert timeline.memory(1) == ((0, 2, 3.5, 6.5, 8.5), (48, 51, 54, 51, 48))
    assert timeline.critical_stage == 1
    assert timeline.actions(1) == "1F0 1F1 1B0 1B1"


def test_the_optimizers_slots_count() -> None:
    without = simulate(PLAN, PROFILE, make_cluster(), optimizer_slots=0).peak_memory_bytes
    assert without == (20 + 2 * 3 + 4, 20 + 2 * 3 + 8)


def test_a_stages_replicas_weigh_in_the_bubble() -> None:
    # Stage 1's AllReduce makes 14 s 17: each stage computes for 8 of them, on 2 and 1 devices.
    timeline = make_timeline("dapple-a", 4, [cost(1, 2, 0), cost(2, 3, 0, exposed_seconds=4)], (2, 1))
    # stage 0: F0 F1 0-2, stage 1: F0 1-3 B0 3-6 F1 6-8 B1 8-11 F2 11-13 B2 13-16 F3 16-18 B3 18-21, AllReduce 21-25
    assert timeline.step_seconds == 25
    assert timeline.utilisation == (12 / 25, 20 / 25)
    assert timeline.bubble == pytest.approx(1 - (2 * 12 + 20) / (3 * 25))
    assert timeline.speedup == 4


def test_one_stage_has_no_boundaries() -> None:
    timeline = make_timeline("dapple-a", 3, [cost(1, 2)])
    assert (timeline.acr, timeline.bubble, timeline.utilisation) == (0, 0, (1,))


def test_a_step_of_stages_that_take_no_time_has_finite_figures() -> None:
    nothing = make_timeline("gpipe", 2, [cost(0, 0), cost(0, 0)])
    assert dataclasses.replace(make_step("gpipe", 2, nothing.costs), one_device_seconds=0.0).speedup == 1
    assert (nothing.step_seconds, nothing.bubble, nothing.acr) == (0, 0, 0)
    sending = make_timeline("gpipe", 2, [cost(0, 0, 1), cost(0, 0)])
    assert sending.acr == float("inf")
    assert sending.bubble == 1
    assert json.loads(json.dumps(sending.to_json(), allow_nan=False))["acr"] is None


@given(st.sampled_from(["gpipe", "dapple-a", "dapple-b"]), st.integers(1, 8), st.data())
def test_bubble_and_utilisation_agree_with_the_busy_time_of_the_devices(name: str, m: int, data: st.DataObject) -> None:
    costs: tuple[StageCosts, ...] = data.draw(st.integers(1, 5).flatmap(stage_costs))
    replicas = data.draw(st.lists(st.integers(1, 4), min_size=len(costs), max_size=len(costs)))
    step = make_step(name, m, costs, replicas)
    timeline, done = SimulatedTimeline(step), step.execution
    busy = [
        float(
            (done.times.end_forward - done.times.start_forward + done.times.end_backward - done.times.start_backward)[
                i
            ].sum()
        )
        for i in range(len(costs))
    ]
    total = timeline.step_seconds * sum(replicas)
    assert 0 <= timeline.bubble <= 1
    assert all(0 <= part <= 1 for part in timeline.utilisation)
    assert total * (1 - timeline.bubble) == pytest.approx(sum(r * part for r, part in zip(replicas, busy, strict=True)))


def test_json_has_the_fields_of_the_contract() -> None:
    data = json.loads(json.dumps(simulate(PLAN, PROFILE, make_cluster()).to_json(), allow_nan=False))
    assert {key: data[key] for key in ("step_seconds", "peak_memory_bytes", "stages")} == {
        "step_seconds": 11,
        "peak_memory_bytes": [50, 54],
        "stages": [
            {"forward_seconds": 0.5, "backward_seconds": 1, "allreduce_seconds": 0, "actions": "0F0 0F1 0B0 0B1"},
            {"forward_seconds": 1, "backward_seconds": 2, "allreduce_seconds": 0, "actions": "1F0 1F1 1B0 1B1"},
        ],
    }
    assert data["speedup"] == pytest.approx(9 / 11)
    assert data["bubble"] == pytest.approx(1 - 9 / 22)
    assert (data["acr"], data["critical_stage"], data["fits"]) == (pytest.approx(3 / 2.25), 1, [True, True])


def test_a_simulated_timeline_prints_a_table_of_its_stages() -> None:
    assert str(simulate(PLAN, PROFILE, make_cluster())).splitlines() == [
        "11 s, bubble 59.1%, speed-up 0.82, ACR 1.333, critical stage 1",
        "stage  devices  layers  F       B    AllReduce  busy  peak memory",
        "0      0        0-0     500 ms  1 s  0 s        27%   50 B",
        "1      1        1-1     1 s     2 s  0 s        55%   54 B",
    ]


def test_the_table_has_a_column_for_w_where_backward_is_split() -> None:
    timeline = simulate(dataclasses.replace(PLAN, schedule="zb-h1"), PROFILE, make_cluster())
    assert [" ".join(line.split()[:11]) for line in str(timeline).splitlines()[1:]] == [
        "stage devices layers F B of it W AllReduce busy peak",
        "0 0 0-0 500 ms 1 s 500 ms 0 s",
        "1 1 1-1 1 s 2 s 1 s 0 s",
    ]


def test_a_stage_that_splits_no_backward_has_no_seconds_of_w() -> None:
    schedule = "0F0 0F1 0B0 0B1; 1F0 1I0 1F1 1B1 1W0"
    timeline = simulate(dataclasses.replace(PLAN, schedule=schedule), PROFILE, make_cluster())
    assert [" ".join(line.split()[:10]) for line in str(timeline).splitlines()[1:]] == [
        "stage devices layers F B of it W AllReduce busy",
        "0 0 0-0 500 ms 1 s - 0 s",
        "1 1 1-1 1 s 2 s 1 s 0",
    ]


def test_a_plan_that_does_not_fit_is_simulated_and_its_text_says_what_it_lacks() -> None:
    timeline = simulate(PLAN, PROFILE, make_cluster(memory=52))
    assert timeline.fits == (True, False)
    assert str(timeline).splitlines()[-1] == "stage 1 does not fit: it lacks 2 B of the device's 52 B"
    assert simulate(PLAN, PROFILE, make_cluster(memory=54)).fits == (True, True)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((3,), "3"), ((0, 1), "0-1"), ((0, 1, 2, 8), "0-2,8"), ((4, 2, 3), "4,2-3"), ((1, 3, 5), "1,3,5")],
)
def test_consecutive_numbers_are_joined(numbers: tuple[int, ...], text: str) -> None:
    assert format_ranges(numbers) == text


@pytest.mark.parametrize(("name", "begins"), [("t.json", b'{"traceEvents"'), ("t.png", b"\x89PNG"), ("t.html", b"<!")])
def test_a_simulated_step_is_saved_in_the_format_of_the_suffix(tmp_path: Path, name: str, begins: bytes) -> None:
    simulate(PLAN, PROFILE, make_cluster()).save(tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_another_suffix_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"t\.svg: a timeline is saved as \.png, \.html or \.json"):
        simulate(PLAN, PROFILE, make_cluster()).save(tmp_path / "t.svg")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.always  # the only quick test of a program that does without TensorFlow
def test_simulating_and_drawing_do_not_start_tensorflow() -> None:
    code = (
        "import sys; import dapple_tf.simulator.simulate, dapple_tf.drawing.save, dapple_tf.drawing.html, "
        "dapple_tf.drawing.save, dapple_tf.drawing.png; print('tensorflow' in sys.modules)"
    )
    assert run_python("-c", code).stdout == "False\n"
