"""Ranks that do not match say so at the start, on every rank, and what differs; and all end."""

from __future__ import annotations

import time

import pytest

from dapple_tf.launcher.restart import REFUSED, VARIABLE, Start
from tests.dapple_tf.distributed.launches import Launches
from tests.dapple_tf.distributed.train_command import MODEL, train_arguments
from tests.processes import RanksError, needs_horovod, run_python, run_ranks

DIFFER = "JobError: the ranks differ in their "


@needs_horovod
@pytest.mark.parametrize(
    ("case", "parts"),
    [
        (
            "too few stages",
            ["PlanError: what was asked for, 1 stage with replicas [1], uses 1 rank, [0], but the job has 2"],
        ),
        ("too many stages", ["PlanError: 3 stages with replicas [1, 1, 1] need 3 devices, but there are 2"]),
        ("a plan for fewer ranks", ["PlanError: the plan is for 1 rank, [0], but the job has 2"]),
        ("a plan for other devices", ["PlanError: the plan is for 2 ranks, [0, 2], but the job has 2"]),
        ("different plans", [f"{DIFFER}plan: rank 0 has ", "'micro_batches': 2", "rank 1 has ", "'micro_batches': 4"]),
        ("a plan on one rank only", [f"{DIFFER}call of dapple.pipeline: rank 0 has Options(stages=2", "stages='auto'"]),
        ("different options", [f"{DIFFER}call of dapple.pipeline: rank 0 has ", "micro_batches=2", "micro_batches=4"]),
        ("different batch sizes", [f"{DIFFER}number of samples: rank 0 has 8, rank 1 has 6"]),
        ("different dtypes", [f"{DIFFER}layers of the model: rank 0 has ('layer0/matmul'", "rank 1 has ('Cast'"]),
        ("different numbers of layers", [f"{DIFFER}layers of the model: ", "'layer3/matmul'"]),
        ("different code", [f"{DIFFER}layers of the model: ", "'layer0/Cos'", "'layer0/Sin'"]),
        ("different branches", [f"{DIFFER}graph of the model, or code: rank 0 has ", "rank 1 has "]),
        ("different constants", [f"{DIFFER}graph of the model, or code: rank 0 has ", "rank 1 has "]),
        ("different TensorFlow versions", [f"{DIFFER}TensorFlow version: rank 0 has 2.", "rank 1 has 9.9.9"]),
        ("a batch too small for the replicas", ["BatchError: the batch has 1 sample, too few for the 2 ranks of a"]),
        ("an error that cannot be pickled", ["JobError: rank 0 failed with UnpicklableError: no plan in the air"]),
        ("a result that cannot be pickled", ["TypeError: cannot pickle '_thread.lock' object"]),
        (
            "long texts",
            [f"{DIFFER}text: rank 0 has ... aaa", "aaanotherbbb", "bbb ..., rank 1 has ... aaa", "aaaonebbb"],
        ),
    ],
)
def test_every_rank_says_what_is_wrong(launches: Launches, case: str, parts: list[str]) -> None:
    for errors in launches.results("two ranks", "mismatched_ranks"):
        for part in parts:
            assert part in errors[case]


@needs_horovod
def test_where_one_rank_fails_it_says_why_and_the_other_says_which(launches: Launches) -> None:
    first, last = (errors["one rank fails"] for errors in launches.results("two ranks", "mismatched_ranks"))
    assert last.startswith("KeyError: ")
    assert "no such layer" in last
    assert first.startswith("JobError: rank 1 failed with KeyError: ")
    assert "no such layer" in first


