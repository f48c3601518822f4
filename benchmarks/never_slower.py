"""Check that our plan is never slower than the paper's, DP, or any plan that the published planner can return."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.common import Row
from benchmarks.papers.candidates import published_candidates
from benchmarks.papers.published import (
    BERT_LARGE,
    MODELS,
    TABLE_5,
    Model,
    find_missing_profiles,
    published_stages,
    read_profile,
)
from dapple_tf.planner.api import make_problem
from dapple_tf.planner.best import plan_best
from dapple_tf.planner.planning_problem import Candidate, PlanningProblem
from dapple_tf.profiler.cluster import config

DEVICES = (2, 4, 8, 16, 32, 64)


def run() -> Iterator[Row]:
    """Yield the worst ratio for each profile and number of devices, over three configs, with and without overlap."""
    if why := find_missing_profiles():
        yield Row("never slower", "ratio at most 1", why, True)
        return
    for model in (*MODELS, BERT_LARGE):
        for devices in DEVICES:
            yield compare(model, devices)


def compare(model: Model, devices: int) -> Row:
    """Return the row of our simulated step over the fastest other one, under the same cost model."""
    worst, which, seconds = 0.0, "nothing else fits", 0.0
    for letter in "abc":
        for overlap in (False, True):
            problem = make_problem(
                read_profile(model),
                config(letter, devices),
                global_batch_size=model.global_batch,
                optimizer_slots=model.slots,
                overlap=overlap,
            )
            begin = time.perf_counter()
            decision = plan_best(problem)
            seconds = max(seconds, time.perf_counter() - begin)
            for other in _other_plans(model, letter, problem):
                ratio = float("inf") if decision is None else decision.chosen.seconds / other.seconds
                if ratio > worst:
                    worst = ratio
                    which = f"{other.origin}, config {letter.upper()}{', overlap' if overlap else ''}"
    figure = f"{model.title}, {devices} devices: our step over the fastest other's"
    measured = f"at most {worst:.4f} ({which}); planned in at most {seconds:.2f} s"
    return Row(figure, "at most 1", measured, worst <= 1 + 1e-9)


def _other_plans(model: Model, letter: str, problem: PlanningProblem) -> list[Candidate]:
    found = published_candidates(problem)
    if problem.cluster.devices == 16:
        for row in TABLE_5:
            if row.model is model and row.config == letter:
                found += problem.evaluate_all_sizes(published_stages(row, problem), "the paper's")
    return found
