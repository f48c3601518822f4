"""``dapple report``: the record of a run of a tiny model, resumed, killed or damaged, and its page."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from dapple_tf.checkpoint.content import Position
from dapple_tf.commands.run_file import NAME, RunEnd, RunFile, RunStart, RunStep, read_run
from dapple_tf.commands.training_report import find_restart
from dapple_tf.errors import RunError
from dapple_tf.launcher.restart import VARIABLE, Start
from dapple_tf.timeline.trace_file import read_recording
from tests.dapple_tf.commands.command_line import TINY_MODEL, Outcome, Run, run_in_process, run_process
from tests.dapple_tf.drawing.test_chart import Page
from tests.dapple_tf.timeline.test_trace import Viewer
from tests.processes import run_python

TRAIN = ("train", TINY_MODEL, "--micro-batches", 2, "--stages", 2, "--seed", 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcome:
    """Six steps, of which the last three are recorded, and then three more."""
    saved = ("--checkpoint-dir", folder / "run", "--json")
    first = run_in_process(*TRAIN, *saved, "--steps", 6, "--trace", folder / "t.json", "--trace-steps", 3)
    assert first.json["record"] == str(folder / "run" / NAME)
    return run_in_process(*TRAIN, *saved, "--steps", 9)


@pytest.fixture
def lines(trained: Outcome, folder: Path) -> list[str]:
    """The lines of the record."""
    assert trained.code == 0
    return (folder / "run" / NAME).read_text().splitlines()


@pytest.mark.usefixtures("trained")
def test_a_run_records_its_steps_its_plan_and_what_it_ran_on(folder: Path) -> None:
    found = read_run(folder / "run")
    assert [step.number for step in found.steps] == list(range(1, 10))
    assert [step.number for step in found.steps if step.bubble is not None] == [4, 5, 6]
    assert (found.resumed, found.first_steps) == ((6,), (1, 7))
    assert (found.start.steps, found.start.processes, found.start.model) == (9, 1, TINY_MODEL)
    assert set(found.start.versions) == {"dapple_tf", "TensorFlow", "Keras", "NumPy", "Python"}
    assert found.start.options["--stages"] == "2"
    assert "--batch-size" not in found.start.options
    assert len(found.plan.stages) == 2
    assert len(found.start.layer_names) == found.plan.stages[-1].last_layer + 1
    assert all(stage.in_step > 0 for stage in found.start.memory)


@pytest.mark.usefixtures("trained")
def test_the_trace_of_several_steps_has_these_and_their_memory(folder: Path) -> None:
    measured = read_recording(folder / "t.json").measured
    assert len(measured.earlier) == 2
    assert measured.memory_curves
    viewer = Viewer(json.loads((folder / "t.json").read_text()))
    names = [name for spans in viewer.spans.values() for _, _, name in spans]
    assert names.count("1F1") == 4, "measured three times, and predicted"


def test_the_losses_are_those_that_train_prints(trained: Outcome, folder: Path) -> None:
    assert [step.loss for step in read_run(folder / "run").steps][6:] == trained.json["losses"]


def test_the_first_part_of_a_run_has_measured_memory_and_a_simulated_bubble(lines: list[str], tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("".join(f"{line}\n" for line in lines[:8]))
    end = read_run(tmp_path).end
    predicted, measured = end.together
    assert predicted > 0
    assert measured >= 0  # a model this small may fit into memory that was freed before
    assert end.simulated_bubble is not None


@pytest.mark.usefixtures("trained")
def test_the_report_is_one_page_with_curves_memory_plan_versions_and_options(run_here: Run, folder: Path) -> None:
    run = run_here("report", folder / "run", "-o", folder / "r.html")
    assert (run.code, run.stderr) == (0, "")
    assert "steps: 9 of 9, resumed after step 6" in run.stdout
    assert re.search(r"bubble: [\d.]+% measured \(3 recorded steps\)", run.stdout)
    assert re.search(r"loss: \S+ → \S+, least \S+\n", run.stdout)
    text = (folder / "r.html").read_text()
    page = Page(text)
    assert page.open == []
    assert [svg["id"] for svg in page.named("svg") if "id" in svg] == ["loss", "speed"]
    assert page.titles[0] == "tiny · loss: dapple-a, M = 2"
    for told in ("Memory of one device of each stage", "TensorFlow", "--checkpoint-dir", "layers 0 to", "stage 1"):
        assert told in text
    assert not re.search(r"\b(src|href)\s*=|@import|url\(|<script|http", text)
    assert "prefers-color-scheme: dark" in text


@pytest.mark.usefixtures("trained")
def test_the_figures_are_printed_as_json(run_here: Run, folder: Path) -> None:
    found = run_here("report", folder / "run", "--json").json
    assert (found["steps"], found["done"], found["resumed"], found["recorded_steps"]) == (9, 9, [6], 3)
    assert found["least_loss"] <= found["last_loss"] < found["first_loss"]
    assert found["samples_per_second"] == pytest.approx(8 / found["step_seconds"])
    assert 0 < found["bubble"] < 1
    assert found["planned_step_seconds"] is None
    assert len(found["memory"]) == 2
    assert found["options"]["--steps"] == "9"


@pytest.mark.usefixtures("trained")
def test_a_report_needs_no_tensorflow(folder: Path) -> None:
    code = f"import sys; sys.argv = ['dapple', 'report', {str(folder / 'run')!r}]\n"
    code += "from dapple_tf.cli import cli\ncli(standalone_mode=False)\nprint('tensorflow' in sys.modules)"
    assert run_python("-c", code).stdout.splitlines()[-1] == "False"


def test_a_run_that_was_killed_while_writing_keeps_its_whole_lines(lines: list[str], tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("\n".join(lines[:5]) + '\n{"step": {"numb')
    assert [step.number for step in read_run(tmp_path).steps] == [1, 2, 3, 4]


def test_a_resumed_run_goes_on_behind_the_last_whole_line_and_replaces_repeated_steps(
    run_here: Run, tmp_path: Path
) -> None:
    saved = (*TRAIN, "--checkpoint-dir", tmp_path, "--checkpoint-every", 2)
    assert run_here(*saved, "--steps", 2).code == 0
    killed = [json.dumps({"step": {"number": n, "seconds": 1.0, "samples": 8, "loss": 77.0}}) for n in (3, 4)]
    with (tmp_path / NAME).open("a") as stream:
        stream.write("\n".join(killed) + '\n{"step": {"numb')
    assert run_here(*saved, "--steps", 3).code == 0
    found = read_run(tmp_path)
    assert [step.number for step in found.steps] == [1, 2, 3]
    assert found.steps[2].loss != 77.0
    assert found.resumed == (2,)


def test_a_record_of_its_own_is_replaced_by_a_run_from_the_beginning(run_here: Run, tmp_path: Path) -> None:
    for _ in range(2):
        run = run_here(*TRAIN, "--steps", 2, "--record", tmp_path / "r.jsonl")
        assert f"record of the run: {tmp_path}/r.jsonl" in run.stdout
    found = read_run(tmp_path / "r.jsonl")
    assert [step.number for step in found.steps] == [1, 2]
    assert found.resumed == ()


def test_windows_are_recorded_too(run_here: Run, tmp_path: Path) -> None:
    window = ("train", TINY_MODEL, "--stages", 2, "--async", "--minibatches", 4, "--seed", 3)
    run = run_here(*window, "--steps", 2, "--record", tmp_path / "r.jsonl")
    assert run.code == 0, run.stderr
    report = run_here("report", tmp_path / "r.jsonl", "-o", tmp_path / "r.html").stdout
    assert "windows: 2 of 2" in report
    assert "a window takes: " in report
    assert "Mean loss of a window" in (tmp_path / "r.html").read_text()


@pytest.mark.filterwarnings("ignore")
def test_a_loss_that_is_not_finite_is_recorded_without_a_number(run_here: Run, tmp_path: Path) -> None:
    run_here(*TRAIN, "--steps", 4, "--set", "infinite=True", "--record", tmp_path / "r.jsonl")
    found = read_run(tmp_path / "r.jsonl")
    assert [step.loss is None for step in found.steps] == [False, False, True, True]
    report = run_here("report", tmp_path / "r.jsonl", "-o", tmp_path / "r.html")
    assert "2 not finite" in report.stdout
    assert "nan" not in (tmp_path / "r.html").read_text().lower()


@pytest.mark.parametrize(
    ("line", "place", "value", "message"),
    [
        (1, "format", "dapple-run/9", r"line 1: format is 'dapple-run/9', not 'dapple-run/1'"),
        (1, "start.steps", "many", r"line 1: start\.steps is 'many', not a whole number"),
        (1, "start.plan.stages", [], r"line 1: start\.plan: a plan needs at least one stage"),
        (1, "start.memory", [{"fixed": 1}], r"line 1: start\.memory\[0\]\.in_step is missing"),
        (1, "start.time", 1e300, r"line 1: start\.time is 1e\+300, beyond the year 9999"),
        (2, "step.loss", "low", r"line 2: step\.loss is 'low', not a finite number"),
        (2, "step.numbr", 3, r"line 2: step\.numbr is not a field of this file; did you mean 'number'"),
        (2, "end", {}, r"line 2: it has not one of start, step and end"),
    ],
)
def test_the_error_for_a_damaged_record_names_the_line_and_the_field(
    lines: list[str], tmp_path: Path, line: int, place: str, value: Any, message: str
) -> None:
    data = json.loads(lines[line - 1])
    *path, last = place.split(".")
    inner = data
    for name in path:
        inner = inner[name]
    inner[last] = value
    (tmp_path / NAME).write_text(
        "".join(f"{text}\n" for text in [*lines[: line - 1], json.dumps(data), *lines[line:6]])
    )
    with pytest.raises(RunError, match=message) as raised:
        read_run(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path}/{NAME}: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it holds no run: train with --checkpoint-dir DIR or --record FILE"),
        ("{}\n", "line 1: format is missing"),
        ('{"format": "dapple-run/1"}\n', "line 1: start is missing"),
        ("loss 3\n", "line 1: not a readable JSON file"),
        ('{"format": "dapple-run/1", "start": NaN}\n', "NaN is not a number"),
    ],
)
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "r.jsonl").write_text(text)
    with pytest.raises(RunError, match=message):
        read_run(tmp_path / "r.jsonl")


def test_a_resumed_run_does_not_append_to_another_file(run_here: Run, tmp_path: Path) -> None:
    saved = (*TRAIN, "--checkpoint-dir", tmp_path / "run")
    assert run_here(*saved, "--steps", 2).code == 0
    (tmp_path / "notes.txt").write_text("mine\n")
    run = run_here(*saved, "--steps", 3, "--record", tmp_path / "notes.txt")
    assert run.code == 2
    assert "notes.txt: line 1: not a readable JSON file" in run.stderr
    assert (tmp_path / "notes.txt").read_text() == "mine\n"


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("absent",), "absent: there is no such record of a run: train with --checkpoint-dir DIR or --record FILE"),
        ((".",), "run.jsonl: there is no such record of a run"),
        (("run", "-o", "r.png"), "--output: r.png: a report is saved as .html"),
        (("run", "-o", "absent/r.html"), "--output: absent/r.html: its folder is missing"),
        (("run", "-o", ""), "--output: the path of the file to write is empty"),
    ],
)
def test_wrong_usage_exits_with_2(
    run_here: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(folder)
    run = run_here("report", *words)
    assert (run.code, run.stdout) == (2, "")
    assert message in run.stderr


def test_a_record_that_cannot_be_written_is_refused_before_training(run_here: Run) -> None:
    run = run_here(*TRAIN, "--steps", 2, "--record", "/dev/full")
    assert run.code == 2
    assert "--record: /dev/full cannot be written: it is a device or a pipe, not a file" in run.stderr
    assert "loss" not in run.stdout


def test_a_record_ends_with_a_warning_where_the_disk_is_full(lines: list[str]) -> None:
    start = RunStart(**{**json.loads(lines[0])["start"], "memory": ()})
    told: list[str] = []
    with RunFile("/dev/full", start, told.append) as record:
        record.add_step(RunStep(1, 1.0, 8, 2.0))
        record.end(RunEnd())
    assert told == ["warning: /dev/full cannot be written (No space left on device): the record of the run ends here"]


def test_a_restart_by_a_host_whose_clock_is_ahead_leaves_a_record_that_can_be_read(
    lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the start after it is refused, as one that finds another file in place of the record."""
    (tmp_path / NAME).write_text("".join(f"{line}\n" for line in lines))
    monkeypatch.setenv(VARIABLE, Start(1, ended=time.time() + 100, cause="exit code 9").to_text())
    restart = find_restart(None, read_run(tmp_path).plan, 1, Position(9, 9))
    start = RunStart(**{**json.loads(lines[0])["start"], "memory": (), "restart": restart})
    with RunFile(tmp_path / NAME, start, pytest.fail) as record:
        record.end(RunEnd())
    assert [restart.seconds for restart in read_run(tmp_path).restarts] == [0.0]


