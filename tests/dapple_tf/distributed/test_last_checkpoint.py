"""Whatever ends a job, its last checkpoint is whole, and a run that goes on from there is as one never ended."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import numpy as np
import pytest

from dapple_tf.checkpoint.checkpoints import Checkpoints
from dapple_tf.checkpoint.file import open_checkpoint
from tests.dapple_tf.builders import step_of
from tests.dapple_tf.distributed.programs.checkpoint_model import chain
from tests.dapple_tf.distributed.test_checkpoint import arguments, steps_in
from tests.processes import RanksError, needs_horovod, run_ranks

pytestmark = needs_horovod

FAILS_AT, STEPS = 6, 9


@functools.cache
def whole_run() -> tuple[float, ...]:
    """The losses of a run in one process that nothing happens to."""
    workload = chain()
    step = step_of(workload.loss_fn, optimizer=workload.optimizer)
    return tuple(float(step(*batch)) for batch in itertools.islice(workload.dataset, STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP", "raise"])
def test_the_last_checkpoint_is_intact(tmp_path: Path, how: str) -> None:
    settings = [
        word for setting in ("kill_rank=1", f"at_batch={FAILS_AT}", f"how={how}") for word in ("--set", setting)
    ]
    saving = ["--checkpoint-dir", str(tmp_path), "--checkpoint-every", "1"]
    words = arguments(None, 100_000, "1,1", *settings, *saving)
    with pytest.raises(RanksError) as caught:
        run_ranks(words, 2, environment={"DAPPLE_TIMEOUT_SECONDS": "6"})
    assert caught.value.exit_code  # and not a hang
    assert not caught.value.left
    saved = steps_in(tmp_path)
    assert saved[-1] in (FAILS_AT - 2, FAILS_AT - 1)  # rank 0 may just have been writing the last one
    for number in saved:
        assert dict(open_checkpoint(tmp_path / f"checkpoint-{number}.safetensors").read())

    workload = chain()
    step = step_of(workload.loss_fn, optimizer=workload.optimizer)
    batches = list(itertools.islice(workload.dataset, STEPS))  # in the order of the run: every round is shuffled anew
    step.build(*batches[0])
    position = Checkpoints(tmp_path, step).restore()
    assert (position.steps, position.batches) == (saved[-1], saved[-1])
    losses = [float(step(*batch)) for batch in batches[position.batches :]]
    np.testing.assert_allclose(losses, whole_run()[position.steps :], rtol=1e-12)
