"""Ranks that run several stages each: one device's results, the schedule's order, checkpoints for other divisions."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from tests.dapple_tf.distributed.launches import Launches
from tests.dapple_tf.distributed.programs.shared_devices import MICRO_BATCHES, SCHEDULE
from tests.dapple_tf.distributed.train_command import losses_of_one_process, printed_result, saving_in, train_arguments
from tests.processes import RanksError, needs_horovod, run_ranks

pytestmark = needs_horovod
WORKERS = ScheduleSpec.parse(SCHEDULE).build(4, MICRO_BATCHES).workers


@pytest.fixture
def ranks(launches: Launches) -> list[dict[str, Any]]:
    """Return the results of two ranks: the first runs stages 0 and 2, the other 1 and 3."""
    return launches.results("two ranks", "shared_devices")


def test_all_that_a_step_computes_equals_one_device(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert max(found["errors"].values()) <= 1e-12, found["errors"]
        assert len(found["errors"]) == 1 + 4 + 4 + 4


def test_a_rank_needs_the_rows_that_any_of_its_stages_takes(ranks: list[dict[str, Any]]) -> None:
    assert [found["needs"] for found in ranks] == [{"0": True, "1": False}, {"0": False, "1": True}]


def test_a_recorded_step_has_each_rank_s_actions_in_the_schedule_s_order(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["events"] == ranks[1]["events"]
    for rank, actions in enumerate(WORKERS):
        ran = [action for action, device, _, _ in ranks[0]["events"] if device == f"rank:{rank}"]
        assert ran == [str(action) for action in actions]


def test_every_boundary_between_the_two_ranks_has_its_transfers(ranks: list[dict[str, Any]]) -> None:
    ends = {action: (start, end) for action, _, start, end in ranks[0]["events"]}
    seen = set()
    for source, target, m, start, end in ranks[0]["transfers"]:
        kind = "F" if source < target else "B"
        assert ends[f"{source}{kind}{m}"][1] <= start <= end
        assert start <= ends[f"{target}{kind}{m}"][0]
        seen.add((source, target, m))
    boundaries = [pair for first in range(3) for pair in ((first, first + 1), (first + 1, first))]
    assert seen == {(*pair, m) for pair, m in itertools.product(boundaries, range(MICRO_BATCHES))}


def test_a_picture_has_a_row_for_each_rank_beside_the_prediction(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["rows"] == ["stages 0,2", "stages 1,3"]
    assert all(found["predicted"] for found in ranks)


def test_the_memory_report_says_what_was_measured_of_all_stages_of_a_rank(ranks: list[dict[str, Any]]) -> None:
    report = ranks[0]["report"]
    assert report == ranks[1]["report"]
    assert [stage["seen"] for stage in report["stages"]] == [stage["most_held"] for stage in report["stages"]]
    measured = [stage["measured"]["above_start"] for stage in report["stages"]]
    assert measured == [*measured[:2], *measured[:2]]
    assert len(re.findall(r"in step of stages 0, 2$", report["text"], re.MULTILINE)) == 2


def test_a_rank_reports_all_its_stages(ranks: list[dict[str, Any]]) -> None:
    assert [found["stages"] for found in ranks] == [[0, 2], [1, 3]]


# --- dapple train


def sharing(schedule: str, stages: int) -> list[object]:
    return ["--stages", stages, "--schedule", schedule]


def test_checkpoints_resume_with_other_stages_per_rank(tmp_path: Path) -> None:
    """Two stages per rank, then three on each of two replicas, then two on each of two replicas of two workers."""
    found = []
    for layout, ranks, steps, options in (
        ("1,1", 2, 3, sharing(SCHEDULE, 4)),
        ("2", 2, 6, sharing("looped-bfs:v=3", 3)),
        ("2,2", 4, 9, sharing(SCHEDULE, 4)),
        ("1,1", 2, 12, sharing("dapple-a", 2)),
    ):
        done = run_ranks(train_arguments(layout, steps, *saving_in(tmp_path), *options), ranks, timeout_seconds=90)
        found += printed_result(done)["losses"]
    np.testing.assert_allclose(found, losses_of_one_process(12), rtol=1e-12)


def test_a_rank_that_is_killed_is_named_with_all_its_stages(tmp_path: Path) -> None:
    options = ["--set", "kill_rank=1", "--set", "at_batch=4", *sharing(SCHEDULE, 4)]
    with pytest.raises(RanksError) as caught:
        run_ranks(train_arguments("1,1", 9, *options), 2, timeout_seconds=90)
    assert "rank 0 (stages 0, 2) stops: rank 1 (stages 1, 3), " in caught.value.ranks[0].stderr


def test_a_plan_for_fewer_ranks_is_refused_on_all(tmp_path: Path) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(train_arguments("1,1", 3, *sharing(SCHEDULE, 4)), 3, timeout_seconds=90)
    said = "what was asked for, 4 stages with replicas [1, 1, 1, 1], uses 2 ranks, [0, 1], but the job has 3"
    assert said in caught.value.ranks[0].stderr