@pytest.mark.parametrize("length", [0, 5, 60])
def test_a_record_whose_first_line_is_not_complete_begins_anew(lines: list[str], tmp_path: Path, length: int) -> None:
    """The disk was full; the run that goes on must not be refused, which would end a launched job for good."""
    (tmp_path / NAME).write_text(lines[0][:length])
    start = RunStart(**{**json.loads(lines[0])["start"], "memory": (), "done": 6})
    with RunFile(tmp_path / NAME, start, pytest.fail) as record:
        record.add_step(RunStep(7, 1.0, 8, 2.0))
    assert [step.number for step in read_run(tmp_path).steps] == [7]


def test_another_file_in_place_of_a_record_is_not_overwritten(lines: list[str], tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"format": "notes"')
    start = RunStart(**{**json.loads(lines[0])["start"], "memory": (), "done": 6})
    with pytest.raises(RunError, match="it holds no run"):
        RunFile(tmp_path / NAME, start, pytest.fail)
    assert (tmp_path / NAME).read_text() == '{"format": "notes"'


def test_a_run_whose_record_is_too_large_goes_on_without(lines: list[str], tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(lines[0] + "\n")
    os.truncate(tmp_path / NAME, 2**26 + 1)
    start = RunStart(**{**json.loads(lines[0])["start"], "memory": (), "done": 6})
    told: list[str] = []
    with RunFile(tmp_path / NAME, start, told.append) as record:
        record.add_step(RunStep(7, 1.0, 8, 2.0))
    assert told == [f"warning: {tmp_path / NAME} has more than 64 MiB: the record of the run ends here"]


def test_a_long_curve_is_drawn_by_the_least_and_largest_of_each_part(lines: list[str], tmp_path: Path) -> None:
    steps = [
        json.dumps({"step": {"number": n, "seconds": 9.0 if n == 5000 else 1.0, "samples": 8, "loss": n % 7 + 1.0}})
        for n in range(1, 20_001)
    ]
    (tmp_path / NAME).write_text("".join(f"{line}\n" for line in [lines[0], *steps]))
    run = run_process("report", tmp_path, "-o", tmp_path / "r.html")
    assert run.code == 0, run.stderr
    text = (tmp_path / "r.html").read_text()
    assert "Seconds of a step (1 took longer than is shown)" in text
    assert len(text) < 200_000
