"""``dapple train``: results, timeline, memory, curves, checkpoints and comparisons of a run."""

from __future__ import annotations

import json
import math
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapple_tf.checkpoint.file import open_checkpoint
from dapple_tf.launcher.restart import VARIABLE, Start
from dapple_tf.plans import Plan
from tests.dapple_tf.commands.command_line import TINY_MODEL, Outcome, Run, run_process
from tests.dapple_tf.commands.test_tensorboard import read_curves

TRAIN = ("train", TINY_MODEL, "--micro-batches", 2)

# --- one run, in a process of its own


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "t.json"


@pytest.fixture(scope="module")
def trained(trace: Path) -> Outcome:
    options = ("--stages", 2, "--steps", 6, "--json", "--seed", 3, "--trace", trace)
    return run_process(*TRAIN, *options, "--tensorboard", trace.parents[1] / "curves")


@pytest.mark.always  # several tests examine this run
def test_train_prints_results_to_stdout_and_progress_to_stderr(trained: Outcome, trace: Path) -> None:
    result = trained.json
    assert result["steps"] == 6
    assert result["last_loss"] < result["first_loss"]
    assert result["samples_per_second"] > 0
    assert (result["plan"]["micro_batches"], len(result["plan"]["stages"])) == (2, 2)
    assert result["trace"] == str(trace)
    assert "2 stages, 2 micro-batches of 4 samples, schedule dapple-a" in trained.stdout
    assert "stage 1, device 1: " in trained.stdout
    assert "training 6: loss" in trained.stderr
    assert "training" not in trained.stdout
    assert "Traceback" not in trained.stderr


@pytest.mark.usefixtures("trained")
def test_train_saves_a_timeline_of_every_action(trace: Path) -> None:
    rows = json.loads(trace.read_text())["traceEvents"]
    processes = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert processes == {1: "predicted: stages", 2: "measured: stages"}
    for pid in processes:
        names = [row["name"] for row in rows if row["ph"] == "X" and row["pid"] == pid]
        actions = [name for name in names if name != "update"]
        assert sorted(actions) == sorted(f"{stage}{kind}{m}" for stage in range(2) for kind in "FB" for m in range(2))
        assert "update" in names  # of the stages that have weights


def test_train_says_what_the_time_of_a_step_is_spent_on(trained: Outcome) -> None:
    found = trained.json["timeline"]
    assert set(found["critical_path_seconds"]) == {"compute", "transfer", "allreduce", "update", "waiting"}
    assert sum(found["critical_path_seconds"].values()) == pytest.approx(found["step_seconds"])
    assert found["predicted"]["source"] == "simulated with the measured times of each action"
    assert "measured: " in trained.stdout
    assert "critical path: compute " in trained.stdout
    assert "the simulated step is " in trained.stdout


def test_train_prints_the_memory_of_every_stage_before_and_after(trained: Outcome) -> None:
    """Predicted before the first step; measured too where a step was recorded."""
    found = trained.json["memory"]
    assert [(stage["most_held"], stage["seen"]) for stage in found["stages"]] == [(2, 2), (1, 1)]
    assert sum(stage["weights"] for stage in found["stages"]) > 0
    assert found["measured"]["device"] == "CPU"
    before, _, after = trained.stdout.partition("loss ")
    assert "memory of one device of each of 2 stages" in before
    assert "all stages in the recorded step" not in before
    assert "all stages in the recorded step: " in after


@pytest.mark.filterwarnings("ignore")  # TensorFlow calls its only reader deprecated
def test_train_writes_curves_of_every_step(trained: Outcome, trace: Path) -> None:
    curves = read_curves(trace.parents[1] / "curves")
    assert [number for number, _ in curves["loss"]] == list(range(1, 7))
    assert [loss for _, loss in curves["loss"]] == pytest.approx(trained.json["losses"])
    recorded = [number for number, _ in curves["bubble"]]
    assert recorded[:4] == [1, 2, 3, 4], "these show what recording costs"
    assert recorded[-1] == 6, "the trace is of this one"
    assert trained.json["tensorboard"] == str(trace.parents[1] / "curves")


def test_a_saved_trace_can_be_read_and_drawn(trained: Outcome, trace: Path, tmp_path: Path, run_here: Run) -> None:
    read = run_here("timeline", trace, "-o", tmp_path / "t.png", "--json")
    assert read.stderr == ""
    assert read.json == trained.json["timeline"]
    assert read.stdout.splitlines()[0].startswith("tiny: dapple-a, M = 2 · ")
    assert "slowest compared with others of their kind: " in read.stdout
    assert f"timeline: {tmp_path}/t.png" in read.stdout
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"


