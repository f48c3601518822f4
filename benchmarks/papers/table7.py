"""Table VII of the paper: the plans of DAPPLE and PipeDream on two servers of Config A, and ours."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.common import Row
from benchmarks.papers.planning import compare_latencies, describe, explain, fastest
from benchmarks.papers.published import TABLE_7, Strategies, find_missing_profiles, stages_of
from benchmarks.papers.table5 import FREE, WHOLE, Convention
from dapple_tf.planner.api import run_planner
from dapple_tf.planner.baselines import even_pipeline
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.plans import StagePlan


def run() -> Iterator[Row]:
    """Yield four rows, under the two conventions of Table V."""
    if why := find_missing_profiles():
        yield Row("Table VII", "4 rows", why, True)
        return
    for convention in (FREE, WHOLE):
        yield from (compare(row, convention) for row in TABLE_7)


def compare(row: Strategies, convention: Convention) -> Row:
    """Return a row; ok if ours is no slower than either plan."""
    problem = convention.make_problem(row.model, "a", row.global_batch)
    best = describe(row.model, problem, run_planner(problem, "best", chunks=()).chosen)
    texts, least = [f"best {best}"], best.seconds
    for name, stages in (
        ("DAPPLE's", printed_stages(problem, row, row.dapple)),
        ("PipeDream's", pipedream_stages(problem, row)),
    ):
        found = fastest(problem.evaluate_all_sizes(stages, name))
        if found is None:
            texts.append(f"{name} does not fit the memory")
            continue
        theirs = describe(row.model, problem, found)
        texts.append(f"{name} {theirs}: {explain(problem, best, theirs)}")
        least = min(least, theirs.seconds)
    formula = run_planner(problem, "dapple").chosen
    latencies = compare_latencies(problem, formula, printed_stages(problem, row, row.dapple))
    texts.append(f"by formula {describe(row.model, problem, formula)}, {latencies}")
    ours = best.seconds <= least * (1 + 1e-9)
    figure = f"{row.model.title}, {row.global_batch}, 2 x 8, {convention.title}"
    return Row(figure, "best never slower", "; ".join(texts), ours)


def pipedream_stages(problem: PlanningProblem, row: Strategies) -> tuple[StagePlan, ...]:
    return (
        even_pipeline(problem, problem.cluster.devices)
        if row.pipedream is None
        else printed_stages(problem, row, row.pipedream)
    )


def printed_stages(
    problem: PlanningProblem, row: Strategies, printed: tuple[tuple[int, ...], tuple[int, ...]]
) -> tuple[StagePlan, ...]:
    starts, replicas = printed
    return stages_of(problem, [start + row.renumbered for start in starts], replicas)
