"""What the command line prints for wrong usage and failures: help, exit codes, errors of one line."""

from __future__ import annotations

import pytest

from tests.dapple_tf.commands.command_line import TINY_MODEL, Run, run_process
from tests.processes import run_python


def other_model(name: str) -> str:
    """Another callable of the file of TINY_MODEL."""
    return TINY_MODEL.replace(":tiny", f":{name}")


@pytest.mark.parametrize(
    "words", [("--help",), ("train", "--help"), ("verify", "-h"), ("timeline", "-h"), ("--version",)]
)
def test_help_and_version(run_here: Run, words: tuple[str, ...]) -> None:
    run = run_here(*words)
    assert (run.code, run.stderr) == (0, "")
    assert "dapple" in run.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train",), "Missing argument 'MODEL'"),
        (("trane", TINY_MODEL), "There is no command 'trane'; did you mean train?"),
        (("train", TINY_MODEL, "--stages"), "requires an argument"),
        (("train", TINY_MODEL, "--stagez", 2), "No such option"),
        (("plan", "p.json", "--stages", 2), "The planner chooses stages and replicas: leave --stages out"),
        (("plan", "p.json", "--stagez", 2), "No such option"),
        (
            ("launch", "--hosts", "h", "-np", 2, "python", "a.py", "--foo"),
            "If --foo belongs to COMMAND, write -- before COMMAND",
        ),
        (("train", TINY_MODEL, "--micro-batches", "many"), "--micro-batches many: give a whole number, auto, or"),
        (("train", TINY_MODEL, "--micro-batches", "--8"), "--micro-batches --8: give a whole number, auto, or"),
        (
            ("train", TINY_MODEL, "--micro-batches", "0.5"),
            "--micro-batches 0.5: give a whole number, auto, or the sampl",
        ),
        (
            ("train", TINY_MODEL, "--micro-batches", "2,,4"),
            "--micro-batches 2,,4: give a whole number, auto, or the sam",
        ),
        (("train", TINY_MODEL, "--replicas", "\u00b2"), "--replicas \u00b2: give one whole number for each stage"),
        (("train", TINY_MODEL, "--replicas", "2;1"), "--replicas 2;1: give one whole number for each stage, such as"),
        (("train", TINY_MODEL, "--devices", 0), "Invalid value for '--devices': 0 is not in the range"),
        (("train", TINY_MODEL, "--steps", 0), "--steps must be at least 1"),
        (("train", TINY_MODEL, "--checkpoint-every", 0), "--checkpoint-every must be at least 1"),
        (
            ("train", TINY_MODEL, "--elastic"),
            "--elastic: a job that is started again goes on from checkpoints",
        ),
        (
            ("train", TINY_MODEL, "--snapshot-every", 5),
            "--snapshot-every: where two hosts are lost at once",
        ),
        (("train", TINY_MODEL, "--snapshot-every", "often"), "Invalid value for '--snapshot-every': 'often' is not"),
        (("train", TINY_MODEL, "--trace", ""), "--trace is empty: name a path, or leave the option out"),
        (("train", TINY_MODEL, "--trace-steps", 9), "--trace-steps must be from 1 to 8"),
        (("train", TINY_MODEL, "--trace-steps", 0), "--trace-steps must be from 1 to 8"),
        (
            ("train", TINY_MODEL, "--trace-ops"),
            "--trace-ops: ops are recorded for a trace only: give",
        ),
        (("train", TINY_MODEL, "--trace-ops", "--trace", "t.png"), "--trace-ops: ops are recorded for a trace only"),
        (("train", TINY_MODEL, "--record", ""), "--record is empty: name a path, or leave the option out"),
        (("train", TINY_MODEL, "--tensorboard", ""), "--tensorboard is empty"),
        (("train", TINY_MODEL, "--checkpoint-dir", ""), "--checkpoint-dir is empty"),
        (("train", TINY_MODEL, "--check-numerics", "--trace", "t.png"), "--trace and --check-numerics: a step that"),
        (("train", TINY_MODEL, "--recompute", "stages:a"), "--recompute stages:a: give numbers of stages, such as"),
        (
            ("train", "--recompute", "model.py:f"),
            "--recompute took model.py:f as its value, so that MODEL is missing: give MODEL first, or write "
            "--recompute=all model.py:f",
        ),
        (
            ("plan", "--recompute", "gpt.json", "--cluster", "config-a", "--global-batch-size", 8),
            "Invalid value for '--recompute': 'gpt.json' is neither all nor none; before PROFILE write --recompute=all",
        ),
        (("verify", TINY_MODEL, "--replicas", "two"), "--replicas two: give one whole number for each stage"),
    ],
)
def test_wrong_usage_exits_with_2(run_here: Run, words: tuple[object, ...], message: str) -> None:
    run = run_here(*words)
    assert (run.code, run.stdout) == (2, "")
    assert message in run.stderr
    *usage, line = run.stderr.splitlines()
    assert line.startswith("error: ")
    assert not usage or usage[0].startswith("Usage: ")
    assert "Traceback" not in run.stderr


