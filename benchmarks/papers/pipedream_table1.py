"""Table 1 of the PipeDream paper: the configurations of planner "pipedream" beside the paper's, and its seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.common import Row, median
from benchmarks.papers.pipedream_published import (
    TABLE_1,
    WITHOUT_PROFILE,
    Configuration,
    find_missing_profiles,
    read_profile,
)
from benchmarks.papers.pipedream_variants import OneLevel, by_profiler, one_after_the_other, printed
from dapple_tf.planner.api import make_problem, run_planner
from dapple_tf.planner.planning_problem import PlannerResult, PlanningProblem
from dapple_tf.planner.systems.hierarchy import derive_hierarchy

RUNS = 5
MOST_SECONDS = 1.0


@dataclass(frozen=True)
class Compared:
    """A row: PipeDream's program on levels and on one level, planner seconds, and variants on one level.

    ``paper``: seconds per minibatch of the paper's configuration with its best cuts, by the printed formula on one
    level. ``profiler``, ``added``: configurations with the AllReduce of ``by_profiler`` and ``one_after_the_other``.
    """

    row: Configuration
    levels: PlannerResult
    flat: PlannerResult
    seconds: float
    paper: float
    profiler: tuple[int, ...]
    added: tuple[int, ...]


def run() -> Iterator[Row]:
    """Yield the rows of Table 1, and how many configurations are the paper's."""
    if why := find_missing_profiles():
        yield Row("Table 1", "14 rows", why, True)
        return
    compared = [compare(row) for row in TABLE_1]
    yield from map(show, compared)
    for title, place, config in WITHOUT_PROFILE:
        yield Row(f"{title}, {place}", f"paper: {config}", "no profile of this model is published", True)
    yield count_agreeing(compared)


def compare(row: Configuration) -> Compared:
    """Return the comparison of one row."""
    problem, size = make(row), row.model.minibatch
    levels, flat = (run_planner(problem, "pipedream", minibatch_size=size, flat=one) for one in (False, True))
    hierarchy = derive_hierarchy(row.cluster).flatten()
    level = OneLevel(problem.chain, size, row.cluster.devices, hierarchy.levels[0].bandwidth)
    return Compared(
        row,
        levels,
        flat,
        measure(row),
        level.best_cuts(row.replicas, printed),
        level.search(by_profiler)[1],
        level.search(one_after_the_other)[1],
    )


def make(row: Configuration) -> PlanningProblem:
    """Return the planning problem, with a global batch of one of the paper's minibatches per device."""
    profile = replace(read_profile(row.model))  # without the cached properties of an earlier call
    return make_problem(
        profile, row.cluster, global_batch_size=row.model.minibatch * row.cluster.devices, contention=False
    )


def measure(row: Configuration) -> float:
    """Return the median seconds of planning, without a first call that compiles."""
    taken = []
    for _ in range(RUNS + 1):
        begin = time.perf_counter()
        run_planner(make(row), "pipedream", minibatch_size=row.model.minibatch)
        taken.append(time.perf_counter() - begin)
    return median(taken[1:])


def show(each: Compared) -> Row:
    """Return a row of the table; ok if planning is fast, and no configuration beats the program's on one level."""
    row = each.row
    figure = f"{row.model.title}, {row.servers}x{row.cluster.devices // row.servers} ({row.letter.upper()})"
    measured = (
        f"{describe(each.levels)}; on one level {describe(each.flat)}, the paper's {each.paper * 1e3:.1f} ms; "
        f"AllReduce as in the profiler's text {name(each.profiler)}, added to computing {name(each.added)}; "
        f"planned in {each.seconds * 1e3:.0f} ms"
    )
    optimal = _seconds(each.flat) <= each.paper * (1 + 1e-9)
    wanted = f"paper: {row.printed}; at most {MOST_SECONDS:g} s"
    return Row(figure, wanted, measured, optimal and each.seconds <= MOST_SECONDS)


def count_agreeing(compared: Sequence[Compared]) -> Row:
    """Return how many configurations are the paper's, by each cost of AllReduce."""
    counts = {
        "on levels": [_replicas(each.levels) for each in compared],
        "on one level": [_replicas(each.flat) for each in compared],
        "one level, AllReduce of the profiler's text": [each.profiler for each in compared],
        "the same, added to computing": [each.added for each in compared],
    }
    texts = []
    for title, found in counts.items():
        same = sum(each.row.replicas == replicas for each, replicas in zip(compared, found, strict=True))
        texts.append(f"{title} {same}")
    return Row(f"rows of {len(compared)} with the paper's configuration", "-", "; ".join(texts), True)


def describe(result: PlannerResult) -> str:
    """Return replicas and seconds per minibatch."""
    return f"{name(_replicas(result))} ({_seconds(result) * 1e3:.1f} ms)"


def name(replicas: Sequence[int]) -> str:
    """Return the replicas as the paper writes them."""
    return "straight" if len(replicas) > 1 and set(replicas) == {1} else "-".join(map(str, replicas))


def _replicas(result: PlannerResult) -> tuple[int, ...]:
    return tuple(stage.replicas for stage in result.chosen.stages)


def _seconds(result: PlannerResult) -> float:
    if result.pipedream is None:
        raise RuntimeError("planner 'pipedream' gave no prediction")
    return result.pipedream.minibatch_seconds
