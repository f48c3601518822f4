"""AutoPipe's Slicer: the order of Fig. 8 (b), half the start-up, sizes, and Algorithm 2 by hand."""

from __future__ import annotations

import pytest

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.schedule import Action, run_schedule
from dapple_tf.graph_passes.schedules.slicer import count_slices, slice_sizes, sliced_1f1b
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from tests.graph_passes.builders import refused


def test_four_stages_and_four_micro_batches_as_in_the_paper() -> None:
    """Fig. 8 (b): micro-batch 0 is sliced; its halves are 0 and 1, and the paper's 1, 2, 3 are 2, 3, 4 here."""
    assert str(sliced_1f1b(4, 4, 1)).splitlines() == [
        "0F0 0F1 0F2 0F3 0F4 0B0 0B1 0B2 0B3 0B4",
        "1F0 1F1 1F2 1F3 1B0+ 1B1 1F4 1B2 1B3 1B4",
        "2F0 2F1 2F2 2B0+ 2B1 2F3 2B2 2F4 2B3 2B4",
        "3F0 3F1 3B0+ 3B1 3F2 3B2 3F3 3B3 3F4 3B4",
    ]


def test_both_halves_of_the_last_warm_up_forward_travel_together() -> None:
    """With micro-batch 1 sliced too, that is what stage 2 runs last before its first backward."""
    assert str(sliced_1f1b(4, 4, 2)).splitlines() == [
        "0F0 0F1 0F2 0F3 0F4 0F5 0B0 0B1 0B2 0B3 0B4 0B5",
        "1F0 1F1 1F2 1F3 1F4 1B0+ 1B1 1F5 1B2+ 1B3 1B4 1B5",
        "2F0 2F1 2F2+ 2F3 2B0+ 2B1 2F4 2B2+ 2B3 2F5 2B4 2B5",
        "3F0 3F1 3B0+ 3B1 3F2 3F3 3B2+ 3B3 3F4 3B4 3F5 3B5",
    ]


def test_a_half_that_no_busy_stage_delays_travels_alone() -> None:
    """All stages of fewer micro-batches than stages warm up with all of them, so each waits for the first half."""
    assert str(sliced_1f1b(3, 1, 1)) == "0F0 0F1 0B0 0B1\n1F0 1F1 1B0+ 1B1\n2F0 2F1 2B0+ 2B1"


@pytest.mark.parametrize(
    ("stages", "micro_batches", "sliced"), [(2, 4, 2), (4, 8, 1), (8, 16, 2), (8, 4, 4), (3, 1, 1)]
)
def test_the_last_stage_starts_in_half_the_time(stages: int, micro_batches: int, sliced: int) -> None:
    schedule = sliced_1f1b(stages, micro_batches, sliced)
    assert schedule.micro_batches == micro_batches + sliced

    def seconds(action: Action) -> float:
        whole = 1.0 if action.kind == "F" else 2.0
        return whole / 2 if action.micro_batch < 2 * sliced else whole

    ends = run_schedule(schedule, seconds)
    assert ends[-1][0] - 0.5 == (stages - 1) / 2
    usual = run_schedule(
        ScheduleSpec.parse("dapple-a").build(stages, micro_batches), lambda a: 1.0 if a.kind == "F" else 2.0
    )
    assert max(own[-1] for own in ends) <= max(own[-1] for own in usual)


def test_without_slices_it_is_1f1b() -> None:
    assert sliced_1f1b(4, 6, 0) == ScheduleSpec.parse("dapple-a").build(4, 6)


def test_each_half_has_half_the_samples() -> None:
    assert slice_sizes([4, 5, 4], 2) == (2, 2, 2, 3, 4)
    assert slice_sizes([1, 4], 0) == (1, 4)


@pytest.mark.parametrize(
    ("forward", "backward", "send", "count"),
    [
        ([1, 1], [2, 2], 0, 0),  # two stages: unsuited
        # Start of stage 3 behind its backward 2 + 2 = 4; back over f_2, f_1, f_0 to 1; the halves on stage 0 end at 1.
        ([1, 1, 1, 1], [2, 2, 2, 2], 0, 1),
        # Eight stages, one slice: 4 + 2 - 7 = -1 is too early; two: 6 + 2 - 6 = 2, and four halves end at 2.
        ([1] * 8, [2] * 8, 0, 2),
        # A slow backward of the last stage gives time: one slice is enough.
        ([1] * 8, [2] * 7 + [8], 0, 1),
        ([1] * 4, [2] * 4, 0.2, 2),
    ],
)
def test_the_number_of_slices(forward: list[float], backward: list[float], send: float, count: int) -> None:
    assert count_slices(forward, backward, send) == count


def test_what_cannot_be_sliced_is_refused() -> None:
    with refused(ScheduleError, "slice=5: stage 0 runs 4 micro-batches before its first backward, of which 0 to 4"):
        sliced_1f1b(4, 8, 5)
    with refused(ScheduleError, "slice=-1: stage 0 runs 2 micro-batches"):
        sliced_1f1b(4, 2, -1)
    with refused(ScheduleError, "slice=2: micro-batch 1 has 1 sample, which cannot be halved"):
        slice_sizes([2, 1, 2], 2)
