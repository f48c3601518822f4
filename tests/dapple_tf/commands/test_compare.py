"""``dapple compare``: its table, files, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dapple_tf.commands.parameter_types import PLANNER_NAMES
from dapple_tf.planner.registry import PLANNERS
from tests.dapple_tf.commands.command_line import Run
from tests.dapple_tf.planner.builders import make_cluster, make_profile


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with a profile and two clusters, where the commands run."""
    monkeypatch.chdir(tmp_path)
    make_profile((1, 2, 4, 4, 10), (1, 2, 4, 4, 10), (2, 4, 4, 4, 10)).save("profile.json")
    make_cluster(2).save("cluster.yaml")
    make_cluster(2, memory=20).save("small.yaml")
    return tmp_path


COMPARE = ("compare", "profile.json", "--cluster", "cluster.yaml", "--global-batch-size", 8)


def test_the_help_names_all_planners(run_here: Run) -> None:
    assert tuple(PLANNERS) == PLANNER_NAMES
    assert set(PLANNERS) <= set(run_here("plan", "--help").stdout.replace(",", " ").replace(".", " ").split())


def test_all_planners_are_compared_and_progress_goes_to_stderr(run_here: Run) -> None:
    run = run_here(*COMPARE, "--json")
    assert {row["planner"] for row in run.json["rows"]} == set(PLANNERS)
    assert run.json["rows"][0]["planner"] == run.json["fastest"]
    assert run.json["rows"][0]["step_seconds"] == pytest.approx(12 + 1.5 + 0.2)
    assert "net on 2 devices, a batch of 8 samples" in run.stdout
    assert all(f"plans with planner {name}" in run.stderr for name in PLANNERS)
    assert "plans with" not in run.stdout


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("html", b"<!DOCTYPE"), ("json", b"{")])
def test_a_comparison_is_saved(run_here: Run, suffix: str, start: bytes) -> None:
    run = run_here(*COMPARE, "--planners", "dp,gpipe", "-o", f"c.{suffix}")
    assert run.code == 0, run.stderr
    assert f"comparison: c.{suffix}" in run.stdout
    assert Path(f"c.{suffix}").read_bytes().startswith(start)


def test_options_reach_the_planners(run_here: Run) -> None:
    options = ("--planners", "dp", "--micro-batch-size", 4, "--schedule", "gpipe", "--recompute", "--overlap", "--json")
    (row,) = run_here(*COMPARE, *options).json["rows"]
    assert (row["plan"]["micro_batch_size"], row["plan"]["schedule"]) == (4, "gpipe")
    assert (row["plan"]["recompute"], row["plan"]["overlap"]) == (True, True)


def test_where_no_planner_has_a_plan_it_fails_after_the_table(run_here: Run) -> None:
    run = run_here("compare", "profile.json", "--cluster", "small.yaml", "--global-batch-size", 8, "--planners", "dp")
    assert run.code == 1
    assert "dp: no plan that it may choose fits" in run.stdout
    assert "no planner has a plan for 'net'" in run.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((*COMPARE, "-o", "c.txt"), "c.txt: a comparison is saved as .png, .html or .json"),
        ((*COMPARE, "-o", "profile.json/c.png"), "profile.json"),
        (("compare", "none.json", *COMPARE[2:]), "none.json"),
        ((*COMPARE[:3], "none.yaml", *COMPARE[4:]), "none.yaml: there is no such file"),
        ((*COMPARE, "--planners", "dp,megatron"), "'megatron'; there are best"),
        ((*COMPARE[:4], "--global-batch-size", 0), "--global-batch-size"),
        (COMPARE[:4], "--global-batch-size"),
    ],
)
def test_wrong_usage_is_told_before_any_planner_runs(run_here: Run, words: tuple[object, ...], told: str) -> None:
    run = run_here(*words)
    assert run.code == 2
    assert told in run.stderr
    assert "plans with" not in run.stderr
    assert not run.stdout


def test_a_profile_that_is_none_fails(run_here: Run) -> None:
    Path("broken.json").write_text(json.dumps({"format": "dapple-profile/1"}))
    run = run_here("compare", "broken.json", *COMPARE[2:])
    assert run.code == 2
    assert "broken.json" in run.stderr
