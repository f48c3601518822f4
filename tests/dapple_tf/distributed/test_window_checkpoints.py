"""Checkpoints of jobs in asynchronous windows: a rank is killed, and the same ranks, others, or one process resume."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.asynchronous.reference import Differentiated, Reference
from tests.dapple_tf.distributed.failing_jobs import ADVICE_OF_TRAIN, assert_ended, assert_stopped
from tests.dapple_tf.distributed.programs.checkpoint_model import straight
from tests.dapple_tf.distributed.train_command import (
    LAYERS,
    WINDOW_MODEL,
    model_options,
    printed_result,
    saved_steps,
    saving_in,
    window_arguments,
)
from tests.processes import RanksError, needs_horovod, run_python, run_ranks

pytestmark = needs_horovod

ENDS = {"1": (4,), "1,1": (2, 4), "2,1": (2, 4), "1,1,1": (1, 3, 4)}
"""The end of each stage's layers, of four; see ``LAYERS``."""


def reference_losses(*parts: tuple[str, int], synchronous: Sequence[str] = ()) -> list[float]:
    """Return the mean losses of an uninterrupted run.

    ``parts``: the layouts it trains under in turn, each with its number of windows. ``synchronous``: the layouts that
    train on a whole batch in one synchronous step.
    """
    workload = straight()
    layers = workload.loss_fn.__closure__[0].cell_contents  # type: ignore[attr-defined]  # a function has it
    batches = iter(workload.dataset)
    found: list[float] = []
    before: Reference | None = None
    for layout, count in parts:
        stages = [layers[a:b] for a, b in itertools.pairwise((0, *ENDS[layout]))]
        reference = Reference(Differentiated(workload.loss_fn, stages), lambda: keras.optimizers.Adam(0.01))
        if before is not None:
            reference.continue_from(before)
        for batch in itertools.islice(batches, count):
            if layout in synchronous:
                found.append(reference.synchronous_step(batch))
            else:
                replicas = list(map(int, layout.split(",")))
                found.append(float(np.mean(reference.window(batch, 4, replicas=replicas).losses)))
        before = reference
    return found


def run_until_killed(folder: Path, layout: str, ranks: int, rank: int) -> RanksError:
    """Train, saving every third window, until ``rank`` is killed in window 8; return how the job ended."""
    options = [*saving_in(folder), *model_options(kill_rank=rank, in_window=8)]
    with pytest.raises(RanksError) as caught:
        run_ranks(window_arguments(layout, 100_000, *options), ranks, timeout_seconds=90)
    ended = time.time()
    assert_ended(caught.value)
    failed = re.search(r"^failing at ([\d.]+)$", caught.value.ranks[rank].stderr, re.MULTILINE)
    assert failed is not None
    assert ended - float(failed[1]) < 10
    assert caught.value.exit_code == 128 + 9
    assert saved_steps(folder) == [3, 6]
    return caught.value


def run_alone(words: Sequence[str]) -> dict[str, Any]:
    """Return the result of ``dapple train`` in one process."""
    found = json.loads(run_python(*words).stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_a_rank_killed_in_a_window_is_named_and_ranks_or_one_process_resume_the_run(tmp_path: Path) -> None:
    """The same ranks, two ranks, one process in windows, and one process that trains synchronously."""
    folder = tmp_path / "run"
    error = run_until_killed(folder, "1,1,1", 3, rank=1)
    for number in (0, 2):
        killed = r"was killed or has crashed \(its connection closed\)"
        assert_stopped(error.ranks[number], number, 1, killed, advice=ADVICE_OF_TRAIN)

    for name in ("two ranks", "one process", "synchronous"):
        shutil.copytree(folder, tmp_path / name)
    ranks = run_ranks(window_arguments("1,1,1", 12, *saving_in(folder)), 3)
    assert f"resumed after window 6 from {folder}" in ranks[0].stdout
    whole = reference_losses(("1,1,1", 12))
    np.testing.assert_allclose(printed_result(ranks)["losses"], whole[6:], rtol=1e-12)
    assert saved_steps(folder) == [9, 12]

    ranks = run_ranks(window_arguments("1,1", 10, *saving_in(tmp_path / "two ranks")), 2)
    wanted = reference_losses(("1,1,1", 6), ("1,1", 4))[6:]
    np.testing.assert_allclose(printed_result(ranks)["losses"], wanted, rtol=1e-12)

    found = run_alone(window_arguments("1,1,1", 10, *saving_in(tmp_path / "one process")))
    np.testing.assert_allclose(found["losses"], whole[6:10], rtol=1e-12)

    words = ["-m", "dapple_tf", "train", WINDOW_MODEL, "--stages", LAYERS["1,1"], "--micro-batches", "2"]
    words += ["--steps", "10", "--json", *saving_in(tmp_path / "synchronous")]
    wanted = reference_losses(("1,1,1", 6), ("1,1", 4), synchronous=["1,1"])[6:]
    np.testing.assert_allclose(run_alone(words)["losses"], wanted, rtol=1e-12)


def test_a_replica_killed_in_a_window_and_a_run_that_the_same_ranks_resume(tmp_path: Path) -> None:
    whole = run_alone(window_arguments("2,1", 10))["losses"]
    np.testing.assert_allclose(whole, reference_losses(("2,1", 10)), rtol=1e-12)
    error = run_until_killed(tmp_path, "2,1", 3, rank=1)
    for number in (0, 2):
        said = rf"rank {number} \(stage {number // 2}\) stops: rank 1 \(stage 0\), (in|after) step \d+, was killed"
        assert re.search(said, error.ranks[number].stderr)
    ranks = run_ranks(window_arguments("2,1", 10, *saving_in(tmp_path)), 3)
    np.testing.assert_allclose(printed_result(ranks)["losses"], whole[6:], rtol=1e-12)
