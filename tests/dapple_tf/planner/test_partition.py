"""The program that cuts chains into stages: against every partition, and C++ against NumPy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.planner import partition as program
from dapple_tf.planner.api import make_problem
from dapple_tf.planner.partition import Stage, Way, Ways, from_the_end, partition
from dapple_tf.planner.search.fit_cuts import fit_cuts
from tests.dapple_tf.planner.builders import figures, make_cluster, make_profile


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Way], dict[str, Any]]:
    """Draw up to five blocks, up to four states, and ways, of which some tie and some stages may not be."""
    blocks, states, rows = draw(st.integers(1, 5)), draw(st.integers(2, 4)), draw(st.integers(1, 3))
    pairs = st.tuples(figures(3), figures(3))
    ways = [
        Way(state, before, draw(st.integers(0, rows - 1)), draw(pairs), draw(pairs), draw(st.booleans()))
        for state in range(1, states)
        for before in range(state)
        for _ in range(draw(st.integers(0, 2)))
    ] or [Way(1, 0)]
    seconds = np.array(
        [[[draw(st.one_of(figures(9), st.just(math.inf))) for _ in range(blocks + 1)] for _ in range(blocks)]] * rows
    )
    options = {
        "seconds": seconds,
        "boundary_bytes": np.array([draw(figures(4)) for _ in range(blocks + 1)]),
        "parameter_bytes": np.cumsum([0.0, *(draw(figures(4)) for _ in range(blocks))]),
        "splittable": np.array([True, *(draw(st.booleans()) for _ in range(blocks))]),
        "add": draw(st.booleans()),
        "latest": draw(st.booleans()),
        "limit": draw(st.sampled_from([math.inf, 9.0])),
    }
    return ways, options


def value_of(ways: list[Way], options: dict[str, Any], stages: tuple[Stage, ...]) -> float:
    """Return the value of stages by the definition."""
    value = 0.0
    for first, end, way in stages:
        own = float(options["seconds"][ways[way].row, first, end])
        parameters = options["parameter_bytes"][end] - options["parameter_bytes"][first]
        own += ways[way].ring[0] + ways[way].ring[1] * parameters if parameters > 0 else 0.0
        sent = ways[way].link[0] + ways[way].link[1] * options["boundary_bytes"][first]
        if own > options["limit"] or not (ways[way].alike or options["splittable"][first]):
            return math.inf
        value = value + sent + own if options["add"] else max(value, sent, own)
    return value


def all_stages(ways: list[Way], state: int, end: int) -> Iterator[tuple[Stage, ...]]:
    """Yield the stages of the first ``end`` blocks by every way that leads to ``state``."""
    if state == 0:
        yield from [()] if end == 0 else []
        return
    for index, way in enumerate(ways):
        if way.state == state:
            for first in range(end):
                yield from ((*before, Stage(first, end, index)) for before in all_stages(ways, way.before, first))


@given(programs())
def test_no_partition_has_a_smaller_value_and_the_stages_reach_it(drawn: tuple[list[Way], dict[str, Any]]) -> None:
    ways, options = drawn
    states, blocks = max(way.state for way in ways) + 1, options["seconds"].shape[1]
    found = partition(ways=Ways.of(states, ways), **options)
    for state, end in itertools.product(range(1, states), range(1, blocks + 1)):
        least = min((value_of(ways, options, s) for s in all_stages(ways, state, end)), default=math.inf)
        assert found.values[state, end] == pytest.approx(least, rel=1e-12, abs=1e-12)
        if least < math.inf:
            assert value_of(ways, options, found.stages(state, end)) == pytest.approx(least, rel=1e-12, abs=1e-12)


@given(programs())
def test_without_a_compiler_the_same_stages_are_found(drawn: tuple[list[Way], dict[str, Any]]) -> None:
    ways, options = drawn
    given_ways = Ways.of(max(way.state for way in ways) + 1, ways)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "load_library", lambda: None)
        slow = partition(ways=given_ways, **options)
    fast = partition(ways=given_ways, **options)
    np.testing.assert_array_equal(slow.values, fast.values)
    reached = np.isfinite(fast.values)
    np.testing.assert_array_equal(slow.ways[reached], fast.ways[reached])
    np.testing.assert_array_equal(slow.firsts[reached], fast.firsts[reached])


def test_of_equal_values_the_first_way_is_taken_with_the_latest_or_the_earliest_block() -> None:
    # Blocks of 4, 0, 0 and 4 s in two stages: the busiest takes 4 s, wherever the cut is.
    sums = np.array([0.0, 4.0, 4.0, 4.0, 8.0])
    seconds = (sums[None, :] - sums[:-1, None])[None]
    ways = Ways.of(3, [Way(1, 0), Way(2, 1), Way(2, 1, link=(1.0, 0.0))])
    assert partition(seconds, ways).stages(2) == (Stage(0, 3, 0), Stage(3, 4, 1))
    assert partition(seconds, ways, latest=False).stages(2) == (Stage(0, 1, 0), Stage(1, 4, 1))


def test_a_program_from_the_end_sees_the_blocks_in_reverse() -> None:
    seconds = np.array([[0.0, 1.0, 2.0], [0.0, 0.0, 4.0]])  # block 0 takes 1 s, both 2 s, block 1 takes 4 s
    np.testing.assert_array_equal(from_the_end(seconds)[0], [np.inf, 4.0, 2.0])
    assert from_the_end(seconds)[1, 2] == 1.0


@pytest.mark.parametrize("seconds", [0.1, 1 / 3, 0.7])
def test_of_equally_fast_cuts_the_first_is_taken_whatever_sums_are_rounded_to(seconds: float) -> None:
    """Ten equal layers on four devices: the last stages have 3, which leaves 2 for each of the others."""
    profile = make_profile(*[(seconds, 2 * seconds)] * 10)
    problem = make_problem(profile, make_cluster(4), global_batch_size=16)
    stages = fit_cuts(problem, [[0], [1], [2], [3]], 4)
    assert stages is not None
    assert [stage.first_layer for stage in stages] == [0, 2, 4, 7]
