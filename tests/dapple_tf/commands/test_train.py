"""The command line, as a user runs it: what goes to stdout and stderr, exit codes, and errors of one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dapple_tf.cli import main
from dapple_tf.plan import Plan
from tests.dapple_tf.commands.test_tensorboard import read_curves
from tests.paths import ROOT

MODEL = '''
import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple


def tiny(width=4, batch_size=8, seed=1, mask=False, empty=False, bad=False):
    """Two dense layers on four batches of random numbers."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(width, "tanh", name="one"), keras.layers.Dense(1, name="two")]
    model = keras.Sequential([keras.Input((3,)), *layers], name="net")
    numbers = np.random.RandomState(seed)
    data = [(numbers.randn(batch_size, 3).astype("float32"), numbers.rand(batch_size, 1) > 0.4) for _ in range(4)]
    if bad:
        data[2] = (data[2][0] * np.inf, data[2][1])

    def loss(x, y):
        keep = tf.cast(y, tf.float32)
        error = tf.square(model(x) - 1)
        return tf.reduce_sum(error * keep) / tf.reduce_sum(keep) if mask else tf.reduce_mean(error * keep)

    return dapple.Workload(loss, keras.optimizers.Adam(0.01), [] if empty else data)


def fixed():
    return tiny()


def broken():
    raise ValueError("the user's own mistake")
