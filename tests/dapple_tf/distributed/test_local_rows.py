"""Ranks that are given only the rows that they need: the size of the batch, errors, and equality with whole batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dapple_tf.distributed.local_rows import MISSING, find_lengths, find_size
from dapple_tf.errors import BatchError
from dapple_tf.graph_passes.analysis.input_needs import InputNeeds, RankInputs, Use
from tests.dapple_tf.distributed.launches import Launches
from tests.equality.one_device import TOLERANCE
from tests.processes import needs_horovod

NONE, OWN, ALL = Use.NONE, Use.OWN, Use.ALL
REPLICATED = ("1:2", "1:2, largest", "1:2, shares", "whole batches")
OTHERS = (*REPLICATED, "lengths")


def ranks(*inputs: RankInputs) -> list[InputNeeds]:
    """Return the rows that each rank needs of a batch of 8 samples in two micro-batches."""
    return [InputNeeds(("0", "1"), own, 2, max(i.replicas for i in inputs), 8) for own in inputs]


# x enters the two replicas of the first stage; rank 2 needs no rows; the last stage counts the second argument.
RANKS = ranks(
    *(RankInputs((OWN, NONE), (0,), replica, 2) for replica in range(2)),
    RankInputs((NONE, NONE), (1,)),
    RankInputs((NONE, ALL), (2,)),
)
N = MISSING


def test_the_replicas_of_a_worker_count_the_rows_that_its_stages_take() -> None:
    found = ranks(*(RankInputs((OWN, OWN), (0, 2), replica, 2) for replica in (0, 1)), RankInputs((NONE, ALL), (1,)))
    assert find_size(found, [(4, 4), (4, 4), (N, 8)]) == 8
    with pytest.raises(BatchError, match=r"7 of argument 1 on ranks \[0, 1\] together"):
        find_size(found, [(4, 4), (4, 3), (N, 8)])


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ([(4, N), (4, N), (N, N), (N, 8)], 8),
        ([(5, N), (6, N), (N, N), (N, 11)], 11),
        ([(1, N), (2, N), (N, N), (N, 3)], 3),
        ([(4, 1), (4, 7), (0, 0), (3, 8)], 8),  # what a rank does not need is ignored
    ],
    ids=["the size that was built", "a larger batch", "a short batch in one micro-batch", "rows that nobody needs"],
)
def test_the_batch_size_is_the_sum_over_replicas_and_the_rows_of_whole_arguments(
    given: Sequence[Sequence[int]], size: int
) -> None:
    assert find_size(RANKS, given) == size


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            [(4, N), (N, N), (N, N), (N, N)],
            "rank 1 was given None for argument 0, but it needs rows 2-3, 6-7 of a batch of 8 samples; rank 3 was "
            "given None for argument 1, but it needs all 8 rows of a batch of 8 samples",
        ),
        (
            [(4, N), (4, N), (N, N), (N, 7)],
            "the ranks were not given rows of one batch, but 8 of argument 0 on ranks [0, 1] together, 7 of argument 1 "
            "on rank 3: see step.needs.rows(batch size)",
        ),
        (
            [(3, N), (5, N), (N, N), (N, 8)],
            "of a batch of 8 samples rank 0 was given 3 rows of argument 0, and needs 4 (rows 0-1, 4-5); rank 1 was "
            "given 5 rows of argument 0, and needs 4 (rows 2-3, 6-7): see step.needs.rows(8)",
        ),
        ([(0, N), (0, N), (N, N), (N, 0)], "the ranks were given no rows: the batch is empty"),
    ],
    ids=["missing", "two sizes", "of another replica", "empty"],
)
def test_rows_that_are_not_those_of_one_batch_are_refused(given: Sequence[Sequence[int]], text: str) -> None:
    with pytest.raises(BatchError) as caught:
        find_size(RANKS, given)
    assert str(caught.value).startswith(text)


def test_rows_of_a_stage_that_only_some_replicas_need_do_not_add_up_to_the_batch() -> None:
    """The first replica has all rows for the loss head, the second one its own."""
    found = ranks(RankInputs((OWN, ALL), (0,), 0, 2), RankInputs((OWN, OWN), (0,), 1, 2))
    assert find_size(found, [(4, 8), (4, 4)]) == 8
    with pytest.raises(BatchError, match="rank 1 was given 8 rows of argument 1, and needs 4"):
        find_size(found, [(4, 8), (4, 8)])


def test_a_loss_without_arguments_has_no_size() -> None:
    with pytest.raises(BatchError, match="the loss uses no argument"):
        find_size(ranks(RankInputs((NONE, NONE)), RankInputs((NONE, NONE), (1,))), [(N, N), (N, N)])


def test_a_length_is_that_of_the_ranks_that_have_the_argument() -> None:
    places = [("0", 1), ("1", 1), ("1", 2)]
    assert find_lengths(places, [(5, N, N), (N, 5, 7), (5, N, N)]) == [5, 5, 7]
    assert find_lengths(places[:1], [(N,), (N,)]) == [N]
    with pytest.raises(BatchError, match=r"axis 1 of argument 0 has the length 5 on rank 0, 6 on rank 2"):
        find_lengths(places, [(5, N, N), (N, 5, 7), (6, N, N)])


# --- jobs


def results(launches: Launches, case: str) -> list[Any]:
    launch = "three ranks with local rows" if case in OTHERS else "three ranks"
    return [found[case] for found in launches.results(launch, "local_rows")]


@needs_horovod
@pytest.mark.parametrize(
    "case", ["1:1:1", "1:2, sizes", *(pytest.param(c, marks=pytest.mark.slow) for c in REPLICATED[:3])]
)
def test_ranks_with_their_own_rows_equal_one_device(launches: Launches, case: str) -> None:
    """27 samples in batches of 11, the last of 5; the loss is divided by a statistic of the whole batch's mask."""
    for found in results(launches, case):
        assert max(found["errors"].values()) <= TOLERANCE["float64"], found["errors"]


