"""``dapple profile``: a measured profile, a computed one, and the table of layers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import dapple_tf as dapple
from dapple_tf.commands.profile import group_layers
from dapple_tf.profiler.profile import LayerCost
from tests.dapple_tf.commands.command_line import TINY_MODEL, Run, run_process

PROFILE = ("profile", TINY_MODEL)


def test_a_measured_profile_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    options = ("--repeats", 2, "--batch-sizes", "2, 16", "--batch-size", 6, "--json")
    run = run_process(*PROFILE, "-o", path, *options)
    result = run.json
    assert "Traceback" not in run.stderr
    found = dapple.Profile.load(path)
    assert (found.model, found.batch_size) == ("tiny", 6)
    assert [timing.batch_size for timing in found.timings] == [2, 16]
    assert run.stdout.splitlines()[-2] == f"profile: {path}"
    assert result["layers"] == len(found.layers)
    assert result["forward_seconds"] == pytest.approx(sum(layer.forward_seconds for layer in found.layers))
    assert result["parameter_bytes"] == 4 * (3 * 4 + 4 + 4 * 1 + 1)
    assert result["error"] == found.error
    assert found.whole is not None
    assert "net/one" in run.stdout
    assert "the whole model takes" in run.stdout
    assert os.listdir(path.parent) == ["p.json"]


def test_a_computed_profile_runs_nothing(run_here: Run, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    run = run_here(*PROFILE, "-o", path, "--device", "a100", "--json", "--set", "fails=True")  # it would fail if run
    result = run.json
    found = dapple.Profile.load(path)
    assert (found.device, found.batch_size, found.whole) == ("A100 (analytic)", 8, None)
    assert "tiny on A100 (analytic), 8 samples" in run.stdout
    assert result["disagreement"] is None
    assert result["backward_seconds"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "Missing option '-o'"),
        (("-o", "p.json", "--batch-sizes", "2;4"), "--batch-sizes 2;4: give numbers of samples, such as 2,4,16"),
        (("-o", "p.json", "--batch-sizes", "4,0"), "--batch-sizes 4,0: give numbers of samples"),
        (("-o", "p.json", "--batch-sizes", ""), "--batch-sizes : give numbers of samples"),
        (("-o", "p.json", "--repeats", 0), "0 is not in the range x>=1"),
        (("-o", "p.json", "--batch-size", 0), "0 is not in the range x>=1"),
        (("-o", "p.json", "--device", "K80"), "'K80' is not one of 'v100', 'a100', 'h100'"),
        (("-o", "p.json", "--device", "V100", "--batch-sizes", 2), "leave one out"),
    ],
)
def test_wrong_usage_exits_with_2(
    run_here: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_here(*PROFILE, *words)
    assert (run.code, run.stdout) == (2, "")
    assert message in run.stderr
    assert os.listdir(tmp_path) == []


def test_an_unknown_option_of_the_model_exits_with_2(run_here: Run, tmp_path: Path) -> None:
    run = run_here(*PROFILE, "-o", tmp_path / "p.json", "--set", "depth=3")
    assert run.code == 2
    assert "has no option 'depth'; it has" in run.stderr


def test_a_path_that_cannot_be_written_fails_before_the_model_is_made(run_here: Run) -> None:
    run = run_here(*PROFILE, "-o", "setup.py/p.json", "--set", "depth=3")
    assert (run.code, run.stdout) == (2, "")
    assert "error: --output: setup.py/p.json: setup.py is a file, not a folder" in run.stderr


def test_a_model_that_fails_leaves_no_file(run_here: Run, tmp_path: Path) -> None:
    run = run_here(*PROFILE, "-o", tmp_path / "p.json", "--set", "fails=True", "--repeats", 1)
    assert run.code == 1
    line = run.stderr.splitlines()[-1]  # TensorFlow may log the failure before
    assert line.startswith("error: the model failed on this batch, un-pipelined: assertion failed: [positive]")
    assert "Traceback" not in run.stderr
    assert os.listdir(tmp_path) == []


def costs(*names: str) -> list[LayerCost]:
    return [LayerCost(name, 1, 2, 3, 4, 5) for name in names]


def test_few_layers_are_not_grouped() -> None:
    assert [name for name, _ in group_layers(costs("a/b", "a/c", "d"), 3)] == ["a/b", "a/c", "d"]


def test_many_layers_are_grouped_by_the_prefix_of_their_paths() -> None:
    groups = group_layers(costs("n/a/x", "n/a/y", "n/b/x", "n/b/y", "n/a/z", "loss"), 4)
    assert [(name, len(layers)) for name, layers in groups] == [("n/a", 2), ("n/b", 2), ("n/a", 1), ("loss", 1)]
    groups = group_layers(costs("n/a/x", "n/a/y", "n/b/x", "n/b/y", "n/a/z", "loss"), 3)
    assert [(name, len(layers)) for name, layers in groups] == [("n", 5), ("loss", 1)]


def test_layers_without_a_common_prefix_are_grouped_by_number() -> None:
    groups = group_layers(costs(*"abcdefg"), 3)
    assert [(name, len(layers)) for name, layers in groups] == [("a ..", 3), ("d ..", 3), ("g ..", 1)]
