"""Ranks that are given other batches, or make other calls, in mid-run: all end soon, and say which rank did what."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.processes import RanksError, needs_horovod, run_ranks

pytestmark = needs_horovod

EQUAL = "run step 11 with 16 samples (program 1) of float64[4], float64[4]"
OTHER = "run step 11 with 8 samples (program 1) of float64[4], float64[4]"


def run_until(how: str, stages: int, replicas: int, *folder: str) -> RanksError:
    """How the job ended: within seconds, and not by the watch's timeout."""
    with pytest.raises(RanksError) as caught:
        run_ranks(
            ["-m", "tests.dapple_tf.distributed.programs.differ", how, str(stages), str(replicas), *folder],
            stages * replicas,
        )
    end = time.time()
    assert caught.value.exit_code is not None, "it hung"
    assert not caught.value.left
    happened = re.match(r"[\d.]+$", caught.value.ranks[0].stdout, re.MULTILINE)
    assert happened is not None
    assert end - float(happened[0]) < 15
    return caught.value


@pytest.mark.parametrize(
    ("how", "stages", "what"),
    [
        # Replicas would sum gradients that do not belong together, and not notice.
        pytest.param("samples", 1, OTHER, marks=pytest.mark.slow),
        # One would trace while the other steps, and so on: each waits for what the other does not send.
        ("dtype", 2, "trace the model for 16 samples of float32[4], float32[4]"),
        pytest.param(
            "step", 2, "run step 11 with 16 samples (program 2) of float64[4], float64[4]", marks=pytest.mark.slow
        ),
        pytest.param("gather", 2, "gather the variables", marks=pytest.mark.slow),
        pytest.param(
            "checks",
            1,
            "build another program (check) for 16 samples of float64[4], float64[4]",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_all_ranks_end_and_say_which_began_what(how: str, stages: int, what: str) -> None:
    error = run_until(how, stages, 2 // stages)
    assert error.exit_code == 1
    for me, rank in enumerate(error.ranks):
        told = f"because the ranks make different calls: rank 0 is about to {EQUAL}, rank 1 is about to {what}. Every"
        assert told in rank.stderr
        assert f"dapple: rank {me} " in rank.stderr
        assert rank.stderr.count("stops ") == 1


@pytest.mark.slow
def test_nothing_is_saved_of_what_was_trained_on_batches_that_differ(tmp_path: Path) -> None:
    """Though the ranks save before they notice."""
    error = run_until("save", 1, 2, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    for rank in error.ranks:
        told = f"because the ranks make different calls: rank 0 is about to {OTHER}, rank 1 is about to {EQUAL}."
        assert told in rank.stderr
    first, last = error.ranks
    assert "JobError: the ranks differ in their batches or calls until now: rank 0 has " in first.stderr
    assert "Traceback" not in last.stderr
