"""Planner "hetpipe": virtual workers of unequal devices, each a pipeline (Park et al., USENIX ATC 2020)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from dapple_tf.errors import PlanError
from dapple_tf.planner.costs import ChainCosts, make_stages
from dapple_tf.planner.partition import least_slowest
from dapple_tf.planner.planning_problem import Candidate, PlannerResult, PlanningProblem
from dapple_tf.planner.registration import planner
from dapple_tf.planner.systems.device_order import devices_of_servers
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.profile import profile_on
from dapple_tf.profiler.units import format_samples
from dapple_tf.simulator.arrays import prefix_sums, runs
from dapple_tf.simulator.virtual_workers import simulate_workers
from dapple_tf.timeline.stage_costs import usable_bytes
from dapple_tf.wording import format_count

_POLICIES = ("NP", "ED", "HD")
_MOST_ORDERS = 24  # of the kinds in a virtual worker; if there are more, only those by rising and falling speed count
_MOST_DEVICES = 1024

Worker = tuple[int, ...]  # the devices of a virtual worker


@planner("hetpipe", unequal=True, candidate=True)
def plan_hetpipe(problem: PlanningProblem, *, policy: str | None = None) -> PlannerResult | None:
    """Return the fastest virtual workers of an allocation policy; None if nothing fits the memory.

    ``policy`` (section 8.1): "NP", node partition, where the devices of a server are a virtual worker; "ED", equal
    distribution, where each worker has one device of every server; "HD", hybrid distribution, where the servers are
    paired, the fastest with the slowest, and each of two workers has half of both; None tries all that the servers
    allow. The layers of a worker are partitioned so that the longest time of a stage is least. The time of a stage is
    that of computing and of receiving activations and gradients. A stage must have the memory for as many micro-batches
    as 1F1B keeps there. (Section 7; the paper solves it by an integer program, here a dynamic program is exact for each
    order of the worker's kinds of devices.)

    HetPipe is asynchronous (WSP, section 5), with parameter servers. Here it is synchronous: each worker runs an equal
    part of the batch, and AllReduce joins them at the end; the micro-batch size is the fastest in the simulator. Where
    all workers cut alike, the plan is an ordinary one whose stages have a replica for each worker. Else its stages have
    a ``worker``, and it can be simulated but not run. Raises PlanError for another policy, for one that the servers do
    not allow, for a batch that no number of workers divides, and for more than 1024 devices.
    """
    if policy is not None and policy not in _POLICIES:
        raise PlanError(f"policy={policy!r}: HetPipe's policies are {', '.join(_POLICIES)}")
    problem.check_devices("hetpipe", _MOST_DEVICES)
    allocations = {name: allocate(problem, name) for name in (_POLICIES if policy is None else (policy,))}
    if policy is not None and not allocations[policy]:
        counts = [server.devices for server in problem.cluster.servers]
        raise PlanError(
            f"policy={policy!r} does not divide servers of {counts} devices: ED needs equally many devices on each, HD "
            "also an even number of servers and of devices; use policy='NP'"
        )
    possible = [workers for workers in dict.fromkeys(allocations.values()) if workers]
    if all(problem.global_batch_size % len(workers) for workers in possible):
        raise PlanError(
            f"a batch of {format_samples(problem.global_batch_size)} has no equal parts for {_counts(possible)}: "
            "choose another global_batch_size"
        )
    _check_possible(problem, possible)
    found = [
        candidate
        for workers in possible
        for size in problem.micro_batch_sizes
        if size % len(workers) == 0 and (candidate := _plan_workers(problem, workers, size))
    ]
    return PlannerResult.fastest(found)


def _counts(possible: Sequence[Sequence[Worker]]) -> str:
    return " or ".join(str(count) for count in sorted({len(workers) for workers in possible})) + " virtual workers"


def _check_possible(problem: PlanningProblem, possible: Sequence[Sequence[Worker]]) -> None:
    """Raise PlanError where micro-batches have no equal parts for the workers, or workers more devices than blocks."""
    if all(size % len(workers) for workers in possible for size in problem.micro_batch_sizes):
        raise PlanError(
            f"micro-batches of {format_samples(max(problem.micro_batch_sizes))} have no equal parts for "
            f"{_counts(possible)}: choose another micro_batch_size"
        )
    blocks, most = len(problem.chain.parameter_bytes), min(max(map(len, workers)) for workers in possible)
    if most > blocks:
        raise PlanError(
            f"a virtual worker has up to {format_count(most, 'device')}, one stage each, but the layers of "
            f"{problem.profile.model!r} form {blocks} blocks that can be a stage: use planner 'best', or fewer devices "
            "per server"
        )


def allocate(problem: PlanningProblem, policy: str) -> tuple[Worker, ...]:
    """Return the virtual workers of a policy; none where the servers do not allow it."""
    servers = devices_of_servers(problem.cluster)
    if policy == "NP":
        return tuple(map(tuple, servers))
    count = len(servers[0])
    if any(len(server) != count for server in servers):
        return ()
    if policy == "ED":
        return tuple(zip(*servers, strict=True))
    if len(servers) % 2 or count % 2:
        return ()
    by_speed = sorted(servers, key=lambda server: sum(_seconds(problem, device) for device in server))
    pairs = zip(by_speed[: len(servers) // 2], reversed(by_speed[len(servers) // 2 :]), strict=True)
    half = count // 2
    return tuple(
        tuple(fast[begin : begin + half] + slow[begin : begin + half]) for fast, slow in pairs for begin in (0, half)
    )


def _seconds(problem: PlanningProblem, device: int) -> float:
    """Return the seconds of the whole model for the profile's batch on a device."""
    return profile_on(problem.profile, problem.cluster, device).model_seconds(problem.profile.batch_size)


def _plan_workers(problem: PlanningProblem, workers: Sequence[Worker], size: int) -> Candidate | None:
    """Return the partitioned workers, simulated; ``size``: samples of the micro-batches of all workers together."""
    samples, micro_batches = size // len(workers), problem.global_batch_size // size
    found = dict[object, tuple[Worker, tuple[int, ...]]]()
    pipelines: list[tuple[Worker, tuple[int, ...]]] = []  # the devices in the order of the stages, and the cuts
    for worker in workers:
        key = _partition_key(problem.cluster, worker)
        if key not in found:
            best = _partition_worker(problem, worker, samples, micro_batches)
            if best is None:
                return None
            found[key] = tuple(worker.index(device) for device in best[0]), best[1]
        order, bounds = found[key]
        pipelines.append((tuple(worker[index] for index in order), bounds))
    schedule = problem.schedule_or("dapple-a")
    kinds = {(tuple(map(problem.cluster.kind_of, devices)), bounds) for devices, bounds in pipelines}
    if len(kinds) == 1:
        together = zip(*(devices for devices, _ in pipelines), strict=True)
        return problem.evaluate(
            make_stages(problem.chain, pipelines[0][1], map(sorted, together)), size, "hetpipe", schedule
        )
    stages = tuple(
        replace(stage, worker=index)
        for index, (devices, bounds) in enumerate(pipelines)
        for stage in make_stages(problem.chain, bounds, ((device,) for device in devices))
    )
    plan = problem.make_plan(stages, samples, schedule, "hetpipe")
    steps = simulate_workers(plan, problem.profile, problem.cluster, optimizer_slots=problem.optimizer_slots)
    if not all(itertools.chain.from_iterable(step.fits for step in steps)):
        return None
    seconds = max(step.step_seconds for step in steps)
    return Candidate(stages, samples, schedule, seconds, "hetpipe", plan.recompute)


def _partition_key(cluster: Cluster, worker: Worker) -> object:
    """Return the kinds, memories and links of a worker's devices. Workers with equal keys have the same partition."""
    links = tuple(cluster.link(cluster.homes[a], cluster.homes[b]) for a, b in itertools.combinations(worker, 2))
    return tuple((cluster.kind_of(d), cluster.memory_of(d)) for d in worker), links


def _partition_worker(
    problem: PlanningProblem, worker: Worker, samples: int, micro_batches: int
) -> tuple[Worker, tuple[int, ...]] | None:
    """Return the worker's devices in the best order of their kinds, and the bounds of their stages in blocks."""
    costs = ChainCosts(problem, problem.chain, samples)
    found = ((partition_worker(costs, order, micro_batches), order) for order in _orders(problem, worker))
    fitting = [(partition[0], order, partition[1]) for partition, order in found if partition is not None]
    return min(fitting, key=lambda entry: entry[0])[1:] if fitting else None


def _orders(problem: PlanningProblem, worker: Worker) -> Iterator[Worker]:
    """Yield the worker's devices in every order of their kinds; of more than 24 orders, two by speed."""
    kinds = [problem.cluster.kind_of(device) for device in worker]
    counts = [kinds.count(kind) for kind in set(kinds)]
    number = math.factorial(len(worker)) // math.prod(math.factorial(count) for count in counts)
    if number > _MOST_ORDERS:
        seconds = {device: _seconds(problem, device) for device in worker}
        yield tuple(sorted(worker, key=lambda device: seconds[device]))
        yield tuple(sorted(worker, key=lambda device: -seconds[device]))
        return
    for order in _arrange(tuple(kinds)):
        left = {kind: [d for d, k in zip(worker, kinds, strict=True) if k == kind] for kind in set(kinds)}
        yield tuple(left[kind].pop(0) for kind in order)


def _arrange(kinds: tuple[str | None, ...]) -> Iterator[tuple[str | None, ...]]:
    """Yield the distinct orders of ``kinds``, the given one first."""
    if len(set(kinds)) <= 1:  # of a thousand devices too, which are too many to take one by one
        yield kinds
        return
    for kind in dict.fromkeys(kinds):
        rest = list(kinds)
        rest.remove(kind)
        yield from ((kind, *others) for others in _arrange(tuple(rest)))


# --- HetPipe's partition of layers over the devices of a virtual worker (Park et al., USENIX ATC 2020, section 7)


def partition_worker(costs: ChainCosts, order: Worker, micro_batches: int) -> tuple[float, tuple[int, ...]] | None:
    """Return the longest time of a stage, as short as possible, and the stages' k + 1 bounds; None if nothing fits.

    Bounds are numbers of blocks. ``costs``: for the worker's micro-batches, of which it runs ``micro_batches``.
    ``order``: its k devices; every one has a stage of at least one block. A stage's time counts receiving activations
    where it begins, and gradients where it ends. Of equal times the earlier stages have as few blocks as possible.
    """
    cluster, count = costs.problem.cluster, len(order)
    links = [cluster.link(cluster.homes[a], cluster.homes[b]) for a, b in itertools.pairwise(order)]
    sent = [link.latency + costs.boundary_bytes / link.bandwidth for link in links]
    nothing = np.zeros(costs.blocks + 1)
    of_kind = {
        cluster.kind_of(device): runs(prefix_sums(np.add(*costs.block_seconds(costs.size, device)))) for device in order
    }
    seconds = np.empty((count, costs.blocks, costs.blocks + 1))
    for index, device in enumerate(order):
        activations, gradients = [nothing, *sent][index][:-1, None], [*sent, nothing][index][None, :]
        needed = costs.needed_bytes(min(count - index, micro_batches))
        fits = needed <= usable_bytes(cluster.memory_of(device))
        seconds[index] = np.where(fits, of_kind[cluster.kind_of(device)] + (activations + gradients), np.inf)
    least, bounds = least_slowest(seconds)
    return (least, bounds) if bounds else None
