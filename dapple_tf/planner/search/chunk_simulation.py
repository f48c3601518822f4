"""Simulate cuts of a plan with several stages per device: the seconds of its step, and the memory that it lacks."""

from __future__ import annotations

import itertools
import math
from functools import cache, cached_property, partial
from typing import NamedTuple

import numpy as np

from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from dapple_tf.graph_passes.schedules.worker_map import WorkerMap
from dapple_tf.planner.costs import ChainCosts, make_stages
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.planner.search.balanced_cuts import even_sums
from dapple_tf.planner.search.chunk_shapes import ChunkShape, WorkerDevices, list_worker_placements
from dapple_tf.planner.step_simulation import StageCostArrays, order_seconds
from dapple_tf.plans import StagePlan
from dapple_tf.simulator.arrays import Floats, Integers, prefix_sums
from dapple_tf.simulator.costs import exposed_seconds
from dapple_tf.simulator.engine import whole_rings
from dapple_tf.simulator.interrupts import check_stop
from dapple_tf.simulator.order import HeldStash, Ordered, named_order
from dapple_tf.simulator.transfer import LinkCosts
from dapple_tf.timeline.stage_costs import usable_bytes

_ITERATIONS = 4  # of even_sums
_NOTHING = 1e-300  # replaces a sum of 0 as a divisor


class BlockCosts(NamedTuple):
    """Costs of N blocks of L layers for one micro-batch, on a number of replicas.

    Seconds, and bytes of one device; ``boundary_bytes``: of all replicas together. "Sums" are of the first 0, 1 ...
    blocks.
    """

    forward: Floats  # [N + 1] sums
    backward: Floats  # [N + 1] sums; re-computed forwards included
    weights: Floats  # [N + 1] sums: gradients of weights if the schedule runs them on their own, else 0
    fixed_bytes: Floats  # [N + 1] sums: weights, gradients, optimizer slots
    stash_bytes: Floats  # [N + 1] sums
    working_bytes: Floats  # [N]
    boundary_bytes: Floats  # [N + 1] that cross the cut before each block; 0 at both ends
    parameter_bytes: Floats  # [L] of each layer
    gradients: Floats  # [L] seconds of each layer's gradients; empty where AllReduce comes after all gradients
    positions: Integers  # [N + 1] the first layer of each block
    fullest: float  # the fraction of the rows on the replica with most rows
    recompute: bool


class WorkerLinks(NamedTuple):
    """Costs of communication by stage: latency and seconds per byte of the transfer to the next stage and of AllReduce.

    Those of transfers are 0 between stages of one worker, and after the last stage.
    """

    worker_of: Integers
    latency: Floats
    per_byte: Floats
    allreduce_latency: Floats
    allreduce_per_byte: Floats


class CutResult(NamedTuple):
    """The result of simulating cuts: the bytes that the fullest device lacks, and the seconds of a step.

    ``lacking_bytes``: 0 if all devices have the memory; else ``seconds`` is infinite. Of two results the one that lacks
    fewer bytes is better; if neither lacks any, the one with fewer seconds.
    """

    lacking_bytes: float
    seconds: float

    def beats(self, other: CutResult) -> bool:
        """Return whether this is better than ``other`` by more than rounding."""
        if self.lacking_bytes or other.lacking_bytes:
            return self.lacking_bytes < other.lacking_bytes * (1 - 1e-9)
        return self.seconds < other.seconds * (1 - 1e-9)


class CostSource:
    """The costs of a problem's blocks and links, and the placements of its workers, each computed once."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self._links = LinkCosts(problem.cluster)
        self._work: dict[float, float] = {}
        # Costs of blocks, by the samples of a micro-batch, the number of replicas, and whether backwards are split.
        self.blocks = cache(partial(_block_costs, problem))
        # Placements, by the number of workers and the replicas of each.
        self.placements = cache(partial(list_worker_placements, problem.cluster))

    def least_seconds(self, shape: ChunkShape, size: int) -> float:
        """Return a lower bound of the step for this micro-batch ``size`` and any cuts: all work, spread evenly."""
        samples = size / shape.replicas
        if samples not in self._work:
            forward, backward = (sum(seconds) for seconds in self.problem.chain.block_seconds(samples))
            self._work[samples] = float(backward + (2 if self.problem.recompute else 1) * forward)
        return self.problem.global_batch_size // size * self._work[samples] / shape.workers.workers

    def even_starts(self, workers: WorkerMap) -> Integers:
        """Return cuts that make the seconds of the profile's batch nearly even over stages and workers."""
        forward, backward = self.problem.chain.block_seconds(self.problem.profile.batch_size)
        worker_of, nothing = np.array(workers.worker_of, np.int64), np.zeros(len(forward))
        return even_sums(forward + backward, nothing, np.zeros(workers.stages), worker_of, _ITERATIONS)

    def worker_links(self, shape: ChunkShape, devices: WorkerDevices) -> WorkerLinks:
        """Return the costs of communication of a plan's stages; ``devices``: of each worker."""
        homes, worker_of = self.problem.cluster.homes, shape.workers.worker_of
        servers = [tuple(homes[device] for device in own) for own in devices]
        moved = [(0.0, 0.0)] * len(worker_of)
        for stage, (here, there) in enumerate(itertools.pairwise(worker_of)):
            if here != there:
                moved[stage] = self._links.transfer(servers[here], servers[there])
        rings = [self._links.allreduce(servers[worker]) for worker in worker_of]
        return WorkerLinks(np.array(worker_of, np.int64), *np.array(moved).T.copy(), *np.array(rings).T.copy())


