"""Maps from workers to stages, and those that are refused."""

from __future__ import annotations

import pytest

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.worker_map import WorkerMap
from tests.graph_passes.builders import refused


@pytest.mark.parametrize(
    ("found", "stages_of"),
    [
        (WorkerMap.one_per_stage(3), ((0,), (1,), (2,))),
        (WorkerMap.looped(2, 3), ((0, 2, 4), (1, 3, 5))),
        (WorkerMap.waves(3, 2), ((0, 5), (1, 4), (2, 3))),
        (WorkerMap.waves(2, 3), ((0, 3, 4), (1, 2, 5))),
        (WorkerMap.of([1, 0, 0]), ((1, 2), (0,))),
    ],
)
def test_the_stages_of_each_worker(found: WorkerMap, stages_of: tuple[tuple[int, ...], ...]) -> None:
    assert found.stages_of == stages_of
    assert found.workers == len(stages_of)
    assert found.stages == sum(map(len, stages_of))
    assert all(stage in stages_of[worker] for stage, worker in enumerate(found.worker_of))
    assert WorkerMap.of(found.worker_of) == found


def test_one_stage_per_worker_means_stage_s_alone_on_worker_s() -> None:
    assert WorkerMap.one_per_stage(2).has_one_stage_per_worker
    assert not WorkerMap.looped(1, 2).has_one_stage_per_worker
    assert not WorkerMap(((1,), (0,))).has_one_stage_per_worker


def test_a_map_is_chunked_where_some_worker_runs_several_stages() -> None:
    assert WorkerMap(((1,), (0, 2))).is_chunked
    assert not WorkerMap(((1,), (0,))).is_chunked


@pytest.mark.parametrize(
    ("stages_of", "said"),
    [
        ((), "there is no worker"),
        (((0,), ()), "worker 1 has no stage: give it one, or leave it out"),
        (((0, 1), (1,)), "stage 1 is on workers 0 and 1: a stage is on one worker"),
        (((0, 0),), "stage 0 is on workers 0 and 0"),
        (((0,), (2, 3)), "stage 1 is on no worker, but stage 3 is on worker 1"),
    ],
)
def test_a_map_that_skips_or_repeats_a_stage_is_refused(stages_of: tuple[tuple[int, ...], ...], said: str) -> None:
    with refused(ScheduleError, said):
        WorkerMap(stages_of)
