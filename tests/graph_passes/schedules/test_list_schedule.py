"""List scheduling: hand tables of its rules, and limits of memory that hold at every action."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.graph_passes.schedules.list_schedule import ListRule, StageTimes, list_schedule
from dapple_tf.graph_passes.schedules.schedule import check, run_schedule
from dapple_tf.graph_passes.schedules.worker_map import WorkerMap

UNLIMITED = (math.inf, math.inf)


def lines(worker_map: WorkerMap, micro_batches: int, rule: ListRule, *times: StageTimes) -> list[str]:
    found = list_schedule(worker_map, micro_batches, times or [StageTimes()] * worker_map.stages, rule)
    assert found is not None
    check(found)
    return str(found).splitlines()


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        (ListRule(True, UNLIMITED), ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"]),
        (ListRule(False, UNLIMITED), ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]),
        (ListRule(True, (1.0, 1.0)), ["0F0 0I0 0W0 0F1 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"]),
    ],
    ids=["weight gradients fill idle time", "whole backwards", "memory makes forwards wait for weight gradients"],
)
def test_two_micro_batches_on_two_workers(rule: ListRule, wanted: list[str]) -> None:
    assert lines(WorkerMap.one_per_stage(2), 2, rule) == wanted


def test_alternating_runs_a_forward_after_each_backward() -> None:
    times = StageTimes(forward=2, backward=2), StageTimes(forward=0.5, backward=1, weights=0.5)
    usual = lines(WorkerMap.one_per_stage(2), 4, ListRule(False, UNLIMITED), *times)
    alternating = lines(WorkerMap.one_per_stage(2), 4, ListRule(False, UNLIMITED, alternate=True), *times)
    assert (usual[0], alternating[0]) == ("0F0 0F1 0B0 0B1 0F2 0F3 0B2 0B3", "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3")
    limited = ListRule(False, (3.0,)), ListRule(False, (3.0,), alternate=True)
    found = [lines(WorkerMap.waves(1, 2), 3, rule)[0] for rule in limited]
    assert found == [
        "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1 0F2 1F2 1B2 0B2",
        "0F0 1F0 1B0 0F1 0B0 1F1 1B1 0F2 0B1 1F2 1B2 0B2",
    ]


@pytest.mark.parametrize(("wait_share", "order"), [(0.0, "0F0 0F1 0I0 0W0 0I1 0W1"), (1.0, "0F0 0F1 0I0 0I1 0W0 0W1")])
def test_a_patient_worker_waits_for_what_is_on_its_way(wait_share: float, order: str) -> None:
    """The gradients of micro-batch 1 arrive half a second after 0I0 has ended, and a W takes ten."""
    times = StageTimes(forward=1, backward=11, weights=10), StageTimes(0.5, 2, 1)
    found = lines(WorkerMap.one_per_stage(2), 2, ListRule(True, UNLIMITED, wait_share=wait_share), *times)
    assert found[0] == order


def test_limits_that_hold_no_micro_batch_leave_no_order() -> None:
    assert list_schedule(WorkerMap.one_per_stage(2), 1, [StageTimes()] * 2, ListRule(True, (1.0, 0.5))) is None
    both = list_schedule(WorkerMap.waves(1, 2), 3, [StageTimes()] * 2, ListRule(True, (2.0,)))
    assert both is not None
    assert list_schedule(WorkerMap.waves(1, 2), 3, [StageTimes()] * 2, ListRule(True, (1.9,))) is None


@st.composite
def problems(draw: st.DrawFn) -> tuple[WorkerMap, int, list[StageTimes], ListRule]:
    workers, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    make_map = draw(st.sampled_from([WorkerMap.looped, WorkerMap.waves]))
    worker_map = make_map(workers, chunks)
    seconds = st.floats(0.125, 4, allow_subnormal=False)
    times = []
    for _ in range(worker_map.stages):
        weights = draw(seconds)
        sends = draw(st.sampled_from([0.0, 0.5])), draw(st.sampled_from([0.0, 0.25]))
        times.append(StageTimes(draw(seconds), draw(seconds) + weights, weights, *sends, draw(st.integers(1, 3))))
    need = [sum(times[stage].stash for stage in stages) for stages in worker_map.stages_of]
    most = tuple(own * draw(st.sampled_from([1.0, 1.5, 2.0, math.inf])) for own in need)
    rule = ListRule(draw(st.booleans()), most, draw(st.booleans()), draw(st.sampled_from([0.0, 0.5, 1.0])))
    return worker_map, draw(st.integers(1, 6)), times, rule


@given(problems())
def test_every_order_runs_and_keeps_its_limits(
    problem: tuple[WorkerMap, int, list[StageTimes], ListRule],
) -> None:
    """One micro-batch fits, so there is an order: without W it ends, and at no action a worker holds too much."""
    worker_map, micro_batches, times, rule = problem
    found = list_schedule(*problem)
    check(found)
    assert found.worker_map == worker_map
    assert found.micro_batches == micro_batches
    for worker, actions in enumerate(found.workers):
        held = 0.0
        for action in actions:
            held += times[action.stage].stash * {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            assert held <= rule.most[worker]
    for actions in found.stages:
        forwards = [action.micro_batch for action in actions if action.kind == "F"]
        assert forwards == sorted(forwards)
    ends = run_schedule(found, lambda a: times[a.stage].seconds(a.kind))
    assert all(len(own) == len(actions) for own, actions in zip(ends, found.workers, strict=True))
