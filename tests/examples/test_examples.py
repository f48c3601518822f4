"""The programs of ``examples/`` run, and print what their docstrings say."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import dapple_tf as dapple
from tests.examples.runs import run_examples
from tests.paths import ROOT
from tests.processes import needs_horovod, run_ranks

PROGRAMS = sorted((ROOT / "examples").rglob("*.py"))


@pytest.mark.always  # the only test of these programs
def test_the_programs_of_one_process_print_what_they_say(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """One test, so that one process runs them all, whatever process of pytest-xdist has this test."""
    names = ("wrap_a_function", "keras_model", "resume_under_another_plan", "read_a_timeline", "plan_for_a_cluster")
    printed = run_examples(tmp_path, *(f"{name}.py" for name in names))
    with subtests.test("a function equals one device, and its loss falls"):
        check_function(printed["wrap_a_function.py"])
    with subtests.test("a Keras model learns and is saved"):
        check_keras_model(printed["keras_model.py"])
    with subtests.test("a run resumed under another plan equals one that was not interrupted"):
        check_resumed(printed["resume_under_another_plan.py"])
    with subtests.test("a timeline is described and drawn"):
        check_timeline(printed["read_a_timeline.py"], tmp_path)
    with subtests.test("a plan is the fastest of three, and its files give the same step"):
        check_plan(printed["plan_for_a_cluster.py"], tmp_path)


def check_function(printed: str) -> None:
    assert "equal to one device" in printed
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", printed, re.MULTILINE)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 10


def check_keras_model(printed: str) -> None:
    assert re.search(r"^stage 0: \S+/first$", printed, re.MULTILINE)
    assert re.search(r"^stage 1: \S+/second, \S+/scores", printed, re.MULTILINE)
    assert float(re.findall(r"accuracy of model.predict: ([\d.]+)", printed)[0]) > 0.95
    assert "the saved model predicts the same: True" in printed


def check_resumed(printed: str) -> None:
    assert "replicas (2, 1, 1): steps 7 to 12" in printed
    whole, _, resumed = re.findall(r"loss ([\d.]+)$", printed, re.MULTILINE)
    assert float(whole) == pytest.approx(float(resumed), abs=1e-5)
    assert float(printed.split()[-1]) < 1e-5


def check_timeline(printed: str, folder: Path) -> None:
    assert printed.startswith("measured: ")
    assert "stage 0 ran 0F0 0F1 0B0 0F2 0B1" in printed
    assert printed.count("on the critical path: ") == 3
    assert (folder / "timeline.png").stat().st_size > 10_000
    assert (folder / "timeline.json").exists()


def check_plan(printed: str, folder: Path) -> None:
    best, data_parallel, gpipe = (float(x) for x in re.findall(r"^\w+: .* ([\d.]+) ms, bubble", printed, re.MULTILINE))
    assert best < min(data_parallel, gpipe)
    plan, profile = dapple.Plan.load(folder / "plan.json"), dapple.Profile.load(folder / "profile.json")
    timeline = dapple.simulate(plan, profile, dapple.Cluster.load(ROOT / "examples" / "cluster.yaml"))
    assert timeline.step_seconds * 1e3 == pytest.approx(best, rel=1e-3)
    assert "<html" in (folder / "step.html").read_text("utf-8")


@needs_horovod
def test_a_job_of_two_ranks_trains_and_gathers_its_variables() -> None:
    written = [rank.stdout for rank in run_ranks(["examples/two_ranks.py"], 2)]
    losses = [re.findall(r"loss ([\d.]+) -> ([\d.]+)", text)[0] for text in written]
    assert losses[0] == losses[1]
    assert float(losses[0][1]) < float(losses[0][0]) / 10
    for rank, text in enumerate(written):
        here, total = map(int, re.findall(rf"rank {rank}: (\d+) of (\d+) variables are here", text)[0])
        assert 0 < here < total
        assert f"rank {rank}: after gather {total} of {total}" in text
    assert "rank 0: mean error of model.predict" in written[0]


def test_every_example_has_a_test_and_says_how_to_run_it() -> None:
    tests = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    for program in PROGRAMS:
        assert program.stem in tests
        docstring = ast.get_docstring(ast.parse(program.read_text("utf-8")))
        assert docstring is not None
        assert "Run it with ``" in docstring