'''

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny_cli_model.py"
    path.write_text(MODEL)
    return f"{path}:tiny"


def dapple(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    command = [sys.executable, "-m", "dapple_tf", *map(str, arguments)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


def last(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON object on the last line of stdout."""
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


# --- whole runs, in processes of their own


@pytest.fixture(scope="module")
def trained(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    trace = tmp_path_factory.mktemp("trace") / "deep" / "t.json"
    options = ("--stages", 2, "--micro-batches", 2, "--steps", 6, "--json", "--seed", 3, "--trace", trace)
    return dapple("train", model, *options, "--tensorboard", trace.parents[1] / "curves"), trace


def test_train_prints_results_to_stdout_and_progress_to_stderr(
    trained: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    run, trace = trained
    result = last(run)
    assert result["steps"] == 6
    assert result["last_loss"] < result["first_loss"]
    assert result["samples_per_second"] > 0
    assert (result["plan"]["micro_batches"], len(result["plan"]["stages"])) == (2, 2)
    assert result["trace"] == str(trace)
    assert "2 stages, 2 micro-batches of 4 samples, schedule dapple-a" in run.stdout
    assert "stage 1, device 1: " in run.stdout
    assert "training 6: loss" in run.stderr
    assert "training" not in run.stdout
    assert "Traceback" not in run.stderr


def test_train_saves_a_timeline_of_every_action(trained: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    rows = json.loads(trained[1].read_text())["traceEvents"]
    processes = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert processes == {0: "predicted: stages", 1: "measured: stages"}
    for pid in processes:
        names = [row["name"] for row in rows if row["ph"] == "X" and row["pid"] == pid]
        actions = [name for name in names if name != "update"]
        assert sorted(actions) == sorted(f"{stage}{kind}{m}" for stage in range(2) for kind in "FB" for m in range(2))
        assert "update" in names  # of the stages that have weights


def test_train_tells_what_made_the_step_so_long(trained: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    run, _ = trained
    found = last(run)["timeline"]
    assert set(found["critical_path_seconds"]) == {"compute", "transfer", "allreduce", "update", "waiting"}
    assert sum(found["critical_path_seconds"].values()) == pytest.approx(found["step_seconds"])
    assert found["predicted"]["source"] == "simulated with the measured times of each action"
    assert "measured: " in run.stdout
    assert "critical path: compute " in run.stdout
    assert "the simulated step is " in run.stdout


def test_train_tells_the_memory_of_every_stage(trained: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    """Predicted before the first step; measured too where a step was recorded."""
    run, _ = trained
    found = last(run)["memory"]
    assert [(stage["most_held"], stage["seen"]) for stage in found["stages"]] == [(2, 2), (1, 1)]
    assert sum(stage["weights"] for stage in found["stages"]) > 0
    assert found["measured"]["device"] == "CPU"
    before, _, after = run.stdout.partition("loss ")
    assert "memory of one device of each of 2 stages" in before
    assert "all stages in the recorded step" not in before
    assert "all stages in the recorded step: " in after


@pytest.mark.filterwarnings("ignore")  # TensorFlow calls its only reader deprecated
def test_train_writes_curves_of_every_step(trained: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    run, trace = trained
    curves = read_curves(trace.parents[1] / "curves")
    assert [number for number, _ in curves["loss"]] == list(range(1, 7))
    assert [loss for _, loss in curves["loss"]] == pytest.approx(last(run)["losses"])
    recorded = [number for number, _ in curves["bubble"]]
    assert recorded[:4] == [1, 2, 3, 4], "these show what recording costs"
    assert recorded[-2:] == [5, 6], "of these the trace is"
    assert last(run)["tensorboard"] == str(trace.parents[1] / "curves")


def test_a_trace_is_read_drawn_and_told(
    trained: tuple[subprocess.CompletedProcess[str], Path], tmp_path: Path, command: Callable[..., Any]
) -> None:
    run, trace = trained
    code, out, err = command("timeline", trace, "-o", tmp_path / "t.png", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out.splitlines()[-1]) == last(run)["timeline"]
    assert out.splitlines()[0].startswith("tiny: dapple-a, M = 2 · ")
    assert "slowest for their kind: " in out
    assert f"timeline: {tmp_path}/t.png" in out
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"


def test_a_trace_that_is_none_is_told_in_one_line(command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"traceEvents": []}')
    code, out, err = command("timeline", tmp_path / "t.json")
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {tmp_path}/t.json: a trace, but not one that dapple_tf saved")
    code, _, err = command("timeline", "absent.json", "-o", "t.gif")
    assert code == 1
    assert err.startswith("error: t.gif: a timeline is saved as"), "before anything is read"


def test_a_plan_files_prediction_is_held_against_the_run(
    command: Callable[..., Any], model: str, tmp_path: Path
) -> None:
    plan = {
        "format": "dapple-plan/1",
        "model": "tiny",
        "planner": "test",
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "micro_batches": 2,
        "schedule": "gpipe",
        "recompute": False,
        "stages": [{"first_layer": 0, "last_layer": 1, "devices": [0]}],
        "predicted": {"step_seconds": 3600},
    }
    _, out, _ = command("train", MODEL, "--stages", 1, "--micro-batches", 2, "--steps", 1, "--json")
    plan["stages"] = json.loads(out.splitlines()[-1])["plan"]["stages"]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    options = ("--plan", tmp_path / "plan.json", "--steps", 3, "--trace", tmp_path / "t.json", "--json")
    code, out, err = command("train", MODEL, *options)
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert found["planned_step_seconds"] == found["timeline"]["planned_step_seconds"] == 3600
    assert found["planner_error"] == pytest.approx(3600 / found["step_seconds"] - 1)
    assert "; the planner predicted 3600 s, " in out
    code, out, _ = command("timeline", tmp_path / "t.json")
    assert out.splitlines()[0].startswith("tiny: gpipe, M = 2 · ")
    assert "planner said 3600 s (+" in out.splitlines()[0]


def test_a_run_resumed_from_a_checkpoint_has_the_same_losses(
    model: str, trained: tuple[subprocess.CompletedProcess[str], Path], tmp_path: Path, command: Callable[..., Any]
) -> None:
    options = ("--stages", 2, "--micro-batches", 2, "--json", "--seed", 3, "--checkpoint-dir", tmp_path)
    first = last(dapple("train", model, *options, "--steps", 3))
    run = dapple("train", model, *options, "--steps", 6)
    resumed, whole = last(run), last(trained[0])
    assert first["first_loss"] == whole["first_loss"]
    assert first["losses"] + resumed["losses"] == whole["losses"]
    assert resumed["first_loss"] != whole["first_loss"]
    assert f"resumed after step 3 from {tmp_path}" in run.stdout

    code, _, err = command("train", model, *options, "--steps", 6)
    assert code == 1
    assert err.splitlines()[-1].endswith(f"{tmp_path} has 6 steps already: ask for more with --steps")


def test_an_error_is_one_line_on_stderr(model: str) -> None:
    run = dapple("train", model, "--stages", "three")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.splitlines()[-1].startswith("error: no layer is called 'three'; the nearest are ")
    assert "Traceback" not in run.stderr


# --- the rest, in this process


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], model: str) -> Callable[..., Any]:
    """Run the command line here: (exit code, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        words = [model if word is MODEL else str(word) for word in arguments]
        monkeypatch.setattr(sys, "argv", ["dapple", *words])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capfd.readouterr()

    return run


def test_verify_says_equal_and_exits_with_0(command: Callable[..., Any]) -> None:
    options = ("--stages", 2, "--micro-batches", 3, "--replicas", "2,1", "--schedule", "dapple-a", "--json")
    code, out, err = command("verify", MODEL, *options)
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["ok"] is True
    assert set(result["max_errors"]) == {"loss", "gradient", "variable"}
    assert result["max_errors"]["gradient"] < 1e-5
    assert "replicas [2, 1], 3 micro-batches, dapple-a: equal to one device" in out


@pytest.mark.filterwarnings("ignore:the loss of loss is divided by")
def test_verify_exits_with_1_where_the_pipeline_differs(command: Callable[..., Any]) -> None:
    options = ("--stages", 2, "--micro-batches", 4, "--set", "mask=True", "--json")
    code, out, _ = command("verify", MODEL, *options)
    assert code == 1
    assert json.loads(out.splitlines()[-1])["ok"] is False
    assert "DIFFERS from one device" in out
    assert "first to diverge: loss 'loss'" in out


def test_a_plan_file_goes_round(command: Callable[..., Any], model: str, tmp_path: Path) -> None:
    options = ("--stages", "two", "--replicas", "1,2", "--micro-batches", 4, "--schedule", "gpipe", "--steps", 1)
    code, out, err = command("train", MODEL, *options, "--json")
    assert code == 0, err
    data = json.loads(out.splitlines()[-1])["plan"]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"format": "dapple-plan/1", **data}))
    plan = Plan.load(path)
    assert (plan.replicas, plan.micro_batches, plan.schedule) == ((1, 2), 4, "gpipe")

    code, out, err = command("train", MODEL, "--plan", path, "--steps", 1, "--json")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["plan"] == data


@pytest.mark.parametrize(
    ("recompute", "found", "told"),
    [
        ("all", True, ", recompute of all layers"),
        ("stages:0", [0, 1], ", recompute of 2 of 7 layers"),  # of which the first is a cast
        ("one,two", [1, 2], ", recompute of 2 of 7 layers"),
    ],
)
def test_what_is_recomputed_is_chosen_and_told(
    command: Callable[..., Any], recompute: str, found: Any, told: str
) -> None:
    options = ("--stages", "two", "--micro-batches", 2, "--steps", 1, "--recompute", recompute, "--json")
    code, out, err = command("train", MODEL, *options)
    assert code == 0, err
    assert f"schedule dapple-a{told}\n" in out
    assert json.loads(out.splitlines()[-1])["plan"]["recompute"] == found


def test_verify_takes_recompute(command: Callable[..., Any]) -> None:
    options = ("--stages", 2, "--micro-batches", 2, "--recompute", "stages:1", "--json")
    code, out, err = command("verify", MODEL, *options)
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["plan"]["recompute"][0] > 0


def test_options_reach_the_model(command: Callable[..., Any]) -> None:
    code, out, err = command(
        "train", MODEL, "--batch-size", 6, "--micro-batches", 2, "--stages", 2, "--steps", 1, "--json"
    )
    assert code == 0, err
    plan = json.loads(out.splitlines()[-1])["plan"]
    assert (plan["global_batch_size"], plan["micro_batch_size"]) == (6, 3)


def test_compare_times_the_plain_model_first(command: Callable[..., Any]) -> None:
    options = ("--stages", 2, "--micro-batches", 2, "--steps", 2, "--compare", 2, "--json")
    code, out, err = command("train", MODEL, *options)
    assert code == 0, err
    assert "the same model un-pipelined on the same cores" in out
    assert json.loads(out.splitlines()[-1])["plain_samples_per_second"] > 0
    assert err.index("un-pipelined 1: loss") < err.index("training 1: loss")


def test_a_step_that_is_not_finite_fails_where_that_is_asked_for(command: Callable[..., Any]) -> None:
    options = ("--stages", 2, "--micro-batches", 2, "--steps", 4, "--set", "bad=True")
    code, _, err = command("train", MODEL, *options)
    assert code == 0
    assert "training 4: loss nan" in err
    code, _, err = command("train", MODEL, *options, "--check-numerics")
    assert code == 1
    assert "training 2: loss" in err
    assert "training 3: loss" not in err
    assert "error: All variables are as they were before the step. The step failed: " in err
    assert " is not finite" in err


@pytest.mark.filterwarnings("ignore")  # TensorFlow calls its only reader of events deprecated
def test_checked_steps_have_curves_of_what_is_known_without_recording(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    options = ("--stages", 2, "--micro-batches", 2, "--steps", 2, "--check-numerics", "--tensorboard", tmp_path)
    code, out, err = command("train", MODEL, *options)
    assert code == 0, err
    curves = read_curves(tmp_path)
    assert {name: [number for number, _ in points] for name, points in curves.items()} == {
        "loss": [1, 2],
        "samples_per_second": [1, 2],
    }
    assert f"curves for TensorBoard: {tmp_path}" in out


def test_without_json_the_last_line_is_for_people(command: Callable[..., Any]) -> None:
    code, out, _ = command("train", MODEL, "--stages", 2, "--micro-batches", 2, "--steps", 1)
    assert code == 0
    assert out.splitlines()[-1].endswith("samples/s")


@pytest.mark.parametrize(
    "words", [("--help",), ("train", "--help"), ("verify", "-h"), ("timeline", "-h"), ("--version",)]
)
def test_help_and_version(command: Callable[..., Any], words: tuple[str, ...]) -> None:
    code, out, err = command(*words)
    assert (code, err) == (0, "")
    assert "dapple" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train",), "Missing argument 'MODEL'"),
        (("trane", MODEL), "No such command 'trane'"),
        (("train", MODEL, "--stages"), "requires an argument"),
        (("train", MODEL, "--stagez", 2), "No such option"),
        (("train", MODEL, "--micro-batches", "many"), "--micro-batches many: give a whole number, or auto"),
        (("train", MODEL, "--micro-batches", "--8"), "--micro-batches --8: give a whole number, or auto"),
        (("train", MODEL, "--replicas", "\u00b2"), "--replicas \u00b2: give one whole number for each stage"),
        (("train", MODEL, "--steps", 0), "--steps must be at least 1"),
        (("train", MODEL, "--checkpoint-every", 0), "--checkpoint-every must be at least 1"),
        (("train", MODEL, "--check-numerics", "--trace", "t.png"), "--trace and --check-numerics: a step that records"),
        (("train", MODEL, "--replicas", "2;1"), "--replicas 2;1: give one whole number for each stage, such as 2,1"),
        (
            ("train", MODEL, "--recompute", "stages:a"),
            "--recompute stages:a: give numbers of stages, such as stages:0,1",
        ),
        (("verify", MODEL, "--replicas", "two"), "--replicas two: give one whole number for each stage"),
    ],
)
def test_wrong_usage_exits_with_2(command: Callable[..., Any], words: tuple[object, ...], message: str) -> None:
    code, out, err = command(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "message", "exit_code"),
    [
        (("absent.py:f",), "there is no file absent.py", 2),
        (("no_such_module:f",), "module 'no_such_module' cannot be imported", 2),
        (("gpt",), "'gpt' is not a MODEL such as", 2),
        ((MODEL, "--set", "width"), "--set 'width' is not of the form key=value", 2),
        ((MODEL, "--set", "widht=3"), "has no option 'widht'; it has width", 2),
        (("fixed", "--batch-size", 3), "has no option batch_size, so --batch-size cannot be given", 2),
        (("fixed", "--seed", 3), "has no option seed, so --seed cannot be given", 2),
        (("broken",), "the user's own mistake", 1),
        ((MODEL, "--set", "empty=True"), "the workload's dataset has no batches", 2),
        ((MODEL, "--stages", 99), "99 stages are wanted, but the model can be cut in", 1),
        ((MODEL, "--stages", 0), "stages=0: there must be at least one", 1),
        ((MODEL, "--stages", 2, "--replicas", "1"), "replicas=[1] names 1 stages, but there are 2", 1),
        ((MODEL, "--stages", 2, "--replicas", "1,9"), "need 10 devices, but there are 8", 1),
        ((MODEL, "--stages", 2, "--recompute", "stages:2"), "recompute names stage 2, but the stages are 0 to 1", 1),
        ((MODEL, "--recompute", "three"), "no layer is called 'three'; the nearest are ", 1),
        ((MODEL, "--micro-batches", 9), "micro_batches=9 is more than the 8 samples of the batch", 1),
        ((MODEL, "--schedule", "zigzag"), "no schedule is called 'zigzag'; there are gpipe, dapple-a", 1),
        ((MODEL, "--cluster", "absent.yaml"), "absent.yaml: ", 1),
        ((MODEL, "--stages", 2, "--schedule", "gpipe", "--cluster", "config-a:2"), "but everything is given", 1),
        ((MODEL, "--plan", "absent.json"), "absent.json: not a readable JSON file", 1),
        ((MODEL, "--devices", 0), "devices=0: at least one is needed", 1),
        ((MODEL, "--devices", 3), "TensorFlow has already started with 8 devices", 1),
        ((MODEL, "--trace", "t.gif"), "t.gif: a timeline is saved as .png, .html or .json", 1),
        ((MODEL, "--trace", "setup.py/t.png"), "setup.py/t.png: its folder cannot be made", 1),
        ((MODEL, "--tensorboard", "setup.py"), "setup.py cannot hold TensorBoard's events: File exists", 1),
        # Paths are looked at before the model is.
        (("absent.py:f", "--trace", "setup.py/t.png"), "setup.py/t.png: its folder cannot be made", 1),
        (("absent.py:f", "--tensorboard", "setup.py/d"), "setup.py/d cannot hold TensorBoard's events: Not a dir", 1),
        ((MODEL, "--checkpoint-dir", "setup.py"), "setup.py cannot hold checkpoints: File exists", 1),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_fails_is_told_in_one_line(
    command: Callable[..., Any], model: str, words: tuple[object, ...], message: str, exit_code: int
) -> None:
    name = words[0]
    if name in ("fixed", "broken"):
        words = (model.replace(":tiny", f":{name}"), *words[1:])
    code, _, err = command("train", *words)
    assert code == exit_code  # 2: wrong usage
    (line,) = [line for line in err.splitlines() if line]
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.filterwarnings("ignore")
def test_train_says_why_it_took_its_schedule(command: Callable[..., Any], model: str) -> None:
    words = ("--stages", 2, "--micro-batches", "auto", "--cluster", "config-a:2", "--steps", 1)
    code, out, err = command("train", model, *words)
    assert code == 0, err
    assert re.search(r"schedule dapple-[ab], M = [1248]: ACR \d\.\d{3}; ", out)


@pytest.mark.parametrize("words", [("--trace", "t.gif"), ("--tensorboard", "setup.py")])
def test_a_bad_path_fails_before_any_training(command: Callable[..., Any], words: tuple[str, ...]) -> None:
    _, out, err = command("train", MODEL, *words, "--steps", 1)
    assert "loss" not in out + err


@pytest.mark.parametrize("error", [ZeroDivisionError, RuntimeError, TypeError])
def test_an_error_that_is_not_ours_keeps_its_traceback(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error("not ours")

    monkeypatch.setattr("dapple_tf.commands.training_run.run_steps", fail)
    with pytest.raises(error, match="not ours"):
        command("train", MODEL, "--stages", 2, "--micro-batches", 2)


def test_stopping_is_no_crash(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dapple_tf.commands.training_run.run_steps", interrupt)
    code, _, err = command("train", MODEL, "--stages", 2, "--micro-batches", 2)
    assert code == 1
    assert err.strip().endswith("stopped")
