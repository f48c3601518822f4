"""The programs of ``examples/extending/`` run, and do what the pages that show them say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import dapple_tf as dapple
from dapple_tf.commands.model_loading import load_workload
from tests.examples.runs import run_examples
from tests.paths import ROOT
from tests.processes import run_python

PAGES = ROOT / "docs" / "extending"
MODEL = "examples/extending/add_a_model.py:mlp"


def test_a_schedule_a_planner_and_a_pass_of_ones_own_do_what_their_pages_say(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """One test, so that one process runs them all."""
    names = ("add_a_schedule", "add_a_planner", "add_a_pass")
    printed = run_examples(tmp_path, *(f"extending/{name}.py" for name in names))
    with subtests.test("a schedule is printed, simulated and run as its page says"):
        check_schedule(printed["extending/add_a_schedule.py"], (PAGES / "schedule.md").read_text("utf-8"))
    with subtests.test("a planner finds a plan that the planner best beats or equals"):
        check_planner(printed["extending/add_a_planner.py"])
    with subtests.test("a pass adds its control edge and leaves a valid graph"):
        check_pass(printed["extending/add_a_pass.py"])


def check_schedule(printed: str, page: str) -> None:
    first, second = printed.splitlines()[:2]
    assert f"    {first}\n    {second}\n" in page
    seconds = [float(x) for x in re.findall(r"([\d.]+) ms, bubble", printed)]
    memory = [float(x) for x in re.findall(r"stage 0 (\d+) MB", printed)]
    assert f"pairs are {seconds[0] / seconds[1] - 1:.0%} faster" in page
    assert f"{memory[1] / memory[0]:.1f} times the memory" in page
    assert "equal to one device" in printed


def check_planner(printed: str) -> None:
    assert re.match(r"halves: layers 0-\d on 4 devices, layers \d-11 on 4 devices", printed)
    halves, best = (float(x) for x in re.findall(r"([\d.]+) ms, bubble", printed))
    assert best <= halves


def check_pass(printed: str) -> None:
    assert "stage0/allreduce runs after stage1/allreduce: stagger: AllReduce of stage 0" in printed
    assert "left a valid graph" in printed


def test_a_model_of_ones_own_loads_and_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "extending"))  # so that what loading adds is taken off again
    workload = load_workload(MODEL, {"layers": 2, "width": 8, "batch_size": 8})
    step = dapple.pipeline(workload.loss_fn, optimizer=workload.optimizer, stages=["dense_1"], micro_batches=2)
    losses = [float(step(*batch)) for batch in workload.dataset]
    assert len(losses) == 64
    assert sum(losses[-8:]) < sum(losses[:8])


def test_a_model_of_ones_own_trains_on_the_command_line() -> None:
    options = ["--stages", "2", "--micro-batches", "4", "--steps", "20", "--set", "width=32", "--json"]
    run = run_python("-m", "dapple_tf", "train", MODEL, *options)
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["last_loss"] < result["first_loss"]


def test_every_page_includes_the_example_that_it_explains() -> None:
    for kind in ("model", "schedule", "planner", "pass"):
        assert f"--8<--\nexamples/extending/add_a_{kind}.py" in (PAGES / f"{kind}.md").read_text("utf-8")