def test_a_saved_trace_is_read_in_a_process_of_its_own(trained: Outcome, trace: Path) -> None:
    assert run_process("timeline", trace, "--json").json == trained.json["timeline"]


@pytest.mark.filterwarnings("ignore:layer .* seems to hold most of the work")
def test_a_trace_with_ops_says_why_an_action_was_slow(run_here: Run, tmp_path: Path) -> None:
    options = ("--stages", 2, "--steps", 2, "--micro-batches", 4, "--set", "width=200", "--batch-size", 200)
    run = run_here("train", TINY_MODEL, *options, "--trace", tmp_path / "t.json", "--trace-ops")
    assert run.code == 0, run.stderr
    read = run_here("timeline", tmp_path / "t.json", "--json")
    # An action that was slow because it waited for the processor has no op to name.
    explained = [slow for slow in read.json["slowest"] if slow.get("ops")]
    assert explained
    for slow in explained:
        assert re.search(rf"^{slow['action']}: .* \(usually ", read.stdout, re.MULTILINE)


def test_a_trace_that_cannot_be_saved_in_the_end_leaves_the_report(run_here: Run, tmp_path: Path) -> None:
    trace = tmp_path / "t.png"
    model = tmp_path / "late.py"
    # The model is made after the paths are checked.
    model.write_text(
        f"import os\nfrom tests.dapple_tf.commands.tiny_model import tiny\n"
        f"def late():\n    os.mkdir({str(trace)!r})\n    return tiny()\n"
    )
    run = run_here("train", f"{model}:late", "--stages", 2, "--steps", 2, "--trace", trace, "--json")
    assert run.code == 2
    assert json.loads(run.stdout.splitlines()[-1])["steps"] == 2
    assert f"{trace} is a folder" in run.stderr
    assert not list(trace.iterdir())


# --- plans


def test_a_file_that_is_no_trace_is_an_error_of_one_line(run_here: Run, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"traceEvents": []}')
    read = run_here("timeline", tmp_path / "t.json")
    assert (read.code, read.stdout) == (2, "")
    assert read.stderr.startswith(f"error: {tmp_path}/t.json: a trace, but not one that dapple_tf saved")
    read = run_here("timeline", "absent.json", "-o", "t.gif")
    assert read.code == 2
    assert "error: --output: t.gif: a timeline is saved as" in read.stderr, "before anything is read"
    assert "absent.json" not in read.stderr


def test_a_plan_file_is_carried_out_and_its_prediction_compared_with_the_run(run_here: Run, tmp_path: Path) -> None:
    path, trace = tmp_path / "plan.json", tmp_path / "t.json"
    options = ("--stages", "two", "--replicas", "1,2", "--schedule", "gpipe")
    plan = run_here(*TRAIN, *options, "--steps", 1, "--json").json["plan"]
    predicted = {**plan, "predicted": {"step_seconds": 3600}}
    path.write_text(json.dumps({"format": "dapple-plan/1", **predicted}))
    loaded = Plan.load(path)
    assert (loaded.replicas, loaded.micro_batches, loaded.schedule) == ((1, 2), 2, "gpipe")

    run = run_here("train", TINY_MODEL, "--plan", path, "--steps", 3, "--trace", trace, "--json")
    found = run.json
    assert found["plan"] == predicted
    assert found["planned_step_seconds"] == found["timeline"]["planned_step_seconds"] == 3600
    assert found["planner_error"] == pytest.approx(3600 / found["step_seconds"] - 1)
    assert "; the planner predicted 3600 s, " in run.stdout

    headline = run_here("timeline", trace).stdout.splitlines()[0]
    assert headline.startswith("tiny: gpipe, M = 2 · ")
    assert "planner said 3600 s (+" in headline


@pytest.mark.parametrize(
    ("recompute", "layers", "printed"),
    [
        ("all", True, ", recompute of all layers"),
        ("stages:0", [0], ", recompute of 1 of 7 layers"),
        ("one,two", [0, 1], ", recompute of 2 of 7 layers"),
    ],
)
def test_recomputed_layers_are_in_the_plan_and_printed(
    run_here: Run, recompute: str, layers: Any, printed: str
) -> None:
    run = run_here(*TRAIN, "--stages", "two", "--steps", 1, "--recompute", recompute, "--json")
    assert run.json["plan"]["recompute"] == layers
    assert f"schedule dapple-a{printed}\n" in run.stdout


def test_the_batch_size_option_reaches_the_model(run_here: Run) -> None:
    plan = run_here(*TRAIN, "--batch-size", 6, "--stages", 2, "--steps", 1, "--json").json["plan"]
    assert (plan["global_batch_size"], plan["micro_batch_size"]) == (6, 3)


