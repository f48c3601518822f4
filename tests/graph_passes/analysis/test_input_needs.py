"""The rows of the batch that each rank of a job needs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.analysis.input_needs import (
    InputNeeds,
    RankInputs,
    Use,
    count_rows,
    describe_rows,
    find_inputs,
    whole_batch,
)
from dapple_tf.graph_passes.ir.graph import Graph
from dapple_tf.graph_passes.passes.base import run_passes
from dapple_tf.graph_passes.passes.microbatch import Microbatch
from dapple_tf.graph_passes.passes.project import Project
from dapple_tf.graph_passes.passes.split_concat import SplitConcat
from tests.graph_passes.builders import call_graph, function, refused

NONE, OWN, ALL = Use.NONE, Use.OWN, Use.ALL

ARGUMENTS = "inputs %x %y %mask\n" + "".join(f"%{name} = input() -> (float32[?,4])\n" for name in ("x", "y", "mask"))
STAGES = (
    function("stage0/forward", "arg x, variable u", "boundary h, stash a"),
    function("stage0/backward", "gradient h, stash a", "variable u"),
    function("stage1/forward", "boundary h, variable v", "boundary k, stash b"),
    function("stage1/backward", "gradient k, stash b", "gradient h, variable v"),
    function("stage2/run_once", "arg mask", "once count float32[]"),
    function("stage2/forward", "arg y, arg mask, once count float32[], boundary k, variable w", "loss loss, stash c"),
    function("stage2/backward", "seed loss, stash c", "gradient k, variable w"),
)


def rank_graphs(*replicas: int, micro_batches: int = 2) -> list[Graph]:
    """The projected graphs of all ranks of three stages: x enters the first, y and a counted mask the last."""
    ends = [sum(replicas[: s + 1]) for s in range(3)]
    ranks = tuple(tuple(range(end - r, end)) for end, r in zip(ends, replicas, strict=True))
    whole = run_passes(call_graph(ARGUMENTS, *STAGES), [Microbatch(3, micro_batches), SplitConcat(replicas)])
    return [Project(ranks, rank)(whole) for rank in range(sum(replicas))]


def test_a_rank_of_several_stages_needs_what_any_of_them_takes() -> None:
    whole = run_passes(call_graph(ARGUMENTS, *STAGES), [Microbatch(3, 2), SplitConcat((2, 1, 2))])
    found = [find_inputs(Project(((0, 1), (2,), (0, 1)), rank)(whole)) for rank in range(3)]
    assert found[:2] == [RankInputs((OWN, OWN, ALL), (0, 2), replica, 2) for replica in (0, 1)]
    assert found[2] == RankInputs((NONE, NONE, NONE), (1,))


def needs(inputs: RankInputs, size: int = 8, micro_batches: int = 2) -> InputNeeds:
    names = tuple(map(str, range(len(inputs.uses))))
    return InputNeeds(names, inputs, micro_batches, inputs.replicas, size)


def test_a_rank_needs_its_own_rows_all_rows_or_none() -> None:
    first, middle, last = map(find_inputs, rank_graphs(1, 1, 1))
    assert first == RankInputs((OWN, NONE, NONE), stages=(0,))
    assert middle == RankInputs((NONE, NONE, NONE), stages=(1,))
    assert last == RankInputs((NONE, OWN, ALL), stages=(2,))  # the count takes the mask whole


def test_every_replica_needs_the_whole_of_what_is_counted() -> None:
    found = [find_inputs(graph) for graph in rank_graphs(2, 1, 2)]
    assert [(use.stages, use.replica, use.replicas) for use in found] == [
        *(((0,), 0, 2), ((0,), 1, 2), ((1,), 0, 1), ((2,), 0, 2), ((2,), 1, 2))
    ]
    assert [use.uses[2] for use in found] == [NONE, NONE, NONE, ALL, ALL]


def test_own_rows_are_those_of_the_replica_in_every_micro_batch() -> None:
    found = needs(RankInputs((OWN, NONE, ALL), (0,), 1, 2), size=11)
    assert found.rows() == {"0": ((2, 5), (8, 11)), "1": (), "2": ((0, 11),)}
    assert found.rows(8) == {"0": ((2, 4), (6, 8)), "1": (), "2": ((0, 8),)}


def test_a_batch_that_is_too_small_has_fewer_micro_batches() -> None:
    assert needs(RankInputs((OWN,), (0,), 1, 2)).rows(3) == {"0": ((1, 3),)}


def test_one_process_needs_all_rows() -> None:
    assert needs(whole_batch(2), size=5).rows() == {"0": ((0, 5),), "1": ((0, 5),)}


@given(size=st.integers(1, 30), micro_batches=st.integers(1, 5), replicas=st.integers(1, 4))
def test_the_replicas_of_a_stage_need_each_row_once(size: int, micro_batches: int, replicas: int) -> None:
    found = [needs(RankInputs((OWN,), (0,), r, replicas), size, micro_batches).rows()["0"] for r in range(replicas)]
    rows = [row for ranges in found for bounds in ranges for row in range(*bounds)]
    assert sorted(rows) == list(range(size))
    assert sum(map(count_rows, found)) == size


def test_a_batch_without_samples_has_no_rows() -> None:
    with refused(GraphError, "a batch of 0 samples has no rows"):
        needs(whole_batch(1)).rows(0)


def test_needs_are_printed_argument_by_argument() -> None:
    found = needs(RankInputs((OWN, NONE, ALL), (0,), 0, 2), size=9)
    assert str(found).splitlines() == [
        "of a batch of 9 samples this rank needs",
        "  argument 0: rows 0-1, 4-5",
        "  argument 1: none",
        "  argument 2: all 9 rows",
    ]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (((0, 4), (4, 8)), "all 8 rows"),
        (((0, 2), (2, 3), (6, 7)), "rows 0-2, 6"),
        (((3, 3),), "none"),
    ],
)
def test_rows_that_follow_each_other_are_printed_as_one_range(rows: tuple[tuple[int, int], ...], text: str) -> None:
    assert describe_rows(rows, 8) == text


def test_rows_of_given_sizes_are_those_of_the_plan_and_become_equal_where_they_are_too_small() -> None:
    own = InputNeeds(("x",), RankInputs((OWN,), replica=1, replicas=2), 3, 2, 9, (2, 3, 4))
    assert own.rows() == {"x": ((1, 2), (3, 5), (7, 9))}
    assert own.rows(18) == {"x": ((2, 4), (7, 10), (14, 18))}
    assert own.rows(6) == {"x": ((1, 2), (3, 4), (5, 6))}  # 6 * 2 // 9 is one sample, for two replicas
    assert own.rows(4) == {"x": ((1, 2), (3, 4))}


def test_a_rank_needs_the_rows_of_its_share() -> None:
    graph = run_passes(
        call_graph(ARGUMENTS, *STAGES), [Microbatch(3, 2), SplitConcat((2, 1, 2), shares=((3, 1), (), ()))]
    )
    ranks = ((0, 1), (2,), (3, 4))
    first, second = (find_inputs(Project(ranks, rank)(graph)) for rank in range(2))
    assert (first.shares, second.shares) == ((3, 1), (3, 1))
    rows = [InputNeeds(("x", "y", "mask"), own, 2, 4, 16).rows()["x"] for own in (first, second)]
    assert rows == [((0, 6), (8, 14)), ((6, 8), (14, 16))]
    assert InputNeeds(("x", "y", "mask"), first, 2, 4, 7).rows()["x"] == ((0, 5),)  # too few for two micro-batches
