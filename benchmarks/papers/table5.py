"""Table V of the paper: its plans, ours by its formulas and ours by the simulator, in 18 rows, by two conventions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.common import Row
from benchmarks.papers.planning import Choice, WholeSlices, compare_latencies, describe, explain, fastest
from benchmarks.papers.published import (
    RESNET,
    TABLE_5,
    Model,
    Published,
    find_missing_profiles,
    published_stages,
    read_calibrated,
    read_profile,
    stages_of,
)
from dapple_tf.planner.api import run_planner
from dapple_tf.planner.baselines import data_parallel, even_pipeline
from dapple_tf.planner.planning_problem import Candidate, PlanningProblem, list_micro_batch_sizes
from dapple_tf.profiler.cluster import config
from dapple_tf.profiler.profile import Profile
from dapple_tf.simulator.arrays import prefix_sums
from dapple_tf.simulator.transfer import allreduce_cost, link_tables, transfer_cost


@dataclass(frozen=True)
class Convention:
    """Conditions of a comparison of plans: allowed slices, the profile's stash, whether AllReduce overlaps backward."""

    title: str
    problem: type[PlanningProblem]
    profile: Callable[[Model], Profile]
    overlap: bool = True

    def make_problem(self, model: Model, letter: str, global_batch: int | None = None) -> PlanningProblem:
        """Return the planning problem of a row, on 16 devices."""
        batch = model.global_batch if global_batch is None else global_batch
        sizes = list_micro_batch_sizes(batch, None)
        return self.problem(
            self.profile(model),
            config(letter),
            batch,
            sizes,
            optimizer_slots=model.slots,
            overlap=self.overlap,
            contention=False,  # as in the paper's cost model
        )


FREE = Convention("any M", PlanningProblem, read_calibrated)
WHOLE = Convention("whole slices", WholeSlices, read_calibrated)
OTHERS = (
    Convention("any M, the files' stash", PlanningProblem, read_profile),
    Convention("whole slices, the files' stash", WholeSlices, read_profile),
    Convention("whole slices, no overlap", WholeSlices, read_calibrated, overlap=False),
    Convention("whole slices, the files' stash, no overlap", WholeSlices, read_profile, overlap=False),
)


_TITLES = {"formula": "by formula", "best": "best", "published": "of DP, two stages and straight"}


@dataclass(frozen=True)
class Compared:
    """A row under a convention: the paper's plan, ours by formula and by simulator, the best of the published space.

    ``printed``: the paper's plan with the printed cut, where ``paper`` has the cut that the paper's text describes.
    ``latencies``: of the plans by formula and of the paper, by formulas 1 to 3.
    """

    row: Published
    problem: PlanningProblem
    paper: Choice
    formula: Choice
    best: Choice
    published: Choice
    printed: Choice | None
    latencies: str

    def agrees(self, ours: Choice) -> bool:
        """Return whether this is the paper's plan, whatever the positions of the cuts."""
        whole = len(ours.candidate.stages) == self.problem.cluster.devices
        return ours.name == self.row.plan and (whole or ours.name != "straight")

    def exactly(self, ours: Choice) -> bool:
        """Return whether the cut is the printed one, too; cuts of straight plans are not printed."""
        if not self.agrees(ours):
            return False
        if ":" not in ours.name:
            return True
        return ours.split == self.row.split

    def verdict(self) -> str:
        """Return whether the plans agree, or why the paper's is slower."""
        if self.exactly(self.best):
            return "agrees"
        if self.best.candidate.stages == self.paper.candidate.stages:
            return "the paper's plan by its text, not by the cut as printed"
        kind = "agrees but for the cut; " if self.agrees(self.best) else ""
        return f"{kind}the paper's: {explain(self.problem, self.best, self.paper)}"


def compare(row: Published, convention: Convention) -> Compared:
    """Return the comparison of a row under one convention."""
    problem = convention.make_problem(row.model, row.config)
    paper = fastest(problem.evaluate_all_sizes(published_stages(row, problem), "paper"))
    published = fastest(published_candidates(problem))
    if paper is None or published is None:
        raise RuntimeError(f"{row.model.title}, config {row.config}: the paper's plan does not fit")
    formula = run_planner(problem, "dapple").chosen
    best = run_planner(problem, "best", chunks=()).chosen  # one stage per device, as in the paper
    printed = None
    if row.units is not None:
        printed = fastest(
            problem.evaluate_all_sizes(published_stages(replace(row, units=None), problem), "paper, as printed")
        )
    return Compared(
        row,
        problem,
        paper=describe(row.model, problem, paper),
        formula=describe(row.model, problem, formula),
        best=describe(row.model, problem, best),
        published=describe(row.model, problem, published),
        printed=printed and describe(row.model, problem, printed),
        latencies=compare_latencies(problem, formula, published_stages(row, problem)),
    )


def rows_of(convention: Convention) -> tuple[Published, ...]:
    """Return the rows that have a plan: in its file the outputs of 128 samples of ResNet-50 exceed 16 GB."""
    whole = issubclass(convention.problem, WholeSlices)
    return tuple(row for row in TABLE_5 if not (whole and row.model is RESNET))


def run() -> Iterator[Row]:
    """Yield 18 and 15 rows, and how many agree under these conventions and others."""
    if why := find_missing_profiles():
        yield Row("Table V", "18 rows", why, True)
        return
    for convention in (FREE, WHOLE):
        compared = [compare(row, convention) for row in rows_of(convention)]
        yield from (show(convention, each) for each in compared)
        yield count_agreeing(convention, compared)
    for convention in OTHERS:
        yield count_agreeing(convention, [compare(row, convention) for row in rows_of(convention)])