@pytest.mark.filterwarnings("ignore")
def test_train_prints_why_it_chose_the_schedule(run_here: Run) -> None:
    options = ("--stages", 2, "--micro-batches", "auto", "--cluster", "config-a:2", "--steps", 1)
    run = run_here("train", TINY_MODEL, *options)
    assert run.code == 0, run.stderr
    assert re.search(r"schedule dapple-[ab], M = [1248]: ACR \d\.\d{3}; ", run.stdout)
    assert run.stdout.splitlines()[-1] == "samples/s are not measured in a run of one step", (
        "for people, without --json"
    )


# --- checkpoints


def test_a_run_resumed_from_a_checkpoint_has_the_losses_of_one_run(run_here: Run, tmp_path: Path) -> None:
    options = (*TRAIN, "--stages", 2, "--json", "--seed", 3)
    saved = (*options, "--checkpoint-dir", tmp_path)
    whole = run_here(*options, "--steps", 6).json
    first = run_here(*saved, "--steps", 3).json
    resumed = run_here(*saved, "--steps", 6)
    assert first["first_loss"] == whole["first_loss"]
    assert first["losses"] + resumed.json["losses"] == whole["losses"]
    assert resumed.json["first_loss"] != whole["first_loss"]
    assert f"resumed after step 3 from {tmp_path}" in resumed.stdout
    assert "warning" not in resumed.stderr

    again = run_here(*saved, "--steps", 6)
    assert again.code == 1
    assert again.stderr.splitlines()[-1].endswith(f"{tmp_path} has 6 steps already: ask for more with --steps")


def test_a_run_resumed_with_other_data_is_warned(run_here: Run, tmp_path: Path) -> None:
    options = (*TRAIN, "--stages", 2, "--checkpoint-dir", tmp_path)
    run_here(*options, "--seed", 3, "--steps", 2)
    resumed = run_here(*options, "--seed", 4, "--batch-size", 12, "--steps", 3)
    assert resumed.code == 0
    assert (
        "warning: the run goes on with other data: --batch-size is 12 (before: not given), --seed is 4 (before: 3). It "
        "passes over the first 2 batches, which may be others than those it was trained on"
    ) in resumed.stderr


