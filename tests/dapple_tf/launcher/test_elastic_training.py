"""``dapple train --elastic`` under ``dapple launch``: with fewer and more ranks, losses are those of one device."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.dapple_tf.distributed.train_command import (
    losses_of_one_process,
    model_options,
    saved_steps,
    saving_in,
    train_arguments,
)
from tests.processes import MPIRUN, needs_horovod, run_python

pytestmark = needs_horovod


def launch(folder: Path, hosts: str, ranks: int, *words: object) -> tuple[dict[str, Any], str, str]:
    """Launch a command on the hosts that a script prints; return its JSON, stdout and stderr."""
    script = folder / "hosts"
    script.write_text(f"#!/bin/sh\n{hosts}\n")
    script.chmod(0o755)
    mpirun = " ".join(MPIRUN.command(folder, ranks)[1:-4])  # without a folder for each rank's output
    options = ["--hosts", script, "-np", ranks, "--check-every", "0.5", "--mpirun", mpirun]
    done = run_python("-m", "dapple_tf", "launch", *options, "--", sys.executable, *words, timeout_seconds=300)
    return json.loads(done.stdout.splitlines()[-1]), done.stdout, done.stderr


def test_a_job_that_has_lost_a_rank_goes_on_under_a_new_plan(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    hosts = f"if [ -e {saved}/checkpoint-6.safetensors ]; then echo localhost:2; else echo localhost:3; fi"
    command = train_arguments("1,1,1", 12, "--elastic", *saving_in(saved), *model_options(kill_rank=2, at_batch=9))
    found, stdout, stderr = launch(tmp_path, hosts, 3, *command)
    np.testing.assert_allclose(found["losses"], losses_of_one_process(12)[6:], rtol=1e-12)
    assert saved_steps(saved) == [9, 12]
    assert "starts the job again (number 1) with 2 ranks on localhost:2" in stderr
    assert "elastic: there are 2 ranks, and 3 were asked for: planning anew" in stderr
    assert re.search(
        r"start 2 of the job, since the one before ended \(exit code 137 \(SIGKILL\)\): 2 ranks \(3 before\), "
        r"back after \d+ s, goes on from step 6 from .*, repeats [12] steps?\n"
        r"  plan before: plan straight, layers .*; now: plan ",
        stdout,
    )
    assert found["restart"]["ranks_before"] == 3


def test_a_job_goes_on_with_more_ranks_after_a_checkpoint(tmp_path: Path) -> None:
    saved, steps = tmp_path / "saved", 3000
    hosts = f"if ls {saved}/checkpoint-* >/dev/null 2>&1; then echo localhost:2; else echo localhost:1; fi"
    command = train_arguments("1,1", steps, "--elastic", *saving_in(saved, every=100))
    found, stdout, stderr = launch(tmp_path, hosts, 2, *command)
    done = steps - len(found["losses"])
    assert done % 100 == 0
    assert done > 0
    assert "the job has saved, to go on with more ranks" in stderr
    assert f"step {done} is saved: the job ends, to go on with more ranks" in stdout
    assert "since the one before ended (more ranks are possible): 2 ranks (1 before), back after" in stdout
    assert f"goes on from step {done} from {saved}, repeats 0 steps" in stdout
    assert re.search(r"started again once: with 2 ranks; repeated 0 steps, \d+ s without training", stdout)
