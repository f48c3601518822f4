"""Timelines of schedules with several stages per device: rows, shades, memory and idle time are those of devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapple_tf.drawing.chart import LIGHTEST
from dapple_tf.simulator.simulate import simulate
from dapple_tf.timeline.picture import make_chart
from dapple_tf.timeline.timeline import Timeline
from tests.dapple_tf.simulator.builders import make_cluster, make_plan, make_profile


def interleaved(*devices: tuple[int, ...]) -> Timeline:
    """Four stages of a forward of 0.5 s and a backward of 1 s for a micro-batch, on these devices."""
    plan = make_plan(
        *((stage, stage, own) for stage, own in enumerate(devices)),
        schedule=f"interleaved-1f1b:v={len(devices) // len(set(devices))}",
        micro_batches=2,
    )
    return simulate(plan, make_profile((1, 2), (1, 2), (1, 2), (1, 2)), make_cluster(1 + max(max(d) for d in devices)))


def test_a_device_has_one_row_and_a_shade_for_each_of_its_stages() -> None:
    chart = make_chart(interleaved((0,), (1,), (0,), (1,)))
    named = [row.name for row in chart.rows if not row.network]
    assert named == ["stages 0,2", "stages 1,3"]
    shades = {
        (chart.rows[span.row].name, span.name[0], span.shade) for span in chart.spans if span.micro_batch is not None
    }
    assert {shade for shade in shades if shade[0] in named} == {
        ("stages 0,2", "0", 0),
        ("stages 0,2", "2", LIGHTEST),
        ("stages 1,3", "1", 0),
        ("stages 1,3", "3", LIGHTEST),
    }
    assert [curve.name for curve in chart.curves] == named


def test_transfers_between_devices_have_rows_and_those_on_one_device_none() -> None:
    chart = make_chart(interleaved((0,), (1,), (0,), (1,)))
    assert [row.name for row in chart.rows if row.network] == [
        "0 to 1",
        "1 to 0",
        "1 to 2",
        "2 to 1",
        "2 to 3",
        "3 to 2",
    ]
    alone = make_chart(interleaved((0,), (0,), (0,), (0,)))
    assert [row.name for row in alone.rows] == ["stages 0-3"]


def test_all_reduces_beside_compute_have_a_row_of_their_own() -> None:
    chart = make_chart(interleaved((0, 1), (2, 3), (0, 1), (2, 3)))
    spans = [
        (chart.rows[span.row].name, chart.rows[span.row].network) for span in chart.spans if span.kind == "allreduce"
    ]
    assert sorted(spans) == [("AllReduce of stages 0,2", True)] * 2 + [("AllReduce of stages 1,3", True)] * 2


def test_the_bubble_and_the_utilisation_are_those_of_devices() -> None:
    # Each device works for 2 micro-batches x 2 stages x 1.5 s.
    timeline = interleaved((0,), (1,), (0,), (1,))
    busy = 6 / timeline.step_seconds
    assert timeline.bubble == pytest.approx(1 - busy)
    assert timeline.device_utilisation["device:0"] == timeline.device_utilisation["device:1"] == pytest.approx(busy)
    assert timeline.stage_utilisation == pytest.approx([busy / 2] * 4)


def test_a_device_holds_the_weights_and_stashes_of_all_its_stages() -> None:
    # Of each stage 40 bytes of weights, gradients and slots, and 3 of a stash; 8 of the largest working set.
    timeline = interleaved((0,), (1,), (0,), (1,))
    peaks = timeline.simulation.peak_memory_bytes
    assert peaks[0] == peaks[2]
    assert peaks[1] == peaks[3]
    one = interleaved((0,), (0,), (0,), (0,))
    assert len(set(one.simulation.peak_memory_bytes)) == 1
    assert one.simulation.peak_memory_bytes[0] > peaks[0] > peaks[1]


@pytest.mark.parametrize("suffix", ["png", "html", "json"])
def test_the_picture_is_saved(tmp_path: Path, suffix: str) -> None:
    interleaved((0, 1), (2,), (0, 1), (2,)).save(tmp_path / f"step.{suffix}")
    assert (tmp_path / f"step.{suffix}").stat().st_size > 1000