def test_without_a_command_the_help_is_shown(run_here: Run) -> None:
    run = run_here()
    assert (run.code, run.stderr) == (2, "")
    assert run.stdout == run_here("--help").stdout


@pytest.mark.parametrize(
    ("words", "message", "exit_code"),
    [
        (("absent.py:f",), "there is no file absent.py", 2),
        (("no_such_module:f",), "module 'no_such_module' cannot be imported", 2),
        (("gpt",), "'gpt' is not a MODEL such as", 2),
        ((TINY_MODEL, "--set", "width"), "--set 'width' is not of the form key=value", 2),
        ((TINY_MODEL, "--set", "widht=3"), "has no option 'widht'; it has width", 2),
        ((other_model("without_options"), "--batch-size", 3), "has no option batch_size, so --batch-size cannot be", 2),
        ((other_model("without_options"), "--seed", 3), "has no option seed, so --seed cannot be given", 2),
        ((other_model("broken"),), "the user's own mistake", 1),
        ((TINY_MODEL, "--set", "empty=True"), "the workload's dataset has no batches", 2),
        ((TINY_MODEL, "--stages", 99), "99 stages are wanted, but the model can be cut in", 2),
        ((TINY_MODEL, "--stages", 0), "stages=0: there must be at least one", 2),
        ((TINY_MODEL, "--stages", 2, "--replicas", "1"), "replicas=[1] names 1 stage, but there are 2", 2),
        ((TINY_MODEL, "--stages", 2, "--replicas", "1,9"), "need 10 devices, but there are 8", 2),
        ((TINY_MODEL, "--stages", 2, "--recompute", "stages:2"), "recompute names stage 2, but the stages are 0", 2),
        ((TINY_MODEL, "--stages", "three"), "no layer is called 'three'; the nearest are ", 2),
        ((TINY_MODEL, "--recompute", "three"), "no layer is called 'three'; the nearest are ", 2),
        ((TINY_MODEL, "--micro-batches", 9), "micro_batches=9 is more than the 8 samples of the batch", 2),
        ((TINY_MODEL, "--stages", 2, "--micro-batches", "2,2,3"), "add up to 7 samples, but the first batch has 8", 2),
        ((TINY_MODEL, "--stages", 2, "--micro-batches", "0.5,0.25"), "the shares add up to 0.75, not to 1", 2),
        ((TINY_MODEL, "--stages", 2, "--micro-batches", "9,-1"), "micro-batch 1 is -1; every one must be larger", 2),
        ((TINY_MODEL, "--micro-batches", "2,6"), "planners know micro-batches of equal sizes only", 2),
        ((TINY_MODEL, "--schedule", "zigzag"), "no schedule is called 'zigzag'; there are gpipe, dapple-a", 2),
        ((TINY_MODEL, "--cluster", "absent.yaml"), "--cluster absent.yaml: there is no such file; presets are", 2),
        ((TINY_MODEL, "--stages", 2, "--schedule", "gpipe", "--cluster", "config-a:2"), "but everything is given", 2),
        ((TINY_MODEL, "--plan", "absent.json"), "absent.json: there is no such file", 2),
        ((TINY_MODEL, "--devices", 3), "TensorFlow has already started with 8 devices", 1),
        ((TINY_MODEL, "--trace", "t.gif"), "--trace: t.gif: a timeline is saved as .png, .html or .json", 2),
        ((TINY_MODEL, "--trace", "setup.py/t.png"), "--trace: setup.py/t.png: setup.py is a file, not a folder", 2),
        ((TINY_MODEL, "--record", "setup.py/r.jsonl"), "--record: setup.py/r.jsonl: setup.py is a file, not", 2),
        (
            (TINY_MODEL, "--tensorboard", "setup.py"),
            "--tensorboard: setup.py cannot hold TensorBoard's events",
            2,
        ),
        # Paths are checked before the model is made.
        (
            (TINY_MODEL, "--set", "absent=1", "--checkpoint-dir", "setup.py"),
            "--checkpoint-dir: setup.py cannot hold checkpoints: it is a file, not a folder",
            2,
        ),
        (
            (TINY_MODEL, "--set", "absent=1", "--trace", "absent/t.png"),
            "--trace: absent/t.png: its folder is missing: make absent, or correct the path",
            2,
        ),
        (
            (TINY_MODEL, "--set", "absent=1", "--tensorboard", "setup.py/d"),
            "setup.py/d cannot hold TensorBoard's events: Not a dir",
            2,
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_failure_is_one_line_on_stderr(
    run_here: Run, words: tuple[object, ...], message: str, exit_code: int
) -> None:
    run = run_here("train", *words)
    assert run.code == exit_code  # 2: wrong usage
    # On a busy machine a notice may say what takes long.
    (line,) = [line for line in run.stderr.splitlines() if line and not line.startswith("dapple: ")]
    assert line.startswith("error: ")
    assert message in line
    assert "loss" not in run.stdout, "nothing was trained"


def test_a_failure_in_a_process_of_its_own_is_one_line_on_stderr() -> None:
    run = run_process("train", TINY_MODEL, "--stages", "three")
    assert (run.code, run.stdout) == (2, "")
    assert run.stderr.splitlines()[-1].startswith("error: no layer is called 'three'; the nearest are ")
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("error", [ZeroDivisionError, RuntimeError, TypeError])
def test_an_unexpected_error_keeps_its_traceback(
    run_here: Run, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error("not ours")

    monkeypatch.setattr("dapple_tf.commands.training_run.run_training", fail)
    with pytest.raises(error, match="not ours"):
        run_here("train", TINY_MODEL)


def test_an_interrupted_run_prints_stopped(run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dapple_tf.commands.training_run.run_training", interrupt)
    run = run_here("train", TINY_MODEL)
    assert run.code == 130
    assert run.stderr.strip().endswith("stopped")


def test_a_former_name_of_an_option_works_and_says_the_new_one(run_here: Run) -> None:
    run = run_here("schedules", "zb-h1", "--backward", 3, "--weights=2", "--stages", 2, "--micro-batches", 2)
    assert run.code == 0
    assert run.stderr == "dapple: --weights is now --weight-gradients; the old name will go in version 0.3\n"
    assert (
        run.stdout
        == run_here(
            *("schedules", "zb-h1", "--backward", 3, "--weight-gradients", 2, "--stages", 2, "--micro-batches", 2)
        ).stdout
    )


def test_quiet_shows_results_only_and_verbose_more_than_usual() -> None:
    words = ("train", TINY_MODEL, "--stages", 2, "--micro-batches", 2, "--steps", 2)
    usual, quiet, verbose = (run_process(*words, *more) for more in ((), ("-q",), ("--verbose",)))
    assert (quiet.code, usual.code, verbose.code) == (0, 0, 0)
    assert quiet.stderr == ""
    assert quiet.stdout.splitlines()[0] == usual.stdout.splitlines()[0]
    assert "dapple: loads" in usual.stderr
    assert "dapple: traces and classifies the loss took" not in usual.stderr
    assert "dapple: traces and classifies the loss took" in verbose.stderr


def test_quiet_and_verbose_exclude_each_other(run_here: Run) -> None:
    run = run_here("schedules", "gpipe", "-q", "-v")
    assert (run.code, run.stdout) == (2, "")
    assert "--quiet and --verbose exclude each other: give one of them" in run.stderr


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("tr", "train"),
        ("plan --planner pi", "pipedream"),
        ("plan --schedule zb", "zb-h1"),
        ("plan --cluster con", "config-a"),
        ("compare --planners b", "bapipe"),
        ("compare --planners best,pip", "best,pipedream"),
        ("schedules 1", "1f1b"),
        ("train --batch-norm s", "sync"),
        ("train --base", "--baseline"),
    ],
)
def test_the_shell_completes_commands_options_and_values(words: str, wanted: str) -> None:
    text = f"dapple {words}"
    variables = {
        "_DAPPLE_COMPLETE": "bash_complete",
        "COMP_WORDS": text,
        "COMP_CWORD": str(len(text.split()) - 1),
    }
    program = "import sys; sys.argv[0] = 'dapple'; from dapple_tf.cli import main; main()"
    done = run_python("-c", program, variables=variables)
    assert f"plain,{wanted}" in done.stdout.splitlines(), done.stderr
