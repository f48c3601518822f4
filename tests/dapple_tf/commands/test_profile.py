"""``dapple profile``, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dapple_tf as dapple
from dapple_tf.cli import main
from dapple_tf.commands.profile_table import group_layers
from profiler.profile import LayerCost
from tests.paths import ROOT

MODEL = '''
import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple


def net(layers=2, batch_size=8, fails=False):
    """Dense layers on one batch of random numbers."""
    stack = [keras.layers.Dense(4, "tanh", name=f"dense_{i}") for i in range(layers)]
    model = keras.Sequential([keras.Input((3,)), *stack], name="net")

    def loss(x):
        if fails:
            tf.debugging.assert_less(tf.reduce_max(x), 0.0, "positive")
        return tf.reduce_mean(tf.square(model(x)))

    data = np.random.RandomState(0).randn(batch_size, 3).astype("float32")
    return dapple.Workload(loss, keras.optimizers.SGD(0.01), [(data,)])
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny_profiled_model.py"
    path.write_text(MODEL)
    return f"{path}:net"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], model: str) -> Callable[..., Any]:
    """Run ``dapple profile MODEL`` here: (exit code, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dapple", "profile", model, *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capfd.readouterr()

    return run


def test_a_profile_in_a_process_of_its_own(model: str, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "p.json"
    words = [
        "profile",
        model,
        "-o",
        str(path),
        "--repeats",
        "2",
        "--batch-sizes",
        "2, 16",
        "--batch-size",
        "6",
        "--json",
    ]
    run = subprocess.run(
        [sys.executable, "-m", "dapple_tf", *words],
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr
    found = dapple.Profile.load(path)
    assert (found.model, found.batch_size) == ("net", 6)
    assert [timing.batch_size for timing in found.timings] == [2, 16]
    *_, where, last = run.stdout.splitlines()
    assert where == f"profile: {path}"
    result = json.loads(last)
    assert result["layers"] == len(found.layers)
    assert result["forward_seconds"] == pytest.approx(sum(layer.forward_seconds for layer in found.layers))
    assert result["parameter_bytes"] == 4 * (3 * 4 + 4 + 4 * 4 + 4)
    assert result["error"] == found.error
    assert found.whole is not None
    assert "net/dense_0" in run.stdout
    assert "the whole model takes" in run.stdout
    assert os.listdir(path.parent) == ["p.json"]


def test_an_analytic_profile(command: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    code, out, err = command("-o", path, "--device", "a100", "--json", "--set", "fails=True")  # which it would, if run
    assert code == 0, err
    found = dapple.Profile.load(path)
    assert (found.device, found.batch_size, found.whole) == ("A100 (analytic)", 8, None)
    assert "net on A100 (analytic), 8 samples" in out
    result = json.loads(out.splitlines()[-1])
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
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = command(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert os.listdir(tmp_path) == []


def test_a_wrong_option_of_the_model_exits_with_2(command: Callable[..., Any], tmp_path: Path) -> None:
    code, _, err = command("-o", tmp_path / "p.json", "--set", "width=3")
    assert code == 2
    assert "has no option 'width'; it has" in err


def test_a_path_that_cannot_be_written_fails_before_the_model_is_made(command: Callable[..., Any]) -> None:
    code, out, err = command("-o", "setup.py/p.json", "--set", "width=3")
    assert (code, out) == (1, "")
    assert err.startswith("error: setup.py/p.json")


def test_a_model_that_fails_leaves_no_file(command: Callable[..., Any], tmp_path: Path) -> None:
    code, _, err = command("-o", tmp_path / "p.json", "--set", "fails=True", "--repeats", 1)
    assert code == 1
    (line,) = err.splitlines()
    assert line.startswith("error: the model failed on this batch, un-pipelined: assertion failed: [positive]")
    assert os.listdir(tmp_path) == []


def costs(*names: str) -> list[LayerCost]:
    return [LayerCost(name, 1, 2, 3, 4, 5) for name in names]


def test_few_layers_stand_for_themselves() -> None:
    assert [name for name, _ in group_layers(costs("a/b", "a/c", "d"), 3)] == ["a/b", "a/c", "d"]


def test_many_layers_are_grouped_by_the_beginning_of_their_paths() -> None:
    groups = group_layers(costs("n/a/x", "n/a/y", "n/b/x", "n/b/y", "n/a/z", "loss"), 4)
    assert [(name, len(layers)) for name, layers in groups] == [("n/a", 2), ("n/b", 2), ("n/a", 1), ("loss", 1)]
    groups = group_layers(costs("n/a/x", "n/a/y", "n/b/x", "n/b/y", "n/a/z", "loss"), 3)
    assert [(name, len(layers)) for name, layers in groups] == [("n", 5), ("loss", 1)]


def test_layers_that_have_nothing_in_common_are_grouped_by_number() -> None:
    groups = group_layers(costs(*"abcdefg"), 3)
    assert [(name, len(layers)) for name, layers in groups] == [("a ..", 3), ("d ..", 3), ("g ..", 1)]