@needs_horovod
def test_ranks_read_their_rows_of_micro_batches_of_given_sizes(launches: Launches) -> None:
    """Micro-batches of 3, 3 and 5 samples, each shared by two replicas; of the last five samples two equal ones."""
    shares = np.split(np.arange(27), [1, 3, 4, 6, 8, 11, 12, 14, 15, 17, 19, 22, 23, 24, 25])
    _, *replicas = results(launches, "1:2, sizes")
    assert [found["read"]["y"] for found in replicas] == [list(np.concatenate(shares[r::2])) for r in range(2)]


@needs_horovod
@pytest.mark.slow
def test_ranks_with_their_own_rows_equal_ranks_with_whole_batches(launches: Launches) -> None:
    for errors in results(launches, "whole batches"):
        assert max(errors.values()) <= TOLERANCE["float64"], errors


@needs_horovod
def test_a_middle_rank_reads_nothing(launches: Launches) -> None:
    """Its data set raises if a sample is taken from it."""
    read = [found["read"] for found in results(launches, "1:1:1")]
    every = list(range(27))
    assert read == [
        {"x": every, "mask": [], "y": []},
        {"x": [], "mask": [], "y": []},
        {"x": [], "mask": every, "y": every},
    ]


@needs_horovod
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "reads_all"), [("1:2", False), ("1:2, largest", True)], ids=["a count", "the largest"]
)
def test_the_first_replica_reads_all_rows_of_a_mask_only_where_its_statistic_cannot_be_combined(
    launches: Launches, case: str, reads_all: bool
) -> None:
    first, *replicas = results(launches, case)
    assert first["read"]["y"] == first["read"]["mask"] == []
    # Micro-batches of 5 and 6 rows, and of 2 and 3 in the last batch, each shared by two replicas.
    shares = np.split(np.arange(27), [2, 5, 8, 11, 13, 16, 19, 22, 23, 24, 25])
    own = [list(np.concatenate(shares[r::2])) for r in range(2)]
    assert [found["read"]["y"] for found in replicas] == own
    assert [found["read"]["mask"] for found in replicas] == [list(range(27)) if reads_all else own[0], own[1]]
    assert [found["needs"].splitlines()[-1] for found in replicas] == [
        "  argument 1[1]: rows 0, 2",
        "  argument 1[1]: rows 1, 3-4",
    ]


@needs_horovod
@pytest.mark.slow
def test_local_rows_of_other_lengths_equal_one_device_or_are_refused(launches: Launches) -> None:
    """The labels' rank knows the length that the first rank has; the middle rank knows none."""
    found = results(launches, "lengths")
    for result in found:
        assert max(result["errors"].values()) <= TOLERANCE["float64"], result["errors"]
        assert result["messages"] == found[0]["messages"]
    assert "cannot run batches of the shapes (None, 8, 4), (None, 8)" in found[0]["messages"]["of another form"]
    assert "length" in found[0]["messages"]["two lengths"]


@needs_horovod
def test_gradients_recorded_and_checked_steps_take_local_rows(launches: Launches) -> None:
    found = results(launches, "other calls")
    for result in found:
        assert max(result["errors"].values()) <= TOLERANCE["float64"], result["errors"]
        assert result["losses"] == found[0]["losses"]
        assert np.isfinite(result["losses"]).all()
        assert result["timed"] == found[0]["timed"] > 0


@needs_horovod
@pytest.mark.parametrize(
    ("case", "text"),
    [
        (
            "not built",
            "before the first call with local=True, give example_batch to dapple.pipeline or call step.build",
        ),
        ("too few arguments", "rank 0: 1 arguments were given, and the loss takes 2"),
        (
            "nested otherwise",
            "rank 2: argument 1 is nested as [., .], but the step was built last for {'mask': ., 'y': .}",
        ),
        ("too few rows", "10 of argument 0 on ranks [0, 1] together, 11 of argument 1[0] on rank 2"),
        (
            "none",
            "rank 1 was given None for argument 0, but it needs rows 2-4, 8-10 of a batch of 11 samples; rank 2",
        ),
        (
            "another dtype",
            "rank 1: argument 0 has dtype float32 and shape (6, 4), but the step was built last for float64",
        ),
        ("rows of another replica", "rank 1 was given 10 rows of argument 0, and needs 6 (rows 2-4, 8-10)"),
        ("empty", "the ranks were given no rows"),
        ("too few samples", "the batch has 1 sample, too few for the 2 ranks of a stage"),
    ],
)
def test_wrong_rows_are_an_error_on_all_ranks_after_which_the_job_goes_on(
    launches: Launches, case: str, text: str
) -> None:
    messages = [found["messages"][case] for found in results(launches, "other calls")]
    assert messages == [messages[0]] * 3
    assert text in messages[0]
