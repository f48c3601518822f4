"""``dapple schedules``: a schedule as a grid and a picture, and the list of names."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapple_tf.graph_passes.schedules.spec import NAMES, ScheduleSpec
from dapple_tf.timeline.trace_file import read_recording
from tests.dapple_tf.commands.conftest import Run


def test_a_schedule_is_printed_with_the_bubble_and_the_stashes_of_each_worker(run_here: Run) -> None:
    run = run_here("schedules", "interleaved-1f1b", "--micro-batches", "4", "--json")
    grid = run.stdout.splitlines()
    assert grid[1].startswith("stages 1,3  .   1F0 1F1 3F0 3B0---- 3F1")
    assert grid[2] == "worker 0: stages 0, 2; works 24 of 27 units, bubble 3 (11.1%); at most 5 stashes"
    assert run.json["schedule"] == str(ScheduleSpec.parse("interleaved-1f1b").build(4, 4))
    assert [(w["stages"], w["idle"], w["stashes"]) for w in run.json["workers"]] == [([0, 2], 3, 5), ([1, 3], 0, 3)]


def test_units_of_time_are_those_given(run_here: Run) -> None:
    run = run_here("schedules", "gpipe", "--stages", "2", "--micro-batches", "1", "--forward", "2", "--backward", "3")
    assert "worker 0: stage 0; works 5 of 10 units, bubble 5 (50.0%); at most 1 stash" in run.stdout


def test_weight_gradients_are_a_part_of_the_backward(run_here: Run) -> None:
    """F0 and F1 take 1, I0 1 of the backward's 3 and W0 2, and B1 all 3."""
    text = "0F0 0F1 0I0 0B1 0W0"
    run = run_here("schedules", text, "--backward", "3", "--weight-gradients", "2", "--json")
    lines = run.stdout.splitlines()
    assert lines[0] == "stage 0  0F0 0F1 0I0 0B1-------- 0W0----"
    assert lines[1] == "worker 0: stage 0; works 8 of 8 units, bubble 0 (0.0%); at most 2 stashes"
    assert run.json["schedule"] == text
    assert run_here("schedules", "zb-h1", "--stages", "1", "--micro-batches", "1").stdout.splitlines()[0] == (
        "stage 0  0F0 0I0 0W0"
    )


def test_b_beside_w_in_a_text_is_shown_as_i(run_here: Run) -> None:
    shown = run_here("schedules", "0F0 0F1 0B0 0W0 0B1", "--json")
    assert shown.stdout.splitlines()[0] == "stage 0  0F0 0F1 0I0 0W0 0B1----"
    assert shown.json["workers"][0]["actions"] == "0F0 0F1 0I0 0W0 0B1"


def test_units_of_weight_gradients_do_not_matter_where_no_backward_is_split(run_here: Run) -> None:
    assert "works 4 of 4 units" in run_here("schedules", "0F0 0B0", "--backward", "3", "--weight-gradients", "3").stdout


def test_a_text_says_its_own_stages_and_micro_batches(run_here: Run) -> None:
    assert "0F0 .   .   3F0 3B0" in run_here("schedules", "0F0 3F0 3B0 0B0; 1F0 2F0 2B0 1B0", "--backward", "1").stdout


def test_without_a_schedule_the_names_are_listed(run_here: Run) -> None:
    listed = run_here("schedules").stdout
    for name in NAMES:
        assert name in listed
        ScheduleSpec.parse(name)


@pytest.mark.parametrize("suffix", ["png", "html", "json"])
@pytest.mark.parametrize("schedule", ["zb-h1", "0F0 0F1 0B0 0I1 0W1; 1F0 1I0 1F1 1B1 1W0"])
def test_a_picture_is_saved(run_here: Run, tmp_path: Path, schedule: str, suffix: str) -> None:
    path = tmp_path / f"grid.{suffix}"
    assert f"picture: {path}" in run_here("schedules", schedule, "-o", str(path)).stdout
    assert path.stat().st_size > 1000


def test_a_picture_shows_the_times_of_the_grid(run_here: Run, tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    run_here("schedules", "0F0 0F1 0I0 0B1 0W0", "--backward", "3", "--weight-gradients", "2", "-o", str(path))
    spans = {str(e.action): (e.start, e.end) for e in read_recording(path).shown.events}
    assert spans == {"0F0": (0, 1), "0F1": (1, 2), "0I0": (2, 3), "0B1": (3, 6), "0W0": (6, 8)}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nix"], "no schedule is called 'nix'"),
        (["looped-bfs:v=3"], "gives each worker 3 stages, but there are 4 in all"),
        (["gpipe", "-o", "grid.pdf"], "error: --output: grid.pdf: a timeline is saved as"),
        (["-o", "absent/grid.png"], "--output draws a SCHEDULE: name one"),
        (
            ["zb-h1", "--backward", "2", "--weight-gradients", "2"],
            "--weight-gradients 2 is part of --backward 2: it",
        ),
        (["0F0 0F1 0B0 0I1 0W1", "--backward", "1"], "--weight-gradients 1 is part of --backward 1: it must be less"),
        (
            ["0F0 0I0"],
            "stage 0 must run F, and B or both I and W, of each micro-batch once; missing or unexpected: 0W0",
        ),
        (["gpipe", "--weight-gradients", "0"], "Invalid value for '--weight-gradients'"),
        (["gpipe", "--stages", "0"], "Invalid value for '--stages'"),
    ],
)
def test_what_cannot_be_printed_is_refused(run_here: Run, arguments: list[str], said: str) -> None:
    run = run_here("schedules", *arguments)
    assert (run.code, run.stdout) == (2, "")
    assert said in run.stderr
