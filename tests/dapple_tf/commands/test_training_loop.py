"""The training loop: batches without end, numbered steps, and the median time of a step."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from dapple_tf.commands.training_loop import RunResult, StepResult, repeat_batches, run_steps
from dapple_tf.errors import ModelError


def test_batches_start_again_where_the_data_set_ends() -> None:
    batches = repeat_batches([(1, 2), 3])
    assert list(itertools.islice(batches, 5)) == [(1, 2), (3,), (1, 2), (3,), (1, 2)]


def test_a_data_set_without_batches_is_refused() -> None:
    with pytest.raises(ModelError, match="the workload's dataset has no batches"):
        next(repeat_batches([]))


def test_a_data_set_that_is_no_iterable_is_refused() -> None:
    data: Any = 5
    with pytest.raises(ModelError, match="the workload's dataset has the type int: give an iterable of batches"):
        next(repeat_batches(data))


def test_steps_are_numbered_on_from_the_ones_done(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[StepResult] = []
    run = run_steps(
        lambda x: (float(x[0]), {"aux": 0}),
        [(np.full(4, number),) for number in range(10)],
        3,
        "training",
        done=5,
        after=seen.append,
    )
    assert (run.losses, len(run.seconds), run.samples) == ((0, 1, 2), 2, 4)
    assert [result.number for result in seen] == [6, 7, 8]
    assert [result.loss for result in seen] == [0, 1, 2]
    assert "training 8: loss 2.0000" in capsys.readouterr().err


def test_progress_is_shown_on_one_rank_only(capsys: pytest.CaptureFixture[str]) -> None:
    run_steps(lambda x: 0.0, [(np.ones(4),)], 1, "training", shown=False)
    assert capsys.readouterr() == ("", "")


def test_the_time_of_a_step_is_the_median_without_the_first() -> None:
    assert RunResult((0.0,) * 4, (1.0, 9.0, 2.0), 8).samples_per_second == 4
    assert RunResult((0.0,), (), 8).step_seconds is None
    assert RunResult((0.0,), (), 8).samples_per_second == 0
