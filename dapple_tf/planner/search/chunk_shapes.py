"""Shapes of plans with several stages per device: numbers of workers and replicas, and the devices they can have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from dapple_tf.graph_passes.schedules.worker_map import WorkerMap
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.planner.search.placement import Placement, append_first, device_indices, fresh_first, scatter_first
from dapple_tf.planner.search.search_space import server_orders
from dapple_tf.profiler.cluster import Cluster

_MOST_DEVICES = 64  # with more there are too many combinations of workers and replicas

WorkerDevices = tuple[tuple[int, ...], ...]
"""The devices of each worker."""


@dataclass(frozen=True)
class ChunkShape:
    """The worker map of a ``schedule``, and the number of ``replicas``, which is the same for all workers."""

    schedule: str
    workers: WorkerMap
    replicas: int

    @property
    def device_count(self) -> int:
        """The number of devices that are used."""
        return self.replicas * self.workers.workers


def least_stages(spec: ScheduleSpec) -> int:
    """Return the fewest stages that a schedule can have; some worker runs several of them."""
    return spec.chunks or spec.stages or 1


def most_stages(problem: PlanningProblem) -> int:
    """Return the most stages that the problem's devices can run under its schedule; 0 if there are too few layers."""
    blocks, least = len(problem.chain.parameter_bytes), least_stages(problem.spec)
    most = min(problem.cluster.devices, blocks // least) if problem.spec.chunks else int(least <= blocks)
    return least * most


def list_shapes(problem: PlanningProblem) -> list[ChunkShape]:
    """Return the shapes of the problem's schedule: every number of workers, each with every number of replicas.

    On more than 64 devices there are fewer: each worker has as many replicas as there are devices for, and the number
    of workers divides the devices or is the largest possible one.
    """
    total, found = problem.cluster.devices, []
    for workers in _worker_maps(problem):
        most = total // workers.workers
        counts = range(1, most + 1) if total <= _MOST_DEVICES else (most,)
        found += [ChunkShape(problem.schedule, workers, replicas) for replicas in counts]
    return found


def _worker_maps(problem: PlanningProblem) -> Iterator[WorkerMap]:
    """Yield the worker maps that the problem's schedule can have; one for a schedule given by its actions."""
    spec, total = problem.spec, problem.cluster.devices
    least, stages = least_stages(spec), most_stages(problem)
    most = stages // least  # workers, or 1 for the only map of a schedule given by its actions
    for count in range(1, most + 1):
        if total <= _MOST_DEVICES or total % count == 0 or count == most:
            with contextlib.suppress(ScheduleError):  # a number of workers that the policy is not for
                yield spec.worker_map(count * least)


def list_worker_placements(cluster: Cluster, workers: int, replicas: int) -> Sequence[WorkerDevices]:
    """Return the devices of each worker by each placement policy (DAPPLE, section IV.B).

    The policies take servers in each of ``server_orders``.
    """
    homes, found = cluster.homes, dict[WorkerDevices, WorkerDevices]()
    for order in server_orders(cluster):
        sizes = tuple(cluster.servers[server].devices for server in order)
        for policy in (append_first, scatter_first, fresh_first):  # placements on the same servers count once
            used, devices = (0,) * len(sizes), []
            for _ in range(workers):
                after = policy(used, sizes, replicas)
                devices.append(device_indices(cluster, Placement(used, after, 0), order))
                used = after
            servers = tuple(tuple(homes[device] for device in own) for own in devices)
            found.setdefault(servers, tuple(devices))
    return tuple(found.values())
