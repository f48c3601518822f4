"""Under mpirun: gathered variables, checkpoints, and runs that are killed and go on as other ranks, or as one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapple_tf.checkpoint.file import open_checkpoint
from tests.dapple_tf.builders import step_of
from tests.dapple_tf.distributed.programs.gather_model import X, make_model
from tests.paths import ROOT
from tests.processes import Rank, RanksError, needs_horovod, run_ranks

pytestmark = needs_horovod

MODEL = "tests/dapple_tf/distributed/programs/checkpoint_model.py:chain"


def arguments(folder: Path | None, steps: int, layout: str, *more: object) -> list[str]:
    """Of python: ``dapple train`` in float64, saving every third step."""
    stages = str(layout.count(",") + 1)
    words = ["-m", "dapple_tf", "train", MODEL, "--stages", stages, "--replicas", layout, "--micro-batches", "2"]
    words += ["--steps", str(steps), "--json", *map(str, more)]
    return words if folder is None else [*words, "--checkpoint-dir", str(folder), "--checkpoint-every", "3"]


def result(ranks: Sequence[Rank]) -> dict[str, Any]:
    """The JSON object that rank 0 printed last; the others printed nothing."""
    assert [rank.stdout for rank in ranks[1:]] == [""] * (len(ranks) - 1)
    assert not any("training" in rank.stderr for rank in ranks[1:])
    found = json.loads(ranks[0].stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def steps_in(folder: Path) -> list[int]:
    names = [path.name for path in folder.glob("checkpoint-*.safetensors")]
    return sorted(int(name.removeprefix("checkpoint-").removesuffix(".safetensors")) for name in names)


def train_alone(folder: Path | None, steps: int, layout: str) -> list[float]:
    """Losses of the same command in one process."""
    command = [sys.executable, *arguments(folder, steps, layout)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    losses = json.loads(done.stdout.splitlines()[-1])["losses"]
    assert isinstance(losses, list)
    return losses


def run_killed(folder: Path, steps: int, layout: str, ranks: int, *how: str) -> None:
    """A run of which a rank is killed: it ends, with an error."""
    settings = [word for setting in how for word in ("--set", setting)]
    with pytest.raises(RanksError) as caught:
        run_ranks(arguments(folder, steps, layout, *settings), ranks, timeout_seconds=90)
    assert caught.value.exit_code  # and not a hang


def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = train_alone(None, 12, "1,1,1")
    run_killed(tmp_path, 12, "2,1", 3, "kill_rank=1", "at_batch=9")
    assert steps_in(tmp_path) == [3, 6]
    ranks = run_ranks(arguments(tmp_path, 12, "1,1"), 2)
    np.testing.assert_allclose(result(ranks)["losses"], whole[6:], rtol=1e-12)
    assert f"resumed after step 6 from {tmp_path}" in ranks[0].stdout
    assert steps_in(tmp_path) == [9, 12]


@pytest.mark.slow  # starts 15 processes
def test_a_run_that_is_killed_again_and_again(tmp_path: Path) -> None:
    """In mid-run, and in the middle of a save; restarted as the same ranks, fewer, more, as one process, and as two."""
    whole = result(run_ranks(arguments(None, 18, "2,1"), 3))["losses"]
    assert len(whole) == 18

    folder, other = tmp_path / "run", tmp_path / "other"
    run_killed(folder, 18, "2,1", 3, "kill_rank=2", "at_batch=8")
    assert steps_in(folder) == [3, 6]
    shutil.copytree(folder, other)
    again = result(run_ranks(arguments(other, 10, "2,1"), 3))["losses"]
    assert again == whole[6:10]  # the same ranks: to the last bit

    run_killed(folder, 12, "1,1", 2, "kill_rank=0", f"in_save={folder}")  # step 9's
    assert steps_in(folder) in ([3, 6], [6, 9], [3, 6, 9])  # the file may just have got its name

    more = result(run_ranks(arguments(folder, 15, "1,2,1"), 4))["losses"]
    assert 15 - len(more) in (6, 9)
    np.testing.assert_allclose(more, whole[15 - len(more) : 15], rtol=1e-12)
    np.testing.assert_allclose(train_alone(folder, 17, "1,1,1"), whole[15:17], rtol=1e-12)
    np.testing.assert_allclose(result(run_ranks(arguments(folder, 18, "1,1"), 2))["losses"], whole[17:], rtol=1e-12)


def assert_values(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-15, err_msg=name)


def test_every_rank_gets_what_the_others_trained(tmp_path: Path) -> None:
    ranks = [
        json.loads(rank.stdout)
        for rank in run_ranks(["-m", "tests.dapple_tf.distributed.programs.gather_ranks", str(tmp_path)], 3)
    ]
    loss, optimizer, _ = make_model()
    step = step_of(loss, optimizer=optimizer, stages=1, micro_batches=2)
    for _ in range(3):
        step(X)
    wanted = {name: variable.numpy() for name, variable in step.variables.items()}
    step(X)
    one_more = {name: variable.numpy() for name, variable in step.variables.items()}
    slots = [name for name in wanted if name.endswith("_velocity")]
    assert len(slots) == 3
    for seen in ranks:
        assert_values(seen["after"], wanted)
        assert_values(seen["one more"], one_more)
        assert seen["after"] == ranks[0]["after"]  # and to the last bit alike
        assert seen["sum"] == pytest.approx(sum(wanted[f"w{i}"].sum() for i in range(3)), rel=1e-12)
        for name, value in seen["before"].items():
            assert value == seen["after"][name]
        # A rank can read what its own program does, whatever has come to it for a while, and no more.
        for when in ("built", "before", "saved", "again", "still"):
            assert sorted(seen[when]) == seen["captured"]
        for why in seen["why"]:
            assert "(other ranks of the job hold and train it; call step.gather() on every rank before this)" in why
    # Rank 0 has stage 0, with w0 (which stage 1 also uses); the others w2 and what calls3 counts.
    everything = set(wanted)
    theirs = {"w2", "calls3", *(name for name in everything if "w2" in name)}
    ours = {"calls0", *(name for name in everything if "w0" in name or "w1" in name)}
    assert everything - set(ranks[0]["captured"]) == theirs
    for seen in ranks[1:]:
        assert everything - set(seen["captured"]) == ours

    for seen in ranks:
        refused, late, unreadable = seen["errors"]
        assert refused.startswith("/proc/none cannot hold checkpoints: ")
        assert unreadable == f"{tmp_path}/checkpoint-9.safetensors cannot be read: Is a directory"
        assert "already has checkpoint-9.safetensors, of a later step than 4" in late
        assert seen["position"] == 1
        assert seen["restored"] == seen["after"]
        assert seen["restored apart"] == seen["after"]
    assert [len(seen["warnings"]) for seen in ranks] == [1, 0, 0]
    assert "checkpoint-3.safetensors is damaged: it is " in ranks[0]["warnings"][0]
    saved = dict(open_checkpoint(tmp_path / "checkpoint-1.safetensors").read())
    assert saved.keys() == wanted.keys()
    np.testing.assert_allclose(saved["w2"], wanted["w2"], rtol=1e-12)


def test_what_a_job_cannot_do_is_told_before_it_starts() -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(arguments(None, 1, "1,1", "--compare", "2"), 2)
    assert caught.value.exit_code == 2
    message = "--compare: the waiting processes of a job would disturb the timing; compare in one process"
    assert message in caught.value.ranks[0].stderr
    assert not any("Traceback" in rank.stderr for rank in caught.value.ranks)


def test_a_job_saves_one_trace_of_all_ranks(tmp_path: Path) -> None:
    told = run_ranks(arguments(None, 3, "1,1", "--trace", str(tmp_path / "t.json")), 2)
    rows = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    groups = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    names = [(groups[row["pid"]], row["args"]["name"]) for row in rows if row["name"] == "thread_name"]
    for group in ("predicted", "measured"):
        own = [name for process, name in names if process.startswith(group) and name.startswith("stage")]
        assert own == ["stage 0 (rank:0)", "stage 1 (rank:1)"]
    assert "timeline of one step" in told[0].stdout + told[0].stderr
    assert "timeline of one step" not in told[1].stdout + told[1].stderr


@pytest.mark.slow
def test_a_trace_that_cannot_be_saved_is_told_by_every_rank_before_training(tmp_path: Path) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(arguments(None, 3, "1,1", "--trace", str(tmp_path / "t.gif")), 2)
    told = [rank.stderr for rank in caught.value.ranks]
    assert all("t.gif: a timeline is saved as .png, .html or .json" in text for text in told[:1]), told
    assert not any("Traceback" in text or "step 1" in text for text in told), told
