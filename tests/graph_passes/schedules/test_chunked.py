"""Schedules with several stages per worker: tables drawn by hand, and the papers' bubbles and numbers of stashes."""

from __future__ import annotations

import pytest

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.schedule import Schedule, run_schedule
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec, parse_schedule
from tests.graph_passes.builders import refused
from tests.graph_passes.schedules.tables import read_tables

TABLES = read_tables(
    """
    interleaved-1f1b 4 2
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1

    interleaved-1f1b:v=2 4 4
    0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
    1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

    interleaved-1f1b:v=2 4 3  # a group of three micro-batches: M is no multiple of the workers
    0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
    1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2

    looped-bfs:v=2 4 2
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """
)


@pytest.mark.parametrize(("name", "stages", "micro_batches", "table"), TABLES)
def test_the_order_is_that_of_the_table(name: str, stages: int, micro_batches: int, table: str) -> None:
    spec = ScheduleSpec.parse(name)
    found = spec.build(stages, micro_batches)
    assert str(found) == table
    assert parse_schedule(str(found)) == found
    assert spec.worker_map(stages) == ScheduleSpec.parse(str(found)).worker_map(stages) == found.worker_map
    assert not spec.splits_backward
    assert spec.warm_up(stages, micro_batches) is None
    assert spec.stages is None
    spec.check(stages, micro_batches)


def bubble(schedule: Schedule, forward: float, backward: float) -> float:
    """Return the largest over workers of last end - first start - work; seconds."""
    seconds = {"F": forward, "B": backward}
    idle = []
    for actions, ends in zip(schedule.workers, run_schedule(schedule, lambda a: seconds[a.kind]), strict=True):
        first = ends[0] - seconds[actions[0].kind]
        idle.append(ends[-1] - first - sum(seconds[action.kind] for action in actions))
    return max(idle)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("workers", [2, 3, 4, 8, 16])
def test_the_bubble_is_that_of_the_paper(workers: int, chunks: int) -> None:
    """Narayanan et al. and Lamy-Poirier: (p - 1) (f + b), of chunks that take f and b."""
    for micro_batches in (workers, 2 * workers, 4 * workers):
        interleaved = ScheduleSpec.parse(f"interleaved-1f1b:v={chunks}").build(workers * chunks, micro_batches)
        assert bubble(interleaved, 1, 2) == (workers - 1) * 3
        # A stash is a micro-batch on one chunk; the paper counts 1 + (p - 1) / (p v) of a whole worker's p v.
        most = min(workers * chunks + workers - 1, micro_batches * chunks)
        assert interleaved.stashes[0] == max(interleaved.stashes) == most
    for micro_batches in (workers, workers + 1, 3 * workers):
        breadth_first = ScheduleSpec.parse(f"looped-bfs:v={chunks}").build(workers * chunks, micro_batches)
        assert bubble(breadth_first, 1, 2) == (workers - 1) * 3
        assert set(breadth_first.stashes) == {micro_batches * chunks}


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_any_number_of_micro_batches_runs(workers: int, chunks: int) -> None:
    """Building a schedule checks that it runs to its end; the bubble is never that of 1F1B's v (p - 1) (f + b)."""
    for micro_batches in range(1, 20):
        found = ScheduleSpec.parse(f"interleaved-1f1b:v={chunks}").build(workers * chunks, micro_batches)
        assert found.micro_batches == micro_batches
        if micro_batches >= workers:
            assert bubble(found, 1, 2) <= chunks * (workers - 1) * 3


def test_with_one_stage_a_worker_they_are_1f1b_and_gpipe() -> None:
    assert ScheduleSpec.parse("looped-bfs:v=1").build(3, 4) == ScheduleSpec.parse("gpipe").build(3, 4)
    interleaved = ScheduleSpec.parse("interleaved-1f1b:v=1").build(3, 6)
    assert interleaved == ScheduleSpec.parse("K=5,3,1").build(3, 6)  # as DAPPLE's policy B


def test_a_batch_of_fewer_micro_batches_keeps_the_policy() -> None:
    assert str(ScheduleSpec.parse("interleaved-1f1b:v=2").truncate(3)) == "interleaved-1f1b:v=2"
    policy = ScheduleSpec.parse("looped-bfs")
    written = ScheduleSpec.parse(str(policy.build(4, 3)))
    assert written.truncate(2).build(4, 2) == policy.build(4, 2)


@pytest.mark.parametrize(
    ("name", "stages", "said"),
    [
        (
            "looped-bfs:v=3",
            4,
            "'looped-bfs:v=3' gives each worker 3 stages, but there are 4 in all: ask for a multiple of 3",
        ),
        ("interleaved-1f1b", 1, "'interleaved-1f1b' gives each worker 2 stages, but there are 1 in all"),
        ("interleaved-1f1b:v=0", 4, "v is 0; it must be between 1 and 1024"),
        ("interleaved-1f1b:D=2", 4, "interleaved-1f1b has no option D; it has v, as in interleaved-1f1b:v=2"),
        ("dapple-a:v=2", 4, "'dapple-a:v=2' is not a schedule such as"),
        (
            "interleaved1f1b:v=2",
            4,
            "no schedule is called 'interleaved1f1b' (did you mean 'interleaved-1f1b'?); there",
        ),
        ("Loped-BFS", 4, "no schedule is called 'loped-bfs' (did you mean 'looped-bfs'?)"),
        ("dapple_b:D=2", 4, "'K=3,2,1' (did you mean 'dapple-b'?)"),
    ],
)
def test_stages_that_do_not_fit_the_policy_are_refused(name: str, stages: int, said: str) -> None:
    for method in ("build", "check"):
        with refused(ScheduleError, said):
            getattr(ScheduleSpec.parse(name), method)(stages, 4)


def test_no_micro_batch_is_refused() -> None:
    with refused(ScheduleError, "M = 0: there must be at least one micro-batch"):
        ScheduleSpec.parse("looped-bfs").check(4, 0)


def test_only_schedules_with_several_stages_on_a_worker_are_chunked() -> None:
    chunked = ["interleaved-1f1b", "looped-bfs:v=3", "0F0 1F0 1B0 0B0"]
    one_stage = ["gpipe", "K=2,1", "zb-h1:D=2", "interleaved-1f1b:v=1", "0F0 0B0; 1F0 1B0", "1F0 1B0; 0F0 0B0"]
    assert [ScheduleSpec.parse(name).runs_several_stages for name in (*chunked, *one_stage)] == [True] * 3 + [False] * 6


def test_d_is_read_off_a_name() -> None:
    names = {"dapple-b:D=4": 4, "zb-h2": None, "K=2,1": None, "looped-bfs:v=2": None, "0F0 0B0": None}
    assert {name: ScheduleSpec.parse(name).limit for name in names} == names