@pytest.fixture
def usual_interrupts() -> Iterator[None]:
    """Ctrl-C as in the foreground: a shell starts jobs in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("usual_interrupts")
@pytest.mark.parametrize(
    ("times", "options", "told"),
    [
        (1, ("--checkpoint-dir", "saved"), "step 5 is saved as saved/checkpoint-5.safetensors; to go on: "),
        (2, ("--checkpoint-dir", "saved"), "step 3 is saved as saved/checkpoint-3.safetensors; to go on: "),
        (1, (), "nothing was saved: give --checkpoint-dir DIR"),
    ],
    ids=["once", "twice", "without checkpoints"],
)
def test_an_interrupted_run_saves_its_last_step_and_says_how_to_go_on(
    run_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, options: tuple[object, ...], told: str
) -> None:
    """The first Ctrl-C lets the fifth step end, the second one does not."""
    monkeypatch.chdir(tmp_path)
    words = ("train", TINY_MODEL, "--stages", 2, "--steps", 9, "--checkpoint-every", 3, "--seed", 1, *options)
    run = run_here(*words, "--set", f"interrupted={times}")
    assert run.code == 130
    last, stopped = [line for line in run.stderr.splitlines() if line][-2:]
    assert last.startswith(f"dapple: {told}")
    assert stopped == "stopped"
    assert ("Ctrl-C again stops at once" in run.stderr) == bool(options)
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    if options:
        assert last.endswith(shlex.join(map(str, ["train", *words[1:], "--set", f"interrupted={times}"])))


@pytest.mark.usefixtures("usual_interrupts")
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(run_here: Run, tmp_path: Path) -> None:
    options = ("train", TINY_MODEL, "--stages", 2, "--steps", 8, "--json")
    saved = (*options, "--checkpoint-dir", tmp_path)
    assert run_here(*saved, "--set", "interrupted=1").code == 130
    assert run_here(*saved).json["losses"] == run_here(*options).json["losses"][5:]


def test_a_run_resumed_in_another_process_has_the_losses_of_one_run(trained: Outcome, tmp_path: Path) -> None:
    options = (*TRAIN, "--stages", 2, "--json", "--seed", 3, "--checkpoint-dir", tmp_path)
    first = run_process(*options, "--steps", 3).json
    resumed = run_process(*options, "--steps", 6).json
    assert first["losses"] + resumed["losses"] == trained.json["losses"]


# --- comparison with the un-pipelined model


def test_compare_times_the_un_pipelined_model_first(run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The un-pipelined model runs in a process of its own, for which a function stands here."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, stdout='a note\n{"samples_per_second": 50.0}\n')

    monkeypatch.setattr("dapple_tf.commands.plain.subprocess.run", run)
    found = run_here(*TRAIN, "--stages", 2, "--steps", 2, "--baseline", 3, "--seed", 4, "--set", "width=5", "--json")
    assert found.json["plain_samples_per_second"] == 50
    assert "the same model un-pipelined on the same cores: 50.0 samples/s (" in found.stdout
    (command,) = commands
    assert command[1:] == [*("-m", "dapple_tf", "plain", TINY_MODEL, "--steps", "3", "--set", "width=5", "--seed", "4")]


def test_the_un_pipelined_model_is_timed(run_here: Run) -> None:
    run = run_here("plain", TINY_MODEL, "--steps", 2)
    assert run.json["samples_per_second"] > 0
    assert "un-pipelined 3: loss" in run.stderr, "the first step builds and is not counted"


def test_a_failed_comparison_is_an_error(run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, stdout="")
    monkeypatch.setattr("dapple_tf.commands.plain.subprocess.run", lambda *_, **__: failed)
    run = run_here(*TRAIN, "--stages", 2, "--steps", 1, "--baseline", 1)
    assert run.code == 1
    assert "tiny failed (see above): leave --baseline out" in run.stderr


def test_compare_in_real_processes(run_here: Run) -> None:
    run = run_here(*TRAIN, "--stages", 2, "--steps", 2, "--baseline", 2, "--json")
    assert run.json["plain_samples_per_second"] > 0
    assert run.stderr.index("un-pipelined 1: loss") < run.stderr.index("training 1: loss")


# --- numbers that are not finite


def test_a_loss_that_becomes_nan_is_warned_of_and_fails_the_run_which_keeps_its_good_checkpoint(
    run_here: Run, tmp_path: Path
) -> None:
    """It once ended with code 0, and both kept checkpoints were of NaN."""
    options = (*TRAIN, "--stages", 2, "--steps", 4, "--set", "infinite=True", "--json")
    run = run_here(*options, "--checkpoint-dir", tmp_path, "--checkpoint-every", 1)
    assert run.code == 1
    warning = next(line for line in run.stderr.splitlines() if "the loss of step" in line)
    said = r"warning: the loss of step [34] is (nan|inf): to find out why, run with --check-numerics"
    assert re.search(said, warning)
    error = r"rror: the loss became (nan|inf) in step [34]; the checkpoints before are kept, and 2 were not saved"
    assert re.search(error, run.stderr, re.MULTILINE)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-1.safetensors",
        "checkpoint-2.safetensors",
    ]
    for path in tmp_path.glob("checkpoint-*"):
        for _, value in open_checkpoint(path).read():
            assert np.isfinite(value).all()
    assert math.isnan(json.loads(run.stdout.splitlines()[-1])["last_loss"])


def test_a_step_that_is_not_finite_fails_with_check_numerics(run_here: Run) -> None:
    options = (*TRAIN, "--stages", 2, "--steps", 4, "--set", "infinite=True")
    run = run_here(*options, "--check-numerics")
    assert run.code == 1
    assert "training 2: loss" in run.stderr
    assert "training 3: loss" not in run.stderr
    assert "error: All variables are as they were before the step. The step failed: " in run.stderr
    assert " is not finite" in run.stderr


@pytest.mark.filterwarnings("ignore")  # TensorFlow calls its only reader of events deprecated
def test_checked_steps_are_not_recorded_but_have_curves_of_the_loss(run_here: Run, tmp_path: Path) -> None:
    run = run_here(*TRAIN, "--stages", 2, "--steps", 2, "--check-numerics", "--tensorboard", tmp_path)
    assert run.code == 0, run.stderr
    curves = read_curves(tmp_path)
    assert {name: [number for number, _ in points] for name, points in curves.items()} == {
        "loss": [1, 2],
        "samples_per_second": [1, 2],
    }
    assert f"curves for TensorBoard: {tmp_path}" in run.stdout


@pytest.mark.parametrize(("number", "code"), [(0, 2), (1, 1)])
def test_a_folder_that_a_later_start_cannot_write_is_a_failure_and_no_wrong_option(
    run_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    """The launcher starts a job that ends with code 2 never again."""
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, Start(number).to_text())
    run = run_here("train", TINY_MODEL, "--stages", 2, "--checkpoint-dir", tmp_path / "file")
    assert run.code == code, run.stderr
    assert "file cannot hold checkpoints: it is a file, not a folder" in run.stderr
