"""``dapple verify``: the comparison of a pipelined step with one device, and its exit code."""

from __future__ import annotations

import json
import re

import pytest

from tests.dapple_tf.commands.command_line import TINY_MODEL, Run, run_process

VERIFY = ("verify", TINY_MODEL, "--stages", 2, "--json")


def test_equal_steps_exit_with_0(run_here: Run) -> None:
    run = run_here(*VERIFY, "--micro-batches", 3, "--replicas", "2,1", "--schedule", "dapple-a")
    result = run.json
    assert result["ok"] is True
    assert set(result["max_errors"]) == {"loss", "gradient", "variable"}
    assert result["max_errors"]["gradient"] < 1e-5
    assert "replicas [2, 1], 3 micro-batches, dapple-a: equal to one device" in run.stdout


@pytest.mark.parametrize(
    ("given", "sizes", "text"), [("2,1,5", [2, 1, 5], "2, 1 and 5"), ("0.25,0.75", [2, 6], "2 and 6")]
)
def test_micro_batches_of_given_sizes_are_verified(run_here: Run, given: str, sizes: list[int], text: str) -> None:
    run = run_here(*VERIFY, "--micro-batches", given, "--schedule", "zb-h1")
    result = run.json
    assert result["ok"] is True
    assert result["plan"]["micro_batch_sizes"] == sizes
    assert f"{len(sizes)} micro-batches of {text} samples, zb-h1: equal to one device" in run.stdout


def test_different_steps_exit_with_1(run_here: Run) -> None:
    run = run_here(*VERIFY, "--micro-batches", 4, "--set", "noisy=True")
    assert run.code == 1
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["ok"] is result["plain"]["ok"] is False
    assert result["plain"]["first_to_diverge"].startswith("loss 'loss', error ")
    assert "DIFFERS from one device" in run.stdout
    assert "first to diverge: loss 'loss'" in run.stdout


def test_recomputed_stages_are_verified(run_here: Run) -> None:
    run = run_here(*VERIFY, "--micro-batches", 2, "--recompute", "stages:1")
    assert run.json["plan"]["recompute"][0] > 0


def test_verify_in_a_process_of_its_own() -> None:
    assert run_process(*VERIFY, "--micro-batches", 2).json["ok"] is True


def test_the_option_of_batch_norm_reaches_the_pipeline(run_here: Run) -> None:
    for choice in ("deferred", "sync"):
        run = run_here(*VERIFY, "--micro-batches", 2, "--batch-norm", choice)
        assert run.json["ok"] is True
    assert run_here(*VERIFY, "--batch-norm", "whole").code == 2


@pytest.mark.filterwarnings("default::dapple_tf.errors.DappleWarning")
def test_the_option_of_xla_reaches_the_pipeline_whose_warnings_are_lines_of_the_command(run_here: Run) -> None:
    run = run_here(*VERIFY, "--micro-batches", 2, "--jit-compile", "--set", "noisy=True")
    assert re.search(r"^dapple: warning: .*XLA compiles 4 of .*\n  stage0/forward: it draws", run.stderr, re.MULTILINE)
    assert run_here(*VERIFY, "--micro-batches", 2, "--jit-compile").json["ok"] is True


@pytest.mark.parametrize("option", [("--async",), ("--minibatches", 4), ("--weights", "2bw"), ("--depth", 2)])
def test_windows_cannot_be_verified(run_here: Run, option: tuple[str | int, ...]) -> None:
    run = run_here("verify", TINY_MODEL, "--stages", 2, *option)
    assert run.code == 2
    assert f"{' '.join(map(str, option))}: an asynchronous window uses weights that are some" in run.stderr
