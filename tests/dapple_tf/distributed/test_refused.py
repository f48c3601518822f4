"""Ranks that do not fit together say so at the start, on every rank, and what differs; and all end."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.paths import ROOT
from tests.processes import RanksError, needs_horovod, run_ranks


@functools.cache
def refusals() -> list[dict[str, dict[str, Any]]]:
    """By rank and case, what was told; two ranks."""
    ranks = run_ranks(["-m", "tests.dapple_tf.distributed.programs.refuse"], 2)
    assert all(rank.stdout.endswith("trained\n") for rank in ranks)
    lines = [[json.loads(line) for line in rank.stdout.splitlines() if line.startswith("{")] for rank in ranks]
    return [{line["case"]: line for line in found} for found in lines]


DIFFER = "JobError: the ranks differ in their "


@needs_horovod
@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("too few stages", ["PlanError: the plan is for 1 ranks, [0], but the job has 2: start as many processes"]),
        ("too many stages", ["PlanError: 3 stages with replicas [1, 1, 1] need 3 devices, but there are 2"]),
        ("a plan for fewer ranks", ["PlanError: the plan is for 1 ranks, [0], but the job has 2"]),
        ("a plan for other devices", ["PlanError: the plan is for 2 ranks, [0, 2], but the job has 2"]),
        ("other plans", [f"{DIFFER}plan: rank 0 has ", "micro_batches=2", "rank 1 has ", "micro_batches=4"]),
        ("a plan on one rank only", [f"{DIFFER}call of dapple.pipeline: rank 0 has Request(stages=2", "stages='auto'"]),
        ("other requests", [f"{DIFFER}call of dapple.pipeline: rank 0 has ", "micro_batches=2", "micro_batches=4"]),
        ("other batch sizes", [f"{DIFFER}number of samples: rank 0 has 8, rank 1 has 6"]),
        ("other dtypes", [f"{DIFFER}layers of the model: rank 0 has ('layer0/matmul'", "rank 1 has ('Cast'"]),
        ("other layers", [f"{DIFFER}layers of the model: ", "'layer3/matmul'"]),
        ("other code", [f"{DIFFER}layers of the model: ", "'layer0/Cos'", "'layer0/Sin'"]),
        ("other branches", [f"{DIFFER}graph of the model, or code: rank 0 has ", "rank 1 has "]),
        ("other constants", [f"{DIFFER}tensors that the model closes over: rank 0 has ", "rank 1 has "]),
        ("other TensorFlow", [f"{DIFFER}TensorFlow version: rank 0 has 2.", "rank 1 has 9.9.9"]),
        ("a batch too small for the replicas", ["BatchError: the batch has 1 samples, too few for the 2 ranks of a"]),
        ("rank 0 cannot decide", ["JobError: rank 0 failed with UnpicklableError: no plan in the air"]),
        (
            "long facts",
            [f"{DIFFER}text: rank 0 has ... aaa", "aaanotherbbb", "bbb ..., rank 1 has ... aaa", "aaaonebbb"],
        ),
        ("gradients", ["UsageError: a step of several processes gives no gradients yet"]),
    ],
)
def test_every_rank_says_what_is_wrong(case: str, parts: list[str]) -> None:
    for rank in refusals():
        for part in parts:
            assert part in rank[case]["told"]


@needs_horovod
def test_where_one_rank_fails_it_says_why_and_the_other_says_who() -> None:
    first, last = (rank["one rank fails"]["told"] for rank in refusals())
    assert last.startswith("KeyError: ")
    assert "no such layer" in last
    assert first.startswith("JobError: rank 1 failed with KeyError: ")
    assert "no such layer" in first


@needs_horovod
@pytest.mark.parametrize(
    ("case", "teller", "told"),
    [
        ("other requests", 0, f"{DIFFER}call of dapple.pipeline"),
        pytest.param("one rank fails", 1, "KeyError: 'no such layer'", marks=pytest.mark.slow),
        pytest.param("too many stages", 0, "PlanError: 3 stages with", marks=pytest.mark.slow),
    ],
)
def test_an_error_at_the_start_ends_all_ranks_and_is_told_once(case: str, teller: int, told: str) -> None:
    """Not by each with its traceback; where one rank alone has failed, by that rank."""
    start = time.monotonic()
    with pytest.raises(RanksError) as caught:
        run_ranks(["-m", "tests.dapple_tf.distributed.programs.refuse", case], 2, timeout_seconds=100)
    assert caught.value.exit_code not in (None, 0)  # None: they hung
    assert not caught.value.left
    teller_said, other_said = (caught.value.ranks[rank].stderr for rank in (teller, 1 - teller))
    assert told in teller_said
    assert teller_said.count("Traceback") == 1
    assert f"dapple: rank {1 - teller} ends, for the reason that rank {teller} tells (" in other_said
    assert "Traceback" not in other_said
    assert time.monotonic() - start < 100


TRAIN = ["-m", "dapple_tf", "train", "tests/dapple_tf/distributed/programs/checkpoint_model.py:chain"]


@needs_horovod
@pytest.mark.slow
def test_on_the_command_line_one_rank_tells_an_error_and_the_others_say_a_line() -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks([*TRAIN, "--plan", "absent.json"], 2)
    assert caught.value.exit_code == 1
    first, last = caught.value.ranks
    assert "error: absent.json: not a readable JSON file" in first.stderr
    assert last.stderr == "dapple: rank 1 ends, for the reason that rank 0 tells (PlanError)\n"


@needs_horovod
def test_only_one_rank_explains_the_usage() -> None:
    """Before the ranks know each other; one that ends may have another killed that has not spoken."""
    with pytest.raises(RanksError) as caught:
        run_ranks([*TRAIN, "--steps", "0"], 2)
    assert caught.value.exit_code == 2
    first, last = caught.value.ranks
    assert "rror: --steps must be at least 1\n" in first.stderr + last.stderr
    assert last.stderr in ("", "error: --steps must be at least 1\n")


WITHOUT_HOROVOD = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "horovod":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
import dapple_tf as dapple
try:
    dapple.init()
except dapple.errors.DeviceError as error:
    print(error)
"""


def test_a_job_without_horovod_says_how_to_install_it() -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "HOROVOD_"))}
    launcher = {"SIZE": "2", "RANK": "0", "LOCAL_SIZE": "2", "LOCAL_RANK": "0"}
    environment = {
        **inherited,
        **{f"OMPI_COMM_WORLD_{name}": value for name, value in launcher.items()},
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HOROVOD],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    told = "the launcher started 2 processes, but Horovod is not installed here (No module named 'horovod"
    assert done.stdout.startswith(told), done.stderr
    assert "run scripts/install_horovod.sh" in done.stdout