class CutSimulator:
    """Simulates cuts of one shape on some ``devices`` of each worker, for micro-batches of ``size`` samples.

    ``starts``, of its methods: the first block of each stage.
    """

    def __init__(
        self, source: CostSource, shape: ChunkShape, devices: WorkerDevices, links: WorkerLinks, size: int
    ) -> None:
        self.shape, self.size = shape, size
        self.micro_batches = source.problem.global_batch_size // size
        self.least_seconds = source.least_seconds(shape, size)
        self._problem, self._devices, self._links = source.problem, devices, links
        self._blocks = source.blocks(size, shape.replicas, ScheduleSpec.parse(shape.schedule).splits_backward)
        self._memory = usable_bytes(source.problem.cluster.least_memory)

    @property
    def calls(self) -> int:
        """The number of forwards of a step: stages times micro-batches."""
        return self.shape.workers.stages * self.micro_batches

    @cached_property
    def _ordered(self) -> Ordered:
        return named_order(self.shape.schedule, self.shape.workers.stages, self.micro_batches)

    @cached_property
    def _held(self) -> HeldStash:
        return HeldStash.of(self._ordered.order)

    def costs(self, starts: Integers) -> StageCostArrays:
        """Return the costs of the stages, from sums over blocks; they are those of ``simulator.costs.stage_costs``.

        There is one difference: with ``overlap``, every stage of a schedule that splits backwards is assumed to end
        with W. Under ``dualpipe-v`` some do not.
        """
        check_stop()
        b, links = self._blocks, self._links
        ends = np.append(starts[1:], len(b.working_bytes))
        stash, working = b.stash_bytes[ends] - b.stash_bytes[starts], np.maximum.reduceat(b.working_bytes, starts)
        if b.recompute:
            stash, working = b.boundary_bytes[starts] * b.fullest, working + stash
        return StageCostArrays(
            forward_seconds=b.forward[ends] - b.forward[starts],
            backward_seconds=b.backward[ends] - b.backward[starts],
            send_seconds=links.latency + links.per_byte * b.boundary_bytes[ends],
            fixed_bytes=b.fixed_bytes[ends] - b.fixed_bytes[starts],
            stash_bytes=stash,
            working_bytes=working,
            weights_seconds=b.weights[ends] - b.weights[starts],
            rings=whole_rings(_exposed_seconds(b, links, starts, ends)),
        )

    def bound(self, c: StageCostArrays) -> float:
        """Return a lower bound of a step (seconds): the largest of the workers' bounds.

        The bound of a worker is the sum of three times: before its first action, of its own work, and after its last
        action. Before a
        stage's first forward, micro-batch 0 runs through all stages before it. After its last gradients comes its
        AllReduce. Where backwards are not split, the stages before it then still run a backward each.
        """
        workers, splits = self.shape.workers.workers, bool(c.weights_seconds.any())
        before, load, after = [np.inf] * workers, [0.0] * workers, [np.inf] * workers
        there, back = 0.0, 0.0  # seconds of micro-batch 0 up to a stage, and of the last one from it
        columns = (c.forward_seconds, c.backward_seconds, c.weights_seconds, c.send_seconds, c.rings.exposed)
        for w, forward, backward, weights, send, exposed in zip(
            self.shape.workers.worker_of, *(column.tolist() for column in columns), strict=True
        ):
            before[w] = min(before[w], there)
            load[w] += self.micro_batches * (forward + backward)
            after[w] = min(after[w], exposed if splits else max(exposed, back))
            there += forward + send
            back += backward - weights + send
        return max(*map(sum, zip(before, load, after, strict=True)), there + back)

    def simulate(self, costs: StageCostArrays) -> CutResult:
        """Return the result for stages with these costs. Raises ScheduleError if the schedule cannot have M."""
        ordered = self._ordered
        bytes_of = costs.fixed_bytes + costs.working_bytes + ordered.in_flight * costs.stash_bytes
        # The sums are upper bounds: as if all stages of a worker had their peaks at once.
        if np.bincount(self._links.worker_of, bytes_of).max() > self._memory:
            peak = float(self.peaks(costs).max())
            if peak > self._memory:
                return CutResult(peak - self._memory, np.inf)
        return CutResult(0.0, order_seconds(ordered.order, costs))

    def peaks(self, costs: StageCostArrays) -> Floats:
        """Return the most bytes that a device of each worker holds."""
        return self._held.peaks(costs.fixed_bytes, costs.stash_bytes, costs.working_bytes)

    def load(self, costs: StageCostArrays, *, lacking: bool) -> Floats:
        """Return what each worker should have less of: bytes where memory is ``lacking``, else seconds of a step."""
        if lacking:
            return self.peaks(costs)
        seconds = self.micro_batches * (costs.forward_seconds + costs.backward_seconds) + costs.rings.exposed
        return np.asarray(np.bincount(self._links.worker_of, seconds), np.float64)

    def even_starts(self, bytes_weight: float) -> Integers:
        """Return cuts that make a mix of seconds and bytes nearly even over stages and workers.

        ``bytes_weight``: from 0 (only seconds) to 1 (only bytes). Bytes are those with the most micro-batches in
        flight.
        """
        b, in_flight = self._blocks, self._ordered.in_flight.astype(np.float64)
        seconds, fixed, stash = np.diff(b.forward + b.backward), np.diff(b.fixed_bytes), np.diff(b.stash_bytes)
        by_time = (1 - bytes_weight) / max(seconds.sum(), _NOTHING)
        by_bytes = bytes_weight / max(fixed.sum() + in_flight.mean() * stash.sum(), _NOTHING)
        return even_sums(
            seconds * by_time + fixed * by_bytes, stash * by_bytes, in_flight, self._links.worker_of, _ITERATIONS
        )

    def stage_plans(self, starts: Integers) -> tuple[StagePlan, ...]:
        """Return the stages with their layers and devices."""
        chain, worker_of = self._problem.chain, self.shape.workers.worker_of
        bounds = [*starts.tolist(), len(chain.parameter_bytes)]
        return make_stages(chain, bounds, (self._devices[worker] for worker in worker_of))


