"""``dapple schedules``: a schedule as a grid and a picture, and the list of names."""

from __future__ import annotations

from pathlib import Path

import pytest

from graph_passes.schedules.policies import NAMES, build_schedule, check_schedule_name
from tests.dapple_tf.commands.conftest import Run


def test_a_schedule_is_printed_with_the_bubble_and_the_stashes_of_each_worker(run_here: Run) -> None:
    run = run_here("schedules", "interleaved-1f1b", "--micro-batches", "4", "--json")
    grid = run.stdout.splitlines()
    assert grid[1].startswith("stages 1,3  .   1F0 1F1 3F0 3B0---- 3F1")
    assert grid[2] == "worker 0: stages 0, 2; works 24 of 27 units, bubble 3 (11.1%); at most 5 stashes"
    assert run.json["schedule"] == str(build_schedule("interleaved-1f1b", 4, 4))
    assert [(w["stages"], w["idle"], w["stashes"]) for w in run.json["workers"]] == [([0, 2], 3, 5), ([1, 3], 0, 3)]


def test_units_of_time_are_those_given(run_here: Run) -> None:
    run = run_here("schedules", "gpipe", "--stages", "2", "--micro-batches", "1", "--forward", "2", "--backward", "3")
    assert "worker 0: stage 0; works 5 of 10 units, bubble 5 (50.0%); at most 1 stash" in run.stdout


def test_a_text_says_its_own_stages_and_micro_batches(run_here: Run) -> None:
    assert "0F0 .   .   3F0 3B0" in run_here("schedules", "0F0 3F0 3B0 0B0; 1F0 2F0 2B0 1B0", "--backward", "1").stdout


def test_without_a_schedule_the_names_are_listed(run_here: Run) -> None:
    listed = run_here("schedules").stdout
    for name in NAMES:
        assert name in listed
        check_schedule_name(name)


@pytest.mark.parametrize("suffix", ["png", "html", "json"])
def test_a_picture_is_saved(run_here: Run, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"grid.{suffix}"
    assert f"picture: {path}" in run_here("schedules", "zb-h1", "-o", str(path)).stdout
    assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nix"], 1, "no schedule is called 'nix'"),
        (["looped-bfs:v=3"], 1, "gives each worker 3 stages, but there are 4 in all"),
        (["gpipe", "-o", "grid.pdf"], 1, "grid.pdf: a timeline is saved as"),
        (["gpipe", "--stages", "0"], 2, "Invalid value for '--stages'"),
    ],
)
def test_what_cannot_be_printed_is_refused(run_here: Run, arguments: list[str], code: int, said: str) -> None:
    run = run_here("schedules", *arguments)
    assert (run.code, run.stdout) == (code, "")
    assert said in run.stderr
