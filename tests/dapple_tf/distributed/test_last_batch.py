"""Nothing ends well, gathers or saves before all ranks agree on all that they have done."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dapple_tf.distributed.failing_jobs import assert_ended
from tests.processes import RanksError, needs_horovod, run_ranks

pytestmark = needs_horovod


@pytest.mark.parametrize(
    ("end", "stages"),
    [
        ("end", 2),
        ("end", 1),
        ("gather", 2),
        ("gather", 1),
        ("save", 2),
    ],
)
def test_a_last_step_of_different_batches_ends_all_ranks(tmp_path: Path, end: str, stages: int) -> None:
    """The job once ended with code 0, and ``gather`` gave wrong weights."""
    with pytest.raises(RanksError) as caught:
        run_ranks(["-m", "tests.dapple_tf.distributed.programs.last_batch", end, str(stages), str(tmp_path)], 2)
    assert_ended(caught.value)
    assert not list(tmp_path.glob("came-through-*"))
    assert not list(tmp_path.glob("checkpoint-*"))
    for rank in caught.value.ranks:
        assert "because the ranks make different calls: rank 0 is about to run step 5 with 8 samples" in rank.stderr
        assert "rank 1 is about to run step 5 with 6 samples" in rank.stderr


@pytest.mark.parametrize("stopped", ["before", "after"])
def test_a_rank_that_is_stopped_while_the_job_ends_is_named(stopped: str) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(
            ["-m", "tests.dapple_tf.distributed.programs.stopped_at_end", stopped],
            2,
            environment={"DAPPLE_TIMEOUT_SECONDS": "4"},
        )
    assert_ended(caught.value)
    assert "rank 1 (stage 1), after step 1, has sent nothing for 3." in caught.value.ranks[0].stderr
