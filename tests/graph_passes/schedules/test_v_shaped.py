"""Zero bubble with several stages per worker, DualPipe-V and Hanayo: tables drawn by hand, and the papers' bubbles."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.schedule import Schedule, run_schedule
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec, parse_schedule
from dapple_tf.graph_passes.schedules.worker_map import WorkerMap
from tests.graph_passes.builders import refused
from tests.graph_passes.schedules.tables import read_tables

UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}

TABLES = read_tables(
    """
    interleaved-zb:v=2 4 2
    0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1

    zb-v 4 3
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    zb-v 4 2  # the order of three micro-batches without the third
    0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1
    1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1

    dualpipe-v 4 4
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
    1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3

    hanayo:w=1 4 2
    0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
    1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1

    hanayo:w=2 8 1
    0F0 3F0 4F0 7F0 7B0 4B0 3B0 0B0
    1F0 2F0 5F0 6F0 6B0 5B0 2B0 1B0
    """
)


@pytest.mark.parametrize(("name", "stages", "micro_batches", "table"), TABLES)
def test_the_order_is_that_of_the_table(name: str, stages: int, micro_batches: int, table: str) -> None:
    found = ScheduleSpec.parse(name).build(stages, micro_batches)
    assert str(found) == table
    assert parse_schedule(str(found)) == found
    assert (
        ScheduleSpec.parse(name).worker_map(stages)
        == ScheduleSpec.parse(str(found)).worker_map(stages)
        == found.worker_map
    )
    assert ScheduleSpec.parse(name).splits_backward == ("I" in table)
    assert ScheduleSpec.parse(name).runs_several_stages
    ScheduleSpec.parse(name)
    ScheduleSpec.parse(name).check(stages, micro_batches)


def bubble(schedule: Schedule, units: Mapping[str, int] = UNITS) -> float:
    """Return the largest over workers of last end - first start - work."""
    idle = []
    for actions, ends in zip(schedule.workers, run_schedule(schedule, lambda a: units[a.kind]), strict=True):
        first = ends[0] - units[actions[0].kind]
        idle.append(ends[-1] - first - sum(units[action.kind] for action in actions))
    return max(idle)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8, 16])
def test_zb_v_has_no_bubble_at_the_memory_of_1f1b(workers: int) -> None:
    """Qi et al., 2024: F = I = W, M >= 2 p - 1; a stash is a micro-batch on half of a worker's layers."""
    for micro_batches in (2 * workers - 1, 2 * workers, 4 * workers):
        found = ScheduleSpec.parse("zb-v").build(2 * workers, micro_batches)
        assert bubble(found) == 0
        assert max(found.stashes) == 2 * workers
        assert found.worker_map == WorkerMap.waves(workers, 2)


@pytest.mark.parametrize("workers", [2, 3, 4, 8, 16])
def test_interleaved_zero_bubble_has_the_bubble_of_zb_h1_divided_by_v(workers: int) -> None:
    """(p - 1) (F + I - W) of one chunk's times, where ZB-H1 has that of all v chunks."""
    for chunks in (1, 2, 3, 4):
        for micro_batches in (workers, 2 * workers, 4 * workers):
            found = ScheduleSpec.parse(f"interleaved-zb:v={chunks}").build(chunks * workers, micro_batches)
            assert bubble(found) == workers - 1
            assert set(found.stashes) == {workers * chunks}
    assert ScheduleSpec.parse("interleaved-zb:v=1").build(workers, 20) == ScheduleSpec.parse("zb-h1").build(workers, 20)


@pytest.mark.parametrize("units", [UNITS, {"F": 2, "B": 3, "I": 2, "W": 1}, {"F": 3, "B": 5, "I": 3, "W": 2}])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8, 16])
def test_the_bubble_of_dualpipe_v(workers: int, units: Mapping[str, int]) -> None:
    for micro_batches in (2 * workers, 2 * workers + 1, 4 * workers):
        found = ScheduleSpec.parse("dualpipe-v").build(2 * workers, micro_batches)
        assert bubble(found, units) == (workers - 1) * (units["F"] + units["B"] - 2 * units["W"])
        assert max(found.stashes) == 2 * workers + 1


def test_dualpipe_v_mixes_whole_backwards_and_halves() -> None:
    found = ScheduleSpec.parse("dualpipe-v").build(8, 16)
    assert {action.kind for action in found.workers[1]} == {"F", "B", "I", "W"}
    assert ScheduleSpec.parse("dualpipe-v").ends_split(4, 4) == {0, 1, 2}
    assert ScheduleSpec.parse("zb-v").ends_split(4, 4) == {0, 1, 2, 3}
    assert ScheduleSpec.parse("hanayo").ends_split(4, 4) == frozenset()


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_one_wave_of_hanayo_waits_less_than_1f1b(workers: int) -> None:
    """Of stages that are two of Hanayo's, 1F1B waits for 2 (p - 1) (F + B) with these units."""
    assert bubble(ScheduleSpec.parse("hanayo").build(2 * workers, workers)) == 4 * (workers - 1)
    for micro_batches in (2 * workers, 4 * workers):
        found = ScheduleSpec.parse("hanayo:w=1").build(2 * workers, micro_batches)
        assert bubble(found) == 3 * (workers - 1)
        assert max(found.stashes) <= 3 * workers


@pytest.mark.parametrize("name", ["interleaved-zb:v=3", "zb-v", "dualpipe-v", "hanayo:w=2"])
def test_any_number_of_micro_batches_runs(name: str) -> None:
    for workers in (1, 2, 3, 5):
        stages = workers * {"interleaved-zb:v=3": 3, "hanayo:w=2": 4}.get(name, 2)
        for micro_batches in range(1, 15):  # building a schedule checks that it runs to its end
            assert ScheduleSpec.parse(name).build(stages, micro_batches).micro_batches == micro_batches


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("zb-v:v=2", "'zb-v:v=2': zb-v has no option v; it has none"),
        ("dualpipe-v", "'dualpipe-v' gives each worker 2 stages, but there are 5 in all: ask for a multiple of 2"),
        ("hanayo:w=2", "'hanayo:w=2' gives each worker 4 stages, but there are 5 in all: ask for a multiple of 4"),
        ("hanayo:w=0", "'hanayo:w=0': w is 0; it must be between 1 and 512"),
        ("hanayo:v=1", "'hanayo:v=1': hanayo has no option v; it has w, as in hanayo:w=1"),
    ],
)
def test_stages_that_do_not_fit_the_policy_are_refused(name: str, said: str) -> None:
    with refused(ScheduleError, said):
        ScheduleSpec.parse(name).build(5, 4)
