"""Table V of the paper: its plans, ours by its formulas and ours by the simulator, in 18 rows, by two conventions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from benchmarks.common import Row
from benchmarks.papers.candidates import published_candidates
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
)
from dapple_tf.planner.api import run_planner
from dapple_tf.planner.micro_batch_sizes import list_micro_batch_sizes
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.profiler.cluster import config
from dapple_tf.profiler.profile import Profile


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
