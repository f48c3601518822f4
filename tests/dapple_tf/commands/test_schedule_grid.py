"""Schedules as grids, laid out by hand, and the work of each worker."""

from __future__ import annotations

from dapple_tf.commands.schedules import Units, WorkerTime, format_grid, time_workers
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec, parse_schedule


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def test_an_action_is_as_wide_as_it_is_long_and_idle_units_are_dots() -> None:
    schedule = ScheduleSpec.parse("dapple-a").build(2, 2)
    assert format_grid(schedule, Units()).splitlines() == lines(
        """
        stage 0  0F0 0F1 .   .   0B0---- .   0B1----
        stage 1  .   1F0 1B0---- 1F1 1B1----
        """
    )
    assert time_workers(schedule, Units()) == (WorkerTime((0,), 6, 3, 2), WorkerTime((1,), 6, 0, 1))


def test_a_worker_has_one_line_for_all_its_stages() -> None:
    schedule = parse_schedule("0F0 3F0 3B0 0B0; 1F0 2F0 2B0 1B0")
    assert format_grid(schedule, Units(1, 1)).splitlines() == lines(
        """
        stages 0,3  0F0 .   .   3F0 3B0 .   .   0B0
        stages 1,2  .   1F0 2F0 .   .   2B0 1B0
        """
    )
    assert time_workers(schedule, Units(2, 3)) == (WorkerTime((0, 3), 10, 10, 2), WorkerTime((1, 2), 10, 5, 2))


def test_weight_gradients_take_their_part_of_the_backward_where_they_are_apart() -> None:
    schedule = parse_schedule("0F0 0F1 0I0 0W0 0I1 0W1")
    assert Units() == Units(forward=1, backward=2, weights=1)
    assert format_grid(schedule, Units()) == "stage 0  0F0 0F1 0I0 0W0 0I1 0W1"
    assert format_grid(schedule, Units(1, 3, 2)) == "stage 0  0F0 0F1 0I0 0W0---- 0I1 0W1----"


def test_a_backward_is_as_long_as_its_two_halves() -> None:
    schedule = parse_schedule("0F0 0F1 0B0 0I1 0W1; 1F0 1I0 1F1 1B1 1W0")
    assert format_grid(schedule, Units(1, 3, 2)).splitlines() == lines(
        """
        stage 0  0F0 0F1 .   0B0-------- .   0I1 0W1----
        stage 1  .   1F0 1I0 1F1 1B1-------- 1W0----
        """
    )
    assert time_workers(schedule, Units(1, 3, 2)) == (WorkerTime((0,), 8, 2, 2), WorkerTime((1,), 8, 0, 2))


def test_results_that_travel_together_are_marked_as_in_the_text() -> None:
    schedule = parse_schedule("0F0+ 0F1 0B0 0B1; 1F0 1F1 1B0+ 1B1")
    assert format_grid(schedule, Units()).splitlines() == lines(
        """
        stage 0  0F0+ 0F1- .    .    .    .    .    .    0B0------ 0B1------
        stage 1  .    .    1F0- 1F1- 1B0+----- 1B1------
        """
    )
