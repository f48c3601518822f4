"""Checkpoints of jobs: gathered variables, and killed runs that other numbers of ranks, or one process, resume."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapple_tf.checkpoint.checkpoints import Checkpoints
from dapple_tf.checkpoint.file import open_checkpoint
from tests.dapple_tf.builders import step_of
from tests.dapple_tf.distributed.failing_jobs import assert_ended, assert_stopped
from tests.dapple_tf.distributed.launches import Launches
from tests.dapple_tf.distributed.programs.checkpoint_model import chain
from tests.dapple_tf.distributed.programs.tied_model import X, make_model
from tests.dapple_tf.distributed.train_command import (
    losses_of_one_process,
    model_options,
    printed_result,
    saved_steps,
    saving_in,
    train_arguments,
)
from tests.processes import RanksError, needs_horovod, run_python, run_ranks

pytestmark = needs_horovod


def run_until_killed(folder: Path, layout: str, ranks: int, steps: int, **options: object) -> RanksError:
    """Train, saving every third step, until a rank is killed as the ``options`` say; return how the job ended."""
    with pytest.raises(RanksError) as caught:
        run_ranks(
            train_arguments(layout, steps, *saving_in(folder), *model_options(**options)), ranks, timeout_seconds=90
        )
    assert_ended(caught.value)
    return caught.value


def train_in_one_process(layout: str, steps: int, *options: object) -> list[float]:
    """Return the losses of the same command in one process."""
    done = run_python(*train_arguments(layout, steps, *options))
    losses = json.loads(done.stdout.splitlines()[-1])["losses"]
    assert isinstance(losses, list)
    return losses


def test_a_killed_rank_ends_the_job_and_other_ranks_resume_it(tmp_path: Path) -> None:
    """One launch of three ranks is killed, and another of two resumes; the latter also saves a trace.

    Steps are counted from the begin of the run, also in the message of a launch between them that fails.
    """
    folder, trace = tmp_path / "checkpoints", tmp_path / "trace.json"
    error = run_until_killed(folder, "1,1,1", 3, 12, kill_rank=1, at_batch=9)
    ended = time.time()
    saved = rf"step 6 is saved as {folder}/checkpoint-6\.safetensors; start the job again with ranks that run "
    for number in (0, 2):
        what = r"was killed or has crashed \(its connection closed\)"
        assert_stopped(error.ranks[number], number, 1, what, advice=rf"{saved}\S+ -m dapple_tf train .*")
    assert error.exit_code == 128 + 9
    failed = re.search(r"^failing at ([\d.]+)$", error.ranks[1].stderr, re.MULTILINE)
    assert failed is not None
    assert ended - float(failed[1]) < 10
    assert saved_steps(folder) == [3, 6]

    again = run_until_killed(folder, "1,1", 2, 12, kill_rank=1, at_batch=9, how="raise")
    assert "rank 1 (stage 1), after step 8, raised KeyError: 'no such sample'" in again.ranks[0].stderr

    ranks = run_ranks(train_arguments("1,1", 12, *saving_in(folder), "--trace", trace), 2)
    np.testing.assert_allclose(printed_result(ranks)["losses"], losses_of_one_process(12)[6:], rtol=1e-12)
    assert f"resumed after step 6 from {folder}" in ranks[0].stdout
    assert saved_steps(folder) == [9, 12]
    check_trace_of_two_stages(trace)
    assert ["timeline of one step" in rank.stdout + rank.stderr for rank in ranks] == [True, False]


@pytest.mark.parametrize("how", ["launcher SIGUSR1", pytest.param("SIGTERM", marks=pytest.mark.always), "SIGINT"])
def test_a_job_that_is_asked_to_stop_saves_the_step_that_runs(tmp_path: Path, how: str) -> None:
    """By mpirun, which passes SIGUSR1 on to all ranks, or by a signal of one rank, which is not rank 0."""
    error = run_until_killed(tmp_path, "1,1", 2, 12, kill_rank=1, at_batch=8, how=how)
    assert error.exit_code == 130
    (last,) = set(saved_steps(tmp_path)) - {3, 6}
    assert last in (8, 9)  # the step that was about to begin, or the one after it
    stderr = error.ranks[0].stderr
    name = "SIGUSR1" if how == "launcher SIGUSR1" else how
    assert re.search(
        rf"dapple: rank [01] \(stage [01]\), (in|after) step [78], got {name}: the job stops after the next step and "
        rf"saves it, unless the launcher kills the ranks before; now step 6 is saved as {tmp_path}/checkpoint-6.*; "
        "start the job again with ranks that run .* -m dapple_tf train ",
        stderr,
    ), stderr
    saved = f"step {last} is saved as {tmp_path}/checkpoint-{last}.safetensors; start the job again with ranks "
    assert saved in stderr
    assert [line for line in error.ranks[1].stderr.splitlines() if line.startswith("dapple: rank")] == []


def test_a_job_that_was_asked_to_stop_is_resumed(tmp_path: Path) -> None:
    run_until_killed(tmp_path, "1,1", 2, 12, kill_rank=1, at_batch=8, how="SIGTERM")
    last = max(saved_steps(tmp_path))
    assert last in (8, 9)
    ranks = run_ranks(train_arguments("1,1", 12, *saving_in(tmp_path)), 2)
    np.testing.assert_allclose(printed_result(ranks)["losses"], losses_of_one_process(12)[last:], rtol=1e-12)


def check_trace_of_two_stages(path: Path) -> None:
    """Assert that the trace shows a stage of each rank, predicted and measured."""
    rows = json.loads(path.read_text())["traceEvents"]
    groups = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    names = [(groups[row["pid"]], row["args"]["name"]) for row in rows if row["name"] == "thread_name"]
    for group in ("predicted", "measured"):
        own = [name for process, name in names if process.startswith(group) and name.startswith("stage")]
        assert own == ["stage 0 (rank:0)", "stage 1 (rank:1)"]


def test_a_run_of_replicated_stages_is_killed_and_resumed(tmp_path: Path) -> None:
    whole = train_in_one_process("1,1,1", 12)
    run_until_killed(tmp_path, "2,1", 3, 12, kill_rank=1, at_batch=9)
    assert saved_steps(tmp_path) == [3, 6]
    ranks = run_ranks(train_arguments("1,1", 12, *saving_in(tmp_path)), 2)
    np.testing.assert_allclose(printed_result(ranks)["losses"], whole[6:], rtol=1e-12)
    assert saved_steps(tmp_path) == [9, 12]


def test_a_run_that_is_killed_several_times(tmp_path: Path) -> None:
    """In the middle of a step, and of a save; resumed by the same ranks, fewer, more, by one process, and by two."""
    whole = printed_result(run_ranks(train_arguments("2,1", 18), 3))["losses"]
    assert len(whole) == 18

    folder, copy = tmp_path / "run", tmp_path / "copy"
    run_until_killed(folder, "2,1", 3, 18, kill_rank=2, at_batch=8)
    assert saved_steps(folder) == [3, 6]
    shutil.copytree(folder, copy)
    again = printed_result(run_ranks(train_arguments("2,1", 10, *saving_in(copy)), 3))["losses"]
    assert again == whole[6:10]  # by the same ranks: bit by bit

    run_until_killed(folder, "1,1", 2, 12, kill_rank=0, in_save=folder)  # the save of step 9
    assert saved_steps(folder) in ([3, 6], [6, 9], [3, 6, 9])  # the file may just have got its name

    more = printed_result(run_ranks(train_arguments("1,2,1", 15, *saving_in(folder)), 4))["losses"]
    assert 15 - len(more) in (6, 9)
    np.testing.assert_allclose(more, whole[15 - len(more) : 15], rtol=1e-12)
    alone = train_in_one_process("1,1,1", 17, *saving_in(folder))
    np.testing.assert_allclose(alone, whole[15:17], rtol=1e-12)
    last = printed_result(run_ranks(train_arguments("1,1", 18, *saving_in(folder)), 2))["losses"]
    np.testing.assert_allclose(last, whole[17:], rtol=1e-12)


FAILS_AT, STEPS = 6, 9


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP", "raise"])
def test_the_last_checkpoint_of_a_failed_job_is_intact(tmp_path: Path, how: str) -> None:
    options = [*saving_in(tmp_path, every=1), *model_options(kill_rank=1, at_batch=FAILS_AT, how=how)]
    with pytest.raises(RanksError) as caught:
        run_ranks(train_arguments("1,1", 100_000, *options), 2, environment={"DAPPLE_TIMEOUT_SECONDS": "6"})
    assert_ended(caught.value)
    saved = saved_steps(tmp_path)
    assert saved[-1] in (FAILS_AT - 2, FAILS_AT - 1)  # rank 0 may just have been writing the last one
    for number in saved:
        assert dict(open_checkpoint(tmp_path / f"checkpoint-{number}.safetensors").read())

    workload = chain()
    step = step_of(workload.loss_fn, optimizer=workload.optimizer)
    batches = list(itertools.islice(workload.dataset, STEPS))  # in the order of the run: every epoch is shuffled anew
    step.build(*batches[0])
    position = Checkpoints(tmp_path, step).restore()
    assert (position.steps, position.batches) == (saved[-1], saved[-1])
    losses = [float(step(*batch)) for batch in batches[position.batches :]]
    np.testing.assert_allclose(losses, losses_of_one_process(STEPS)[position.steps :], rtol=1e-12)


# --- gathered variables


def assert_values(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-15, err_msg=name)


GATHERING = [
    pytest.param("three ranks", id="horovodrun"),
    pytest.param("three ranks by mpirun", id="mpirun", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("launch", GATHERING)
def test_every_rank_gathers_what_the_others_trained(launches: Launches, launch: str) -> None:
    results = launches.results(launch, "gathered_variables")
    loss, optimizer, _ = make_model()
    step = step_of(loss, optimizer=optimizer, stages=1)
    for _ in range(3):
        step(X)
    trained = {name: variable.numpy() for name, variable in step.variables.items()}
    step(X)
    one_more = {name: variable.numpy() for name, variable in step.variables.items()}
    assert len([name for name in trained if name.endswith("_velocity")]) == 3
    for seen in results:
        assert_values(seen["gathered"], trained)
        assert_values(seen["one more step"], one_more)
        assert seen["gathered"] == results[0]["gathered"]  # bit by bit
        assert seen["sum"] == pytest.approx(sum(trained[f"w{i}"].sum() for i in range(3)), rel=1e-12)
        for name, value in seen["trained"].items():
            assert value == seen["gathered"][name]


@pytest.mark.parametrize("launch", GATHERING)
def test_a_rank_can_read_the_variables_of_its_program_and_no_others(launches: Launches, launch: str) -> None:
    results = launches.results(launch, "gathered_variables")
    for seen in results:
        for when in ("built", "trained", "saved", "trained again", "restored on their ranks"):
            assert sorted(seen[when]) == seen["captured"]
        for error in seen["read errors"]:
            assert "(other ranks of the job hold and train it; call step.gather() on every rank before this)" in error
    # Rank 0 is stage 0, with w0 (which stage 1 uses too); ranks 1 and 2 are stage 1, with w2 and the counter calls3.
    names = set(results[0]["gathered"])
    of_stage_1 = {"w2", "calls3", *(name for name in names if "w2" in name)}
    of_stage_0 = {"calls0", *(name for name in names if "w0" in name or "w1" in name)}
    assert names - set(results[0]["captured"]) == of_stage_1
    for seen in results[1:]:
        assert names - set(seen["captured"]) == of_stage_0


@pytest.mark.parametrize("launch", GATHERING)
def test_all_ranks_get_the_checkpoint_errors_of_rank_0_and_restore_together(launches: Launches, launch: str) -> None:
    results, folder = launches.results(launch, "gathered_variables"), launches.folder(launch)
    for seen in results:
        not_writable, later_step, unreadable = seen["errors"]
        assert not_writable.startswith("/proc/none cannot hold checkpoints: ")
        assert unreadable == f"{folder}/checkpoint-9.safetensors cannot be read: Is a directory"
        assert "already has checkpoint-9.safetensors, of a later step than 4" in later_step
        assert seen["position"] == 1
        assert seen["restored"] == seen["gathered"]
        assert seen["restored and gathered"] == seen["gathered"]
    assert [len(seen["warnings"]) for seen in results] == [1, 0, 0]
    assert "checkpoint-3.safetensors is damaged: it is " in results[0]["warnings"][0]
    saved = dict(open_checkpoint(folder / "checkpoint-1.safetensors").read())
    assert saved.keys() == results[0]["gathered"].keys()
    np.testing.assert_allclose(saved["w2"], results[0]["gathered"]["w2"], rtol=1e-12)


# --- traces that cannot be saved


def test_a_trace_that_cannot_be_saved_ends_all_ranks_before_training(tmp_path: Path) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(train_arguments("1,1", 3, "--trace", tmp_path / "t.gif"), 2)
    assert caught.value.exit_code == 2
    errors = [rank.stderr for rank in caught.value.ranks]
    assert "t.gif: a timeline is saved as .png, .html or .json" in errors[0]
    assert not any("Traceback" in text or "step 1" in text for text in errors), errors


@pytest.mark.slow
def test_a_scaled_loss_accumulation_and_averages_go_on_under_another_cut(launches: Launches) -> None:
    for found in launches.results("two ranks that save a scaled loss", "scaled_checkpoint"):
        assert found["steps"] == 3
        assert found["loss"] < 1e-12
        assert max(found["errors"].values()) < 1e-12
