"""``zb-auto``: never worse than named schedules, within the memory, and no faster than a bound that is one."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.schedule import Action, Schedule, check, run_schedule
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from dapple_tf.graph_passes.schedules.worker_map import WorkerMap
from dapple_tf.simulator.order_search import lower_bound, search_order
from dapple_tf.timeline.stage_costs import StageCosts


def cost(
    forward: float = 1.0,
    inputs: float = 1.0,
    weights: float = 1.0,
    send: float = 0.0,
    exposed: float = 0.0,
    stash: float = 1.0,
    fixed: float = 0.0,
    working: float = 0.0,
) -> StageCosts:
    return StageCosts(forward, inputs + weights, send, send, exposed, exposed, fixed, stash, working, weights)


def step(schedule: Schedule, costs: list[StageCosts]) -> float:
    """Return the seconds of a step without AllReduce, by the plain executor."""

    def seconds(action: Action) -> float:
        c = costs[action.stage]
        halves = {"F": c.forward_seconds, "I": c.backward_seconds - c.weights_seconds, "W": c.weights_seconds}
        return halves.get(action.kind, c.backward_seconds)

    def sends(action: Action) -> float:
        boundary = costs[action.stage - (action.kind != "F")]
        return boundary.send_forward_seconds if action.kind == "F" else boundary.send_backward_seconds

    return max(ends[-1] for ends in run_schedule(schedule, seconds, sends))


@st.composite
def cost_vectors(draw: st.DrawFn) -> tuple[WorkerMap, int, list[StageCosts], float]:
    workers, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    make_map = draw(st.sampled_from([WorkerMap.looped, WorkerMap.waves]))
    seconds = st.floats(0.25, 4)
    costs = [
        cost(draw(seconds), draw(seconds), draw(seconds), draw(st.sampled_from([0.0, 0.3])))
        for _ in range(workers * chunks)
    ]
    memory = draw(st.sampled_from([chunks, 1.5 * chunks, workers * chunks, 2 * workers * chunks, 1000]))
    return make_map(workers, chunks), draw(st.integers(1, 8)), costs, float(memory)


@settings(max_examples=30)
@given(cost_vectors())
def test_it_is_valid_within_the_memory_and_never_worse_than_a_named_schedule(
    problem: tuple[WorkerMap, int, list[StageCosts], float],
) -> None:
    worker_map, micro_batches, costs, memory = problem
    found = search_order(*problem)
    check(found.schedule)
    assert found.schedule.worker_map == worker_map
    assert found.schedule.micro_batches == micro_batches
    assert max(found.schedule.stashes) <= memory  # each stash is one byte
    for actions in found.schedule.stages:
        for kind in "FI":
            ran = [action.micro_batch for action in actions if action.kind == kind]
            assert ran == sorted(ran)
    assert found.seconds == pytest.approx(step(found.schedule, costs), rel=1e-12)
    assert found.bound <= found.seconds * (1 + 1e-12)
    names = ["dapple-a", "dapple-b", "1f1b-so", "gpipe", "zb-h1", "zb-h2", "interleaved-1f1b:v=2"]
    names += ["interleaved-zb:v=2", "looped-bfs:v=2", "zb-v", "dualpipe-v", "hanayo"]
    for name in names:
        try:
            named = ScheduleSpec.parse(name).build(worker_map.stages, micro_batches)
        except ScheduleError:
            continue
        if named.worker_map == worker_map and max(named.stashes) <= memory:
            assert found.seconds <= step(named, costs) * (1 + 1e-12)


@pytest.mark.parametrize("seconds", [(1, 1, 1), (1, 2, 1), (2, 1, 0.5), (1, 1, 3)])
def test_no_order_of_two_stages_beats_the_bound_and_the_search_finds_the_best(
    seconds: tuple[float, float, float],
) -> None:
    """Every order of two micro-batches on two stages, by brute force."""
    costs = [cost(*seconds), cost(seconds[0] * 1.5, *seconds[1:])]
    rows: list[list[tuple[Action, ...]]] = []
    for stage in (0, 1):
        actions = [Action(stage, kind, m) for kind in "FIW" for m in (0, 1)]
        rows.append(list(itertools.permutations(actions)))
    best = math.inf
    sensible = [[r for r in own if all(_before(r, m) for m in (0, 1))] for own in rows]
    for first, second in itertools.product(*sensible):
        schedule = Schedule((first, second))
        try:
            check(schedule)
        except ScheduleError:
            continue
        best = min(best, step(schedule, costs))
    found = search_order(WorkerMap.one_per_stage(2), 2, costs)
    assert lower_bound(WorkerMap.one_per_stage(2), 2, costs) <= best * (1 + 1e-12)
    assert found.seconds == pytest.approx(best, rel=1e-12)


def _before(row: tuple[Action, ...], m: int) -> bool:
    positions = [next(i for i, a in enumerate(row) if (a.kind, a.micro_batch) == (kind, m)) for kind in "FIW"]
    return positions == sorted(positions)


def test_equal_stages_reach_the_bound_with_enough_memory() -> None:
    found = search_order(WorkerMap.one_per_stage(4), 12, [cost()] * 4)
    assert found.seconds == found.bound == 3 + 12 * 3
    assert found.distance == 0
    assert found.named == ("zb-h1", 39.0)  # whose last stage, the busiest, does not wait either


def test_all_reduce_and_fixed_bytes_count() -> None:
    costs = [cost(exposed=2.0, fixed=5.0, working=1.0)] * 2
    found = search_order(WorkerMap.one_per_stage(2), 4, costs, device_memory=8.0)
    assert max(found.schedule.stashes) <= 2
    assert found.bound == 1 + 12 + 2
    assert found.seconds >= found.bound


def test_the_same_costs_give_the_same_order() -> None:
    costs = [cost(1.1, 0.9, 1.3), cost(0.8, 1.2, 0.7), cost(1.4, 1.0, 0.6)]
    runs = [search_order(WorkerMap.one_per_stage(3), 6, costs, 4.0) for _ in range(2)]
    assert runs[0] == runs[1]


def test_memory_for_no_micro_batch_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"no order fits: a device has 5.5 bytes, and the weights, gradients"):
        search_order(WorkerMap.one_per_stage(2), 4, [cost(fixed=5.0)] * 2, device_memory=5.5)
    with pytest.raises(ScheduleError, match="the worker map has 2 stages, but there are costs of 3"):
        search_order(WorkerMap.one_per_stage(2), 4, [cost()] * 3)
