"""Planner "even": Megatron-LM's pipelines of equally many layers a stage (Narayanan et al., SC 2021)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from dapple_tf.errors import PlanError
from dapple_tf.graph_passes.schedules.worker_map import WorkerMap
from dapple_tf.planner.costs import make_stages
from dapple_tf.planner.planning_problem import PlannerResult, PlanningProblem
from dapple_tf.planner.registration import planner
from dapple_tf.planner.search.chunk_shapes import ChunkShape, list_shapes
from dapple_tf.plans import StagePlan
from dapple_tf.profiler.profile import profiles_on
from dapple_tf.simulator.arrays import prefix_sums


@planner("even", unequal=True, shares_devices=True)
def plan_even(
    problem: PlanningProblem, *, pipeline_size: int | None = None, chunks: Sequence[int] = (1, 2, 4)
) -> PlannerResult | None:
    """Return the fastest pipeline of p x v stages with equally many layers; None if nothing fits the memory.

    ``pipeline_size``: p, the pipeline-parallel size, which divides the n devices; by default all that do. ``chunks``:
    the numbers of model chunks v that a device may have (section 2.2.2). The data-parallel size is d = n / p (section
    3.1, with t = 1); stage i is on the devices i d to (i + 1) d - 1; with v > 1 the stages i + p, i + 2 p ... are there
    too. With v = 1 the schedule is PipeDream-Flush (1F1B, section 2.2.1), which is ``dapple-a``, else
    ``interleaved-1f1b``, for which p must divide the micro-batches. Where the problem names a schedule, it says how
    many stages a device has.

    Megatron-LM's users choose p, v and the micro-batch size b by measurement (section 3); the simulator does it here.
    Layers are blocks of the chain; where p v does not divide them, the first stages have one more. Two things are left
    out: tensor parallelism, and sending between servers in pieces that are gathered there (section 4.1). Raises
    PlanError for a p that does not divide the devices or has too few layers, and for chunks below 1.
    """
    _check_options(problem, pipeline_size, chunks)
    shapes = [(shape, _even_stages(problem, shape)) for shape in _list_shapes(problem, pipeline_size, chunks)]
    tries = [
        (_least_seconds(problem, shape, stages, size), shape, stages, size)
        for shape, stages in shapes
        for size in problem.micro_batch_sizes
    ]
    fastest, ceiling = None, math.inf
    for least, shape, stages, size in sorted(tries, key=lambda entry: entry[0]):
        if least >= ceiling:
            break
        found = problem.evaluate(stages, size, "even", shape.schedule, ceiling=ceiling)
        if found is not None:
            fastest, ceiling = found, found.seconds
    return PlannerResult.fastest([fastest])


def _check_options(problem: PlanningProblem, pipeline_size: int | None, chunks: Sequence[int]) -> None:
    total, blocks = problem.cluster.devices, len(problem.chain.parameter_bytes)
    if pipeline_size is not None and (pipeline_size < 1 or total % pipeline_size or pipeline_size > blocks):
        possible = [p for p in range(1, min(total, blocks) + 1) if total % p == 0]
        raise PlanError(
            f"pipeline_size={pipeline_size}: for {problem.profile.model!r}, with {blocks} blocks of layers, on {total} "
            f"devices give one of {', '.join(map(str, possible))}"
        )
    if not chunks or min(chunks) < 1:
        raise PlanError(f"chunks={list(chunks)}: give the numbers of stages a device may have, from 1 on")


def _list_shapes(problem: PlanningProblem, pipeline_size: int | None, chunks: Sequence[int]) -> Iterator[ChunkShape]:
    """Yield every p and v on all devices, under Megatron-LM's schedules or the problem's."""
    total, blocks = problem.cluster.devices, len(problem.chain.parameter_bytes)
    sizes = [p for p in range(1, total + 1) if total % p == 0] if pipeline_size is None else [pipeline_size]
    if problem.shares_devices:
        yield from (s for s in list_shapes(problem) if s.workers.workers in sizes and s.device_count == total)
        return
    auto = problem.schedule == "auto"
    for p, v in itertools.product(sizes, chunks if auto else (1,)):
        if p * v > blocks or (p == 1 and v > 1):
            continue
        if v > 1:
            yield ChunkShape(f"interleaved-1f1b:v={v}", WorkerMap.looped(p, v), total // p)
        else:
            yield ChunkShape(problem.schedule_or("dapple-a"), WorkerMap.one_per_stage(p), total // p)


def _even_stages(problem: PlanningProblem, shape: ChunkShape) -> tuple[StagePlan, ...]:
    """Return stages of equally many blocks, the first ones with one more where they do not divide."""
    count, d = shape.workers.stages, shape.replicas
    least, more = divmod(len(problem.chain.parameter_bytes), count)
    bounds = [stage * least + min(stage, more) for stage in range(count + 1)]
    return make_stages(problem.chain, bounds, (range(w * d, (w + 1) * d) for w in shape.workers.worker_of))


def _least_seconds(problem: PlanningProblem, shape: ChunkShape, stages: Sequence[StagePlan], size: int) -> float:
    """Return a lower bound of the step: the seconds of the busiest device, if all devices were of the fastest kind.

    Infinite if a replica gets less than one sample.
    """
    if shape.replicas > size:
        return math.inf
    samples = size / shape.replicas
    kinds = profiles_on(problem.profile, problem.cluster)
    seconds = np.min([kind.forward_seconds(samples) + kind.backward_seconds(samples) for kind in kinds], axis=0)
    sums = prefix_sums(seconds)
    own = [sums[stage.last_layer + 1] - sums[stage.first_layer] for stage in stages]
    busiest = np.bincount(shape.workers.worker_of, own).max()
    return float(busiest) * (problem.global_batch_size // size) * (1 - 1e-9)
