"""The planner's simulated schedules against the schedules themselves, run in the simulator."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.spec import early_backward, warm_up
from dapple_tf.planner.step_simulation import (
    POLICIES,
    StageCostArrays,
    fastest_schedule,
    order_seconds,
)
from dapple_tf.simulator.engine import whole_rings
from dapple_tf.simulator.order import encode
from tests.dapple_tf.planner.builders import figures


def step_of(costs: StageCostArrays, in_flight: tuple[int, ...], micro_batches: int) -> float:
    """Return the simulated step with these K_i, from the schedule as graph_passes builds it."""
    return order_seconds(encode(early_backward(in_flight, micro_batches)), costs)


def count_held(costs: StageCostArrays, stage: int, memory: float, most: int) -> int:
    """Return how many micro-batches a stage has room for, one by one."""
    fixed = costs.fixed_bytes[stage] + costs.working_bytes[stage]
    held = 0
    while held < most and fixed + (held + 1) * costs.stash_bytes[stage] <= memory:
        held += 1
    return held


@st.composite
def stage_costs(draw: st.DrawFn) -> StageCostArrays:
    """One to five stages; bytes are whole numbers, so that sums are exact."""
    stages = draw(st.integers(1, 5))
    seconds = st.lists(figures(10), min_size=stages, max_size=stages).map(np.array)
    sizes = st.lists(st.integers(0, 20).map(float), min_size=stages, max_size=stages).map(np.array)
    rings = whole_rings(draw(seconds))
    return StageCostArrays(
        *[draw(seconds) for _ in range(3)], *[draw(sizes) for _ in range(3)], np.zeros(stages), rings
    )


@given(stage_costs(), st.integers(1, 8), st.integers(0, 120), st.sampled_from(POLICIES))
def test_a_policy_takes_as_long_as_its_schedule_with_d_by_memory(
    costs: StageCostArrays, micro_batches: int, memory: int, policy: str
) -> None:
    """D is the least number that a stage can hold, over the stages that cannot hold K_i (DAPPLE, section V.C)."""
    stages = len(costs.forward_seconds)
    unlimited = warm_up(policy, stages, micro_batches)
    held = [count_held(costs, stage, memory, unlimited[stage]) for stage in range(stages)]
    limit = min([n for n, k in zip(held, unlimited, strict=True) if n < k], default=None)
    found = fastest_schedule(costs, micro_batches, float(memory), policy)
    try:
        in_flight = warm_up(policy, stages, micro_batches, limit)
    except ScheduleError:  # no micro-batch fits, or gpipe is limited
        assert found == (math.inf, "")
        return
    assert found == (step_of(costs, in_flight, micro_batches), policy if limit is None else f"{policy}:D={limit}")


@given(stage_costs(), st.integers(1, 8))
def test_the_fastest_policy_is_chosen_and_of_equals_the_first(costs: StageCostArrays, micro_batches: int) -> None:
    stages = len(costs.forward_seconds)
    seconds = {p: step_of(costs, warm_up(p, stages, micro_batches), micro_batches) for p in POLICIES}
    found = fastest_schedule(costs, micro_batches, 1e9)
    assert found.seconds == pytest.approx(min(seconds.values()), rel=1e-9, abs=0)
    assert found.seconds == seconds[found.schedule]
    before = POLICIES[: POLICIES.index(found.schedule)]
    assert all(seconds[p] > found.seconds for p in before)
