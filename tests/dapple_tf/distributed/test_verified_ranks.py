"""``dapple.verify`` in a job: every rank is told the same, and the truth."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.dapple_tf.commands.command_line import TINY_MODEL
from tests.dapple_tf.distributed.launches import QUICK_VERIFIED, Launches
from tests.processes import RanksError, needs_horovod, run_ranks

pytestmark = needs_horovod

EQUAL, DIFFERS = ": equal to one device\n", ": DIFFERS from one device\n"
IN_TURN = ": NOT equal to plain training, but equal to the same micro-batches one after the other\n"
DIVIDED = ": NOT equal to plain training, but equal to plain training whose batch norm alone takes "


def reports(launches: Launches, case: str) -> list[Any]:
    """Return what two ranks were told in a case."""
    launch = "two ranks" if case in QUICK_VERIFIED else "two ranks that verify other models"
    return [found[case] for found in launches.results(launch, "verified")]


def marked(case: str, *expected: str) -> Any:
    return pytest.param(case, *expected, marks=() if case in QUICK_VERIFIED else pytest.mark.slow)


@pytest.mark.parametrize(
    ("case", "outcome", "more"),
    [
        marked("two stages", EQUAL, ""),
        marked("two replicas", EQUAL, ""),
        marked("four stages", EQUAL, ""),
        marked("two stages on each of two replicas", EQUAL, ""),
        marked("a compiled loss", EQUAL, ""),
        marked("batch norm", IN_TURN, "because of "),
        marked("batch norm, two replicas", DIVIDED, "because of "),
        marked("deferred batch norm", DIVIDED, "its moving statistics are those of the whole batch"),
        marked("deferred batch norm, two replicas", DIVIDED, "because of "),
        marked("batch norm over two replicas", IN_TURN, "it takes them over all replicas"),
        marked("noise", DIFFERS, "first to diverge: loss 'loss', error "),
        marked("NaN", EQUAL, "NaN or infinite in loss 'loss', and in 16 more tensors: one device has it too"),
    ],
)
def test_every_rank_gets_the_same_report(launches: Launches, case: str, outcome: str, more: str) -> None:
    first, second = reports(launches, case)
    assert first == second
    assert outcome in first["text"]
    assert more in first["text"]
    assert first["json"]["ok"] is (outcome != DIFFERS)
    assert first["rank 0's values"]


def test_the_verdict_on_an_embedding_is_that_of_one_process(launches: Launches) -> None:
    from tests.dapple_tf.verification.models import embeddings, repeated_ids
    from tests.dapple_tf.verification.test_run import report_of

    _, loss_fn = embeddings()
    report = report_of(loss_fn, repeated_ids(), micro_batches=2)
    for told in reports(launches, "an embedding"):
        assert told["json"]["ok"] is report.ok
        found = told["json"]["max_errors"]["variable"]
        np.testing.assert_allclose(found, report.max_variable_error, rtol=1e-6, atol=1e-14)


@pytest.mark.slow
def test_a_model_may_be_verified_between_two_steps(launches: Launches) -> None:
    first, second = reports(launches, "training")
    verified, trained = first["losses"]
    assert verified == trained
    assert first == second


def test_every_rank_gets_the_gradients_of_all_stages(launches: Launches) -> None:
    results = launches.results("three ranks", "exposed_gradients")
    for seen in results:
        loss, expected = seen["loss"]
        np.testing.assert_allclose(loss, expected, rtol=1e-12)
        assert seen["found"].keys() == seen["wanted"].keys()
        for name, gradient in seen["wanted"].items():
            np.testing.assert_allclose(seen["found"][name], gradient, rtol=1e-11, atol=1e-16)


def test_arrays_of_any_type_reach_every_rank(launches: Launches) -> None:
    for seen in launches.results("three ranks", "exposed_gradients"):
        assert seen["arrays"] == {
            "rank 0": ["int64", [0], 0.0],
            "scalar": ["float64", [], 0.5],
            "bool": ["bool", [2], 1.0],
            "empty": ["float32", [0, 3], 0.0],
            "bfloat16": ["bfloat16", [2], -0.5],
            "large": ["float64", [2**15, 4], (2**17 - 1) * 2.0**16],
            "rank 1": ["int64", [1], 1.0],
            "shared": ["int64", [1], 1.0],
            "rank 2": ["int64", [2], 4.0],
        }


# --- on the command line

VERIFY = ["-m", "dapple_tf", "verify", TINY_MODEL, "--stages", "2", "--micro-batches", "2", "--json"]


def test_the_command_prints_once() -> None:
    first, second = run_ranks(VERIFY, 2)
    assert second.stdout == ""
    assert first.stdout.count(EQUAL.strip()) == 1
    assert json.loads(first.stdout.splitlines()[-1])["ok"] is True


def test_the_command_ends_every_rank_with_1_if_the_steps_differ() -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks([*VERIFY, "--set", "noisy=True"], 2)
    assert caught.value.exit_code == 1
    first, second = caught.value.ranks
    assert second.stdout == ""
    assert first.stdout.count(DIFFERS.strip()) == 1
    assert json.loads(first.stdout.splitlines()[-1])["ok"] is False
    assert " stops: " not in first.stderr + second.stderr  # no rank complains of another one's end