def _block_costs(problem: PlanningProblem, size: int, replicas: int, splits: bool) -> BlockCosts:
    chain, profile, costs = problem.chain, problem.profile, ChainCosts(problem, problem.chain, size)
    samples = math.ceil(size / replicas) if problem.whole_rows else size / replicas
    forward, backward = costs.second_sums(samples)
    weights = chain.weights_seconds(samples) if splits else np.zeros(costs.blocks)
    gradients = profile.weights_seconds(samples) if splits else profile.backward_seconds(samples)
    return BlockCosts(
        forward=forward,
        backward=backward,
        weights=prefix_sums(weights),
        fixed_bytes=prefix_sums(chain.parameter_bytes * problem.values_on(replicas)),
        stash_bytes=prefix_sums(chain.stash_bytes * samples / profile.batch_size),
        working_bytes=chain.working_bytes * samples / profile.batch_size,
        boundary_bytes=costs.boundary_bytes,
        parameter_bytes=np.asarray(profile.parameter_bytes, np.float64),
        gradients=np.asarray(gradients if problem.overlap else (), np.float64),
        positions=np.array(chain.positions, np.int64),
        fullest=samples / size,
        recompute=bool(problem.recompute),
    )


def _exposed_seconds(b: BlockCosts, links: WorkerLinks, starts: Integers, ends: Integers) -> Floats:
    """Return the seconds of AllReduce of each stage after its last gradients."""
    latency, per_byte = links.allreduce_latency, links.allreduce_per_byte
    if not len(b.gradients):
        parameters = np.add.reduceat(b.parameter_bytes, b.positions[starts])
        return np.where(parameters > 0, latency + per_byte * parameters, 0.0)
    first, end = b.positions[starts], b.positions[ends]
    stage_of = np.repeat(np.arange(len(starts)), end - first)
    rings = np.where(b.parameter_bytes > 0, latency[stage_of] + per_byte[stage_of] * b.parameter_bytes, 0.0)
    layers = zip(first.tolist(), end.tolist(), strict=True)
    return np.array([exposed_seconds(b.gradients[low:high], rings[low:high]) for low, high in layers])