def show(convention: Convention, each: Compared) -> Row:
    """Return a row of the table; ok if ours is no slower than the paper's and the published planner's."""
    row = each.row
    acr = "" if row.acr is None else f", ACR {row.acr:.2f}"
    wanted = f"no slower than the paper's: {row.plan}{' ' + row.split if row.split else ''}{acr}"
    printed = "" if each.printed is None else f" (as printed: {each.printed})"
    measured = (
        f"paper's {each.paper}, ACR {each.paper.timeline.acr:.2f}{printed}; by formula {each.formula}, "
        f"{each.latencies}; "
        f"best {each.best}; of DP, two stages and straight {each.published}. {each.verdict()}"
    )
    figure = f"{row.model.title}, {row.model.global_batch}, {row.config.upper()}, {convention.title}"
    least = min(each.paper.seconds, each.formula.seconds, each.published.seconds)
    return Row(figure, wanted, measured, each.best.seconds <= least * (1 + 1e-9))


def count_agreeing(convention: Convention, compared: list[Compared]) -> Row:
    """Return how many rows agree, for each way to choose; ok if ours is never slower than the paper's."""
    text = []
    for title in ("formula", "best", "published"):
        plans = [(each, getattr(each, title)) for each in compared]
        same, exact = sum(each.agrees(plan) for each, plan in plans), sum(each.exactly(plan) for each, plan in plans)
        text.append(f"{_TITLES[title]} {same} ({exact} cut as printed)")
    never = all(c.best.seconds <= min(c.paper.seconds, c.published.seconds) * (1 + 1e-9) for c in compared)
    figure = f"rows of {len(compared)} with the paper's plan: {convention.title}"
    return Row(figure, "best never slower than the paper's", "; ".join(text), never)


# --- What the published planner (HPGO 0.9.2) can return: DP, every two-stage split and straight pipelines


def published_candidates(problem: PlanningProblem) -> list[Candidate]:
    """Return DP, the fastest two-stage split and even straight pipelines at all micro-batch sizes, simulated."""
    most = min(problem.cluster.devices, len(problem.chain.parameter_bytes))
    found = problem.evaluate_all_sizes(data_parallel(problem), "DP")
    for stages in range(2, most + 1):
        found += problem.evaluate_all_sizes(even_pipeline(problem, stages), "straight")
    split = fastest_split(problem)
    return found if split is None else [*found, split]


def fastest_split(problem: PlanningProblem) -> Candidate | None:
    """Return the fastest plan of two stages on all devices in order, over all cuts, replicas and micro-batch sizes.

    Plans are simulated by rising lower bound of the step, until the bound exceeds the best step found.
    """
    best: Candidate | None = None
    for bound, size, replicas, cut in sorted(_bounds(problem)):
        if best is not None and bound >= best.seconds:
            break
        stages = stages_of(problem, [cut], [replicas, problem.cluster.devices - replicas])
        found = problem.evaluate(stages, size, "two stages")
        if found is not None and (best is None or found.seconds < best.seconds):
            best = found
    return best


def _bounds(problem: PlanningProblem) -> Iterator[tuple[float, int, int, int]]:
    """Yield lower bound (seconds), micro-batch size, replicas of the first stage and cut of all plans that may fit."""
    devices, homes, links = problem.cluster.devices, problem.cluster.homes, link_tables(problem.cluster)
    cuts = np.array(problem.profile.positions())
    if not len(cuts):
        return
    parameters = _both([layer.parameter_bytes for layer in problem.profile.layers], cuts)
    stash = _both([layer.stash_bytes for layer in problem.profile.layers], cuts)
    crossing = problem.profile.crossing_bytes()[cuts - 1]
    for r in range(1, devices):
        counts = np.array([[r], [devices - r]])
        rings = np.array([allreduce_cost(homes[:r], links), allreduce_cost(homes[r:], links)])
        latency, rate = transfer_cost(homes[:r], homes[r:], links)
        for size in problem.micro_batch_sizes:
            if size < counts.max():
                continue
            m, scale = problem.global_batch_size // size, size / problem.profile.batch_size
            forward, backward = (
                np.array([_both(seconds(size / count), cuts)[i] for i, count in enumerate(counts[:, 0])])
                for seconds in (problem.profile.forward_seconds, problem.profile.backward_seconds)
            )
            exposed = (rings[:, :1] + rings[:, 1:] * parameters) * (parameters > 0)
            if problem.overlap:
                exposed = np.maximum(0.0, exposed - backward)
            send = latency + rate * crossing * scale
            first = m * (forward[0] + backward[0]) + exposed[0]
            end = np.maximum(exposed[1], send + backward[0] + exposed[0])
            second = forward[0] + send + m * (forward[1] + backward[1]) + end
            held = parameters * problem.values_per_weight + (0 if problem.recompute else stash * scale / counts)
            bound = np.maximum(first, second) * (1 - 1e-9)
            for i in np.flatnonzero((held <= problem.cluster.least_memory).all(axis=0)):
                yield float(bound[i]), size, r, int(cuts[i])


def _both(values: object, cuts: np.ndarray) -> np.ndarray:
    """Return the sums before and after each cut."""
    sums = prefix_sums(np.asarray(values, np.float64))
    return np.array([sums[cuts], sums[-1] - sums[cuts]])
