"""``dapple train --async``: what it prints, saves, resumes and compares, and what it refuses before anything starts."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.plans import Plan
from tests.dapple_tf.commands.command_line import TINY_MODEL, Outcome, Run, run_in_process
from tests.dapple_tf.commands.tiny_model import tiny

ASYNC = ("--async", "--minibatches", 4)
TRAIN = ("train", TINY_MODEL, "--stages", "two")


def plain_losses(windows: int, minibatches: int = 4) -> list[list[float]]:
    """Return the losses of an ordinary loop over the minibatches of each batch."""
    workload = tiny()
    found = []
    for x, y in itertools.islice(itertools.cycle(workload.dataset), windows):
        found.append([])
        for rows in np.array_split(np.arange(len(x)), minibatches):
            with tf.GradientTape() as tape:
                loss = workload.loss_fn(x[rows], y[rows])
            variables = tape.watched_variables()
            workload.optimizer.apply(tape.gradient(loss, variables), variables)
            found[-1].append(float(loss))
    return found


# --- results


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "t.json"


@pytest.fixture(scope="module")
def trained(trace: Path) -> Outcome:
    curves = trace.with_name("curves")
    options = ("--depth", 1, "--steps", 6, "--json", "--trace", trace, "--tensorboard", curves)
    return run_in_process(*TRAIN, *ASYNC, *options)


@pytest.mark.always  # several tests examine this run
def test_with_one_minibatch_in_flight_the_losses_are_those_of_a_plain_loop(trained: Outcome) -> None:
    found, wanted = trained.json, plain_losses(6)
    np.testing.assert_allclose(found["minibatch_losses"], wanted, rtol=1e-5)
    np.testing.assert_allclose(found["losses"], np.mean(wanted, 1), rtol=1e-5)
    assert (found["steps"], found["first_loss"], found["last_loss"]) == (6, found["losses"][0], found["losses"][5])
    assert found["plan"]["window"] == {"minibatches": 4, "weights": "stash", "depth": 1, "micro_batches": None}


def test_progress_and_results_are_of_windows(trained: Outcome) -> None:
    assert "2 stages, windows of 4 minibatches of 2 samples, weights stash, K=1,1\n" in trained.stdout
    assert "training window 6: mean loss " in trained.stderr
    assert " in 6 windows of 4 minibatches\n" in trained.stdout
    assert "Traceback" not in trained.stderr


def test_the_trace_is_of_a_window(trained: Outcome, trace: Path, run_here: Run) -> None:
    rows = json.loads(trace.read_text())["traceEvents"]
    measured = {row["pid"] for row in rows if row["name"] == "process_name" and "measured" in row["args"]["name"]}
    names = [row["name"] for row in rows if row["ph"] == "X" and row["pid"] in measured]
    actions = sorted(name.partition(" ")[0] for name in names if name[1:2] in ("F", "B"))  # then their versions
    assert actions == sorted(f"{stage}{kind}{m}" for stage in range(2) for kind in "FB" for m in range(4))
    assert trained.json["trace"] == str(trace)
    read = run_here("timeline", trace)
    assert read.stdout.startswith("tiny: window of 4 minibatches, weights 'stash' · ")


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        (("--weights", "vertical-sync"), "windows of 4 minibatches of 2 samples, weights vertical-sync, K=2,1"),
        (
            ("--weights", "2bw", "--micro-batches", 2, "--batch-size", 17),
            "windows of 4 minibatches of 4 or 5 samples in 2 micro-batches, weights 2bw, K=2,1",
        ),
        (("--replicas", "2,1"), "windows of 4 minibatches of 2 samples, weights stash, K=2,1"),
    ],
)
def test_options_reach_the_window(run_here: Run, options: tuple[object, ...], printed: str) -> None:
    run = run_here(*TRAIN, *ASYNC, *options, "--steps", 2, "--json")
    assert f"2 stages, {printed}\n" in run.stdout
    assert np.shape(run.json["minibatch_losses"]) == (2, 4)


def test_a_saved_plan_of_windows_is_carried_out_with_async_only(run_here: Run, tmp_path: Path) -> None:
    run = run_here(*TRAIN, *ASYNC, "--weights", "vertical-sync", "--steps", 2, "--json")
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"format": "dapple-plan/1", **run.json["plan"]}))
    assert Plan.load(path).window is not None
    again = run_here("train", TINY_MODEL, "--plan", path, "--async", "--steps", 2, "--json")
    assert again.json["plan"] == run.json["plan"]
    assert again.json["minibatch_losses"] == run.json["minibatch_losses"]
    refused = run_here("train", TINY_MODEL, "--plan", path, "--steps", 2)
    assert refused.code == 2
    assert "the plan is for asynchronous windows of 4 minibatches: give mode='async' (on the comm" in refused.stderr


# --- checkpoints


def test_windows_resumed_from_a_checkpoint_have_the_losses_of_one_run(run_here: Run, tmp_path: Path) -> None:
    options = (*TRAIN, *ASYNC, "--json")
    saved = (*options, "--checkpoint-dir", tmp_path)
    whole = run_here(*options, "--steps", 6).json["minibatch_losses"]
    first = run_here(*saved, "--steps", 3).json["minibatch_losses"]
    resumed = run_here(*saved, "--steps", 6)
    assert first + resumed.json["minibatch_losses"] == whole
    assert f"resumed after window 3 from {tmp_path}" in resumed.stdout


# --- comparison with the un-pipelined model


def test_compare_times_the_un_pipelined_model_on_the_same_minibatches(
    run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The un-pipelined model runs in a process of its own, for which a function stands here."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, stdout='{"samples_per_second": 50.0}\n')

    monkeypatch.setattr("dapple_tf.commands.plain.subprocess.run", run)
    found = run_here(*TRAIN, *ASYNC, "--steps", 2, "--baseline", 3, "--json")
    assert found.json["plain_samples_per_second"] == 50
    (command,) = commands
    assert command[1:] == ["-m", "dapple_tf", "plain", TINY_MODEL, "--steps", "3", "--minibatches", "4"]


def test_the_un_pipelined_model_trains_on_the_minibatches_of_a_window(run_here: Run) -> None:
    run = run_here("plain", TINY_MODEL, "--steps", 2, "--minibatches", 4)
    assert run.json["samples_per_second"] > 0
    for number, losses in enumerate(plain_losses(3), 1):
        assert f"un-pipelined {number}: loss {np.mean(losses):.4f} " in run.stderr


# --- numbers that are not finite


def test_a_window_with_a_loss_that_is_not_finite_names_its_minibatch(run_here: Run, tmp_path: Path) -> None:
    options = (*TRAIN, *ASYNC, "--steps", 4, "--set", "infinite=True", "--json")
    run = run_here(*options, "--checkpoint-dir", tmp_path, "--checkpoint-every", 1)
    assert run.code == 1
    assert "warning: the loss of minibatch 0 of window 3 is " in run.stderr
    assert "warning: no checkpoint after window 3: the loss or a variable is not finite" in run.stderr
    assert " in minibatch 0 of window 3; the checkpoints before are kept, and 2 were not saved" in run.stderr
    assert "without --async and with --check-numerics" in run.stderr
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        "checkpoint-1.safetensors",
        "checkpoint-2.safetensors",
    ]


# --- what contradicts


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--minibatches", 4), "--minibatches 4 is for asynchronous windows: give --async too"),
        (("--weights", "stash"), "--weights stash is for asynchronous windows: give --async too"),
        (("--depth", 2), "--depth 2 is for asynchronous windows: give --async too"),
        (("--async", "--minibatches", 0), "0 is not in the range x>=1"),
        (("--async", "--depth", 0), "0 is not in the range x>=1"),
        (("--async", "--weights", "old"), "'old' is not one of"),
        ((*ASYNC, "--schedule", "gpipe"), "--schedule gpipe with --async: windows have an order of their own"),
        ((*ASYNC, "--slice", "auto"), "--slice auto with --async: windows have an order of their own"),
        ((*ASYNC, "--batch-norm", "deferred"), "--batch-norm deferred with --async: batch norm takes the stat"),
        ((*ASYNC, "--check-numerics"), "--check-numerics with --async: a window changes variables after every"),
        ((*ASYNC, "--micro-batches", 2), "--micro-batches 2 with --async: each minibatch runs whole"),
        ((*ASYNC, "--batch-size", 3), "--batch-size 3 is a window of 4 minibatches, which need at least 4 samples"),
        (("--async", "--batch-size", 63), "--batch-size 63 is a window of 64 minibatches, which need at least 64"),
        (
            (*ASYNC, "--weights", "2bw", "--micro-batches", 2, "--batch-size", 7),
            "--batch-size 7 is a window of 4 minibatches of 2 micro-batches, which need at least 8 samples",
        ),
    ],
)
def test_contradictions_are_wrong_usage_before_the_model_is_looked_for(
    run_here: Run, words: tuple[object, ...], message: str
) -> None:
    run = run_here("train", "absent.py:f", *words)
    assert (run.code, run.stdout) == (2, "")
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def test_a_window_of_the_models_own_batch_size_may_be_too_small(run_here: Run) -> None:
    run = run_here(*TRAIN, "--async")
    assert (run.code, run.stdout) == (2, "")
    assert "a window of 8 samples is cut into 64 minibatches" in run.stderr
    assert "Traceback" not in run.stderr


def test_windows_are_not_verified_and_the_reason_is_given(run_here: Run) -> None:
    run = run_here("verify", TINY_MODEL, *ASYNC)
    assert (run.code, run.stdout) == (2, "")
    assert "--async: an asynchronous window uses weights that are some updates old, so no step" in run.stderr
    assert "--async" not in run_here("verify", "--help").stdout
