"""All plans that the published planner (HPGO 0.9.2) can return: DP, every two-stage split and straight pipelines."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.papers.published import stages_of
from dapple_tf.planner.baselines import data_parallel, even_pipeline
from dapple_tf.planner.planning_problem import Candidate, PlanningProblem
from dapple_tf.simulator.arrays import prefix_sums
from dapple_tf.simulator.transfer import allreduce_cost, link_tables, transfer_cost


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
