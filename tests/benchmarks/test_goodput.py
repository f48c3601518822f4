"""The simulation of training under losses: what it gives where that is known."""

from __future__ import annotations

import pytest

from benchmarks.goodput import POLICIES, SECONDS, Inputs, Steps, losses_of, simulate

STEPS = Steps(4, {2: 2.0, 3: 1.5, 4: 1.0}, 10.0)
INPUTS = Inputs(restart_seconds=30.0, snapshot_share=0.01, write_rate=1e9)


def test_without_losses_only_saving_costs() -> None:
    (_, at_end) = simulate("snapshots", STEPS, INPUTS, [])[-1]
    assert at_end == pytest.approx(SECONDS / 1.01 * 600 / 610)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_loss_costs_a_restart_and_what_was_not_saved(policy: str) -> None:
    """It comes shortly before the end, so that no host is back before."""
    before = simulate(policy, STEPS, INPUTS, [])[-1][1]  # type: ignore[arg-type]  # a text in place of a literal
    time = SECONDS - 100.0
    found = simulate(policy, STEPS, INPUTS, [time])  # type: ignore[arg-type]
    lost = before - found[-1][1]
    if policy == "no elasticity":
        assert lost >= 0.9 * 100  # nothing runs any more
    else:
        assert 0.9 * (30 + 70 * (1 - 1 / 1.5)) < lost < before
    assert found[-1][0] == SECONDS


def test_step_times_between_planned_numbers_are_interpolated() -> None:
    assert STEPS.of(3) == 1.5
    assert Steps(4, {2: 2.0, 4: 1.0}, 1.0).of(3) == 1.5


def test_a_trace_has_a_loss_a_day_and_host() -> None:
    counts = [len(losses_of(512, seed)) for seed in range(40)]
    assert sum(counts) / len(counts) == pytest.approx(512 * SECONDS / 86400, rel=0.1)