@needs_horovod
@pytest.mark.parametrize(
    ("case", "reporting", "text"),
    [
        ("different options", 0, f"{DIFFER}call of dapple.pipeline"),
        ("one rank fails", 1, "KeyError: 'no such layer'"),
        ("too many stages", 0, "PlanError: 3 stages with"),
    ],
)
def test_an_error_at_the_start_ends_all_ranks_and_one_prints_it(case: str, reporting: int, text: str) -> None:
    """Not each rank with a traceback; if one rank alone has failed, that rank prints the error."""
    start = time.monotonic()
    with pytest.raises(RanksError) as caught:
        run_ranks(["-m", "tests.dapple_tf.distributed.programs.mismatched_ranks", case], 2, timeout_seconds=100)
    assert caught.value.exit_code not in (None, 0)  # None: they hung
    assert not caught.value.left
    printed, other = (caught.value.ranks[rank].stderr for rank in (reporting, 1 - reporting))
    assert text in printed
    assert printed.count("Traceback") == 1
    assert f"dapple: rank {1 - reporting} ends: rank {reporting} prints the error (" in other
    assert "Traceback" not in other
    assert time.monotonic() - start < 100


@needs_horovod
def test_a_wrong_file_ends_a_job_before_tensorflow_starts() -> None:
    """The ranks do not know each other yet; the launcher may kill one before it has printed anything."""
    with pytest.raises(RanksError) as caught:
        run_ranks(["-m", "dapple_tf", "train", MODEL, "--plan", "absent.json"], 2)
    assert caught.value.exit_code == 2
    printed = {rank.stderr.strip() for rank in caught.value.ranks} - {""}
    (message,) = printed
    assert message.startswith("error: absent.json: there is no such file")


@needs_horovod
def test_only_one_rank_explains_the_usage() -> None:
    """The ranks do not know each other yet; the launcher may kill one before it has printed anything."""
    with pytest.raises(RanksError) as caught:
        run_ranks(["-m", "dapple_tf", "train", MODEL, "--steps", "0"], 2)
    assert caught.value.exit_code == 2
    first, last = caught.value.ranks
    assert "error: --steps must be at least 1\n" in first.stderr + last.stderr
    assert last.stderr in ("", "error: --steps must be at least 1\n")


@needs_horovod
def test_options_that_a_job_does_not_support_are_refused_before_it_starts() -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(train_arguments("1,1", 1, "--baseline", "2"), 2)
    assert caught.value.exit_code == 2
    message = "--baseline: the waiting processes of a job would disturb the timing; measure in one process"
    assert message in caught.value.ranks[0].stderr
    assert not any("Traceback" in rank.stderr for rank in caught.value.ranks)


LAUNCHED = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in {"SIZE": "2", "RANK": "0", "LOCAL_SIZE": "2", "LOCAL_RANK": "0"}.items()
}
WITHOUT_HOROVOD = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "horovod":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
import dapple_tf as dapple
dapple.init()
"""
WITHOUT_INIT = """
import tensorflow as tf
import dapple_tf as dapple
weight = tf.Variable([1.0])
dapple.pipeline(lambda x: tf.reduce_mean(x * weight), optimizer="sgd", stages=2, micro_batches=1)(tf.ones([8, 1]))
"""


@pytest.mark.parametrize(("variables", "exit_code"), [({}, 1), ({VARIABLE: Start(0).to_text()}, REFUSED)])
def test_a_job_without_horovod_says_how_to_install_it_and_is_not_started_again(
    variables: dict[str, str], exit_code: int
) -> None:
    done = run_python("-c", WITHOUT_HOROVOD, variables=LAUNCHED | variables, exit_code=exit_code)
    message = (
        "DeviceError: the launcher started 2 processes, but Horovod is not installed here (No module named 'horovod"
    )
    assert done.stderr.count(message) == 1
    assert "run python -m dapple_tf.distributed.horovod" in done.stderr


def test_a_job_whose_script_does_not_call_init_is_not_started_again() -> None:
    variables = LAUNCHED | {VARIABLE: Start(0).to_text()}
    done = run_python("-c", WITHOUT_INIT, variables=variables, exit_code=REFUSED)
    assert done.stderr.count("but dapple.init() was not called before the pipeline was made") == 1
