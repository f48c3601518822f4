"""``schedule="auto"``: policy, D and M for given stages, from their costs."""

from __future__ import annotations

import pytest

from dapple_tf.autoplan.schedule_auto import ScheduleChoice, choose_schedule
from dapple_tf.errors import PlanError, ScheduleError
from tests.dapple_tf.simulator.builders import cost
from tests.graph_passes.builders import refused


def choose(*stages: object, memory: float = 1e9, micro_batches: int = 8, **options: object) -> ScheduleChoice:
    return choose_schedule({micro_batches: list(stages)}, memory, measured=True, **options)  # type: ignore[arg-type]


def test_where_transfers_take_no_time_the_policy_with_the_smaller_stash_is_chosen() -> None:
    choice = choose(cost(1, 2), cost(1, 2))
    assert (choice.schedule, choice.acr) == ("dapple-a", 0.0)
    assert str(choice) == ("schedule dapple-a, M = 8: ACR 0.000; dapple-b takes as long, gpipe takes as long")


def test_where_transfers_take_time_more_warm_up_is_faster() -> None:
    """Two stages, F = 1, B = 2, transfers of 1 each way.

    Policy A holds two micro-batches in stage 0: every second one the stage waits for a way there and back. Policy B
    holds three, which is enough to hide it.
    """
    choice = choose(cost(1, 2, send=1), cost(1, 2))
    assert choice.schedule == "dapple-b"
    assert choice.acr == pytest.approx(2 / 3)
    assert choice.seconds["dapple-b"] == 8 * 3 + (1 + 1) + (1 + 2)  # stage 1 is always busy once it has begun
    assert choice.seconds["dapple-a"] > choice.seconds["dapple-b"] * 1.1
    assert "dapple-a takes" in str(choice)


def test_where_transfers_take_longer_than_a_stage_more_are_held_than_policy_b_holds() -> None:
    """F = 1, B = 2, transfers of 3 each way: a micro-batch stays 1 + 3 + 3 + 3 + 2 = 12 in stage 0, four of 3 each."""
    choice = choose(cost(1, 2, send=3, stash_bytes=1), cost(1, 2, stash_bytes=1))
    assert choice.schedule == "K=4,1"
    assert choice.seconds["K=4,1"] == 8 * 3 + (1 + 3) + (3 + 2)  # stage 1 is always busy once it has begun
    assert choice.seconds["dapple-b"] > choice.seconds["K=4,1"] * 1.05
    assert choose(cost(1, 2, send=3, stash_bytes=1), cost(1, 2, stash_bytes=1), memory=3.0).schedule == "dapple-b"


def test_more_stashes_are_held_only_for_two_percent_of_the_step() -> None:
    """Two micro-batches in flight take 6 + 2 x send there and back: transfers of 0.03 cost 1%, and of 0.09 cost 3%."""
    cheap = choose(cost(1, 2, send=0.03, stash_bytes=1), cost(1, 2, stash_bytes=1), micro_batches=64)
    assert cheap.schedule == "dapple-a"
    assert "dapple-b takes 0.9% less, too little to choose it" in str(cheap)
    dear = choose(cost(1, 2, send=0.09, stash_bytes=1), cost(1, 2, stash_bytes=1), micro_batches=64)
    assert dear.schedule == "dapple-b"


def test_a_planned_schedule_is_tried_too() -> None:
    choice = choose(cost(1, 2, stash_bytes=1), cost(1, 2, stash_bytes=1), more=("K=7,2",))
    assert choice.schedule == "dapple-a"
    assert choice.seconds["K=7,2"] == choice.seconds["dapple-a"]


def test_memory_limits_d() -> None:
    """Stage 0 would hold 5 micro-batches of 10 bytes under policy B, and has room for 4 beside its 100 bytes."""
    stages = [cost(1, 2, send=1, fixed_bytes=80, working_bytes=20, stash_bytes=10), cost(1, 2, send=1), cost(1, 2)]
    choice = choose(*stages, memory=149.0)
    assert choice.schedule == "dapple-b:D=4"
    assert choice.max_in_flight == (4, 8, 8)
    assert "gpipe" not in choice.seconds
    assert str(choice).endswith("; D = 4: a device's 149 B hold no more micro-batches of stage 0")


def test_the_fastest_number_of_micro_batches_is_chosen() -> None:
    """A bubble of one micro-batch and a fixed 0.1 of each call: 8 x 0.35 + 0.35, 4 x 0.6 + 0.6, 16 x 0.225 + 0.225."""
    costs = {m: [cost(0.1 + 1 / m, 0.1 + 1 / m)] * 2 for m in (2, 4, 8, 16)}
    choice = choose_schedule(costs, 1e9, measured=False)
    seconds = {m: (m + 1) * 2 * (0.1 + 1 / m) for m in costs}
    assert choice.micro_batches == min(seconds, key=lambda m: seconds[m]) == 4
    assert "ACR 0.000 (estimated)" in str(choice)


def test_a_number_of_micro_batches_that_does_not_fit_is_not_chosen() -> None:
    costs = {2: [cost(1, 1, stash_bytes=100)] * 2, 4: [cost(1, 1, stash_bytes=50)] * 2}
    assert choose_schedule(costs, 60.0, measured=True).micro_batches == 4


def test_of_a_given_policy_only_d_is_chosen() -> None:
    assert choose(cost(1, 2, send=1), cost(1, 2), policies=("dapple-a",)).schedule == "dapple-a"


def test_explicit_warm_ups_are_described_like_a_policy() -> None:
    choice = choose(cost(1, 2), cost(1, 2), policies=("K=2,1",))
    assert choice.seconds == {"K=2,1": 9 * 3}
    assert str(choice) == "schedule K=2,1, M = 8: ACR 0.000"


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("K=9,1", "K_0 = 9 is not between 1 and M = 8"),
        ("K=1,2", "the schedule deadlocks"),
        ("K=3,2,1", "K=3,2,1 gives K of 3 stages, but there are 2"),
    ],
)
def test_impossible_warm_ups_are_refused(schedule: str, message: str) -> None:
    with refused(ScheduleError, message):
        choose(cost(1, 2), cost(1, 2), policies=(schedule,))


@pytest.mark.parametrize("schedule", ["gpipe", "K=3,1"])
def test_a_given_schedule_that_does_not_fit_the_memory_is_an_error(schedule: str) -> None:
    message = f"schedule {schedule} keeps more micro-batches of stage 0 in flight, 40 B each with M = 8, than fit"
    with refused(PlanError, message, "into a device's 100 B", "use schedule 'auto'"):
        choose(cost(1, 2, stash_bytes=40), cost(1, 2), memory=100.0, policies=(schedule,))


@pytest.mark.parametrize(
    ("fixed", "remedy"),
    [
        (50.0, "Use more micro-batches, or more stages: recompute=True saves nothing with one micro-batch"),
        (500.0, "Its weights alone do not fit"),
    ],
)
def test_where_nothing_fits_the_error_names_stage_bytes_and_remedy(fixed: float, remedy: str) -> None:
    message = f"no schedule fits: with M = 8 and one micro-batch in flight, stage 1 needs .* and lacks .* {remedy}"
    with pytest.raises(PlanError, match=message):
        choose(cost(1, 2), cost(1, 2, fixed_bytes=fixed, stash_bytes=60), memory=100.0)
