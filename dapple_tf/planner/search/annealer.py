"""Search for layouts by simulated annealing in C++ (``simulator/native``), which simulates a layout in microseconds.

A layout is the part of a plan that the search changes: cuts, the devices of each stage (or of each worker of
interleaved stages), K_i of each stage, the stages that are re-computed, and the micro-batch size. K_i may be any
numbers that memory allows and that do not grow from a stage to the next one. A move may change several of these at
once.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dapple_tf.errors import PlanError
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.planner.systems.device_order import list_devices
from dapple_tf.plans import Plan, StagePlan
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.detect import count_cores
from dapple_tf.profiler.profile import Profile
from dapple_tf.simulator.arrays import prefix_sums
from dapple_tf.simulator.interrupts import check_stop, stop_flag
from dapple_tf.simulator.memory import values_per_weight
from dapple_tf.simulator.native.library import address, load_library
from dapple_tf.simulator.transfer import link_tables
from dapple_tf.timeline.stage_costs import usable_bytes
from dapple_tf.wording import format_count

ANY_WARM_UP = -1
_UNFIT = 1e12  # the search gives a layout that does not fit the memory at least these seconds
_MOST_THREADS = 8
_RESULTS = 6
_POINTER = ctypes.c_void_p
_INTEGERS = ("blocks", "layers", "kinds", "segments", "devices", "servers", "sizes")
_ARRAYS = (
    *("breaks", "forward_a", "forward_b", "backward_a", "backward_b", "parameters", "stash", "working", "boundary"),
    *("splittable", "layer_backward_a", "layer_backward_b", "layer_parameters", "positions", "kind", "server"),
    *("memory", "inside", "inside_latency"),
)
_FLAGS = ("overlap", "contention", "whole_rows", "recompute_all", "may_recompute", "own_links")


class _Problem(ctypes.Structure):
    """``Problem`` of costs.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in _INTEGERS),
        *((name, _POINTER) for name in _ARRAYS),
        ("interface", ctypes.c_double),
        ("interface_latency", ctypes.c_double),
        *((name, _POINTER) for name in ("own", "own_latency", "size", "micro_batches")),
        ("batch", ctypes.c_double),
        ("fixed_factor", ctypes.c_double),
        ("shared_factor", ctypes.c_double),
        *((name, ctypes.c_uint8) for name in _FLAGS),
        *((name, ctypes.c_int32) for name in ("slope", "workers", "least_rows", "most_chunks")),
        ("may_have", _POINTER),
    )


@dataclass(frozen=True)
class Layout:
    """Stages that the search found, with the schedule, the re-computed layers, and the ``seconds`` of their step."""

    stages: tuple[StagePlan, ...]
    micro_batch_size: int
    schedule: str
    recompute: bool | tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Annealer:
    """A planning problem as the arrays that the C++ search reads."""

    problem: PlanningProblem
    tables: _Problem
    work: NDArray[np.float64]
    speeds: NDArray[np.float64]
    sizes: NDArray[np.int64]
    positions: NDArray[np.int32]
    arrays: tuple[NDArray[Any], ...]
    devices: tuple[int, ...]
    library: ctypes.CDLL

    @staticmethod
    def of(
        problem: PlanningProblem,
        *,
        chunks: Sequence[int] = (),
        stages: int | None = None,
        may_recompute: bool = True,
        slope: int = ANY_WARM_UP,
    ) -> Annealer | None:
        """Return the arrays of a problem; None where there is no compiled library.

        ``chunks``: the numbers of stages that a device may run, in addition to one. ``stages``: the number of stages of
        all layouts; None for any number. ``slope``: K_i is slope (S - 1 - i) + 1 where memory allows it; with
        ANY_WARM_UP the search chooses K_i too.
        """
        library = load_library()
        if library is None:
            return None
        chain, profile, servers = problem.chain, problem.profile, problem.cluster.servers
        # Reason: servers are sorted by size so that the plan does not depend on the order in which they are given.
        order = sorted(range(len(servers)), key=lambda server: -servers[server].devices)
        cluster = replace(problem.cluster, servers=tuple(servers[server] for server in order))
        kinds = list(dict.fromkeys(cluster.device_kinds))
        profiles = [profile.of_kind(kind, cluster.kind_speed(kind)) for kind in kinds]
        positions = np.array(chain.positions, np.int32)
        blocks = len(chain.parameter_bytes)

        def by_block(rows: NDArray[np.float64]) -> NDArray[np.float64]:
            return prefix_sums(np.add.reduceat(rows, positions[:blocks], axis=-1))

        lines = [{field: _lines(own, field) for field in ("forward", "backward")} for own in profiles]
        forward, backward = ([of_kind[field] for of_kind in lines] for field in ("forward", "backward"))
        links = link_tables(cluster)
        sizes = np.array(problem.micro_batch_sizes, np.int64)
        kept: list[NDArray[Any]] = []

        def array(values: Any, dtype: Any = np.float64) -> int:
            kept.append(np.ascontiguousarray(values, dtype))
            return int(kept[-1].ctypes.data)

        measured = profile.measured_sizes
        allowed = {1, *(number for number in chunks if number <= blocks)}
        may_have = [number in allowed for number in range(max(allowed) + 1)]
        tables = _Problem(
            *(blocks, len(profile.layers), len(kinds), len(forward[0][0]), cluster.devices, len(cluster.servers)),
            len(sizes),
            array(measured if len(measured) > 1 else ()),
            *(array([by_block(each[part]) for each in of]) for of in (forward, backward) for part in (0, 1)),
            array(prefix_sums(chain.parameter_bytes)),
            array(prefix_sums(chain.stash_bytes)),
            array(chain.working_bytes),
            array(chain.boundary_bytes),
            array([True, *chain.splittable, True], np.uint8),
            *(array([each[part] for each in backward]) for part in (0, 1)),
            array(profile.parameter_bytes),
            array([*positions[:blocks], len(profile.layers)], np.int32),
            array([kinds.index(kind) for kind in cluster.device_kinds], np.int32),
            array(cluster.homes, np.int32),
            array([usable_bytes(cluster.memory_of(cluster.device_kinds.index(kind))) for kind in kinds]),
            array(links.inside),
            array(links.inside_latency),
            links.interface,
            links.interface_latency,
            array(links.own),
            array(links.own_latency),
            array(sizes, np.int64),
            array(problem.global_batch_size // sizes, np.int64),
            float(profile.batch_size),
            values_per_weight(0 if problem.shard_optimizer else problem.optimizer_slots),
            float(problem.optimizer_slots * problem.shard_optimizer),
            *(problem.overlap, problem.contention, problem.whole_rows, bool(problem.recompute)),
            *(may_recompute and not problem.recompute, links.has_own),
            *(slope, stages or 0, problem.least_rows, len(may_have) - 1),
            array(may_have, np.uint8),
        )
        both = [
            (own.forward_seconds(own.batch_size) + own.backward_seconds(own.batch_size)) / own.batch_size
            for own in profiles
        ]
        speeds = np.array([both[0].sum() / max(own.sum(), 1e-300) for own in both])
        return Annealer(
            problem,
            tables,
            by_block(both[0]),
            speeds,
            sizes,
            positions[:blocks],
            tuple(kept),
            list_devices(problem.cluster, order),
            library,
        )

    def search(self, work: int, seed: int = 1, searches: int = 1) -> list[Layout]:
        """Return the fastest layouts found, by rising seconds; none if nothing fits.

        ``work``: the work of each of the ``searches``; 10^8 takes about a second on one core. The searches have
        different random numbers. As long as the last of several searches has found a faster layout, a longer one
        follows. The result depends on these arguments and on ``seed``, not on the number of threads. Raises PlanError
        where memory is lacking.
        """
        devices, width, most = self.problem.cluster.devices, self._width, _RESULTS
        shape, rows = np.zeros((most, 3), np.int32), np.zeros((most, devices), np.int64)
        starts, in_flight = (np.zeros((most, width), np.int32) for _ in range(2))
        owner, order = (np.zeros((most, devices), np.int32) for _ in range(2))
        recompute, seconds, stop = np.zeros((most, width), np.uint8), np.zeros(most), stop_flag()
        results = (shape, starts, owner, order, recompute, in_flight, rows, seconds)
        count = self.library.dapple_search(
            *(ctypes.byref(self.tables), address(self.work), address(self.speeds)),
            *(min(count_cores(), _MOST_THREADS), ctypes.c_int64(work), ctypes.c_uint64(seed)),
            *(searches, most, width),
            *map(address, (*results, stop)),
        )
        check_stop()
        if count < 0:
            raise PlanError(
                f"searching for a plan of {self.problem.profile.model!r} on {format_count(devices, 'device')} needs "
                "more memory than this process can have: free memory, or take planner 'dapple'"
            )
        return [self._layout(*(each[row] for each in results)) for row in range(count) if seconds[row] < _UNFIT]

    def step_seconds(self, plan: Plan) -> float:
        """Return the step (seconds) of a plan of one stage per device, K_i by the slope; 10^12 or more if unfit."""
        devices = self.problem.cluster.devices
        used = [self.devices.index(device) for stage in plan.stages for device in stage.devices]
        order = np.array([*used, *(d for d in range(devices) if d not in set(used))], np.int32)
        owner = np.full(devices, -1, np.int32)
        owner[: len(used)] = [s for s, stage in enumerate(plan.stages) for _ in stage.devices]
        starts = np.zeros(self._width, np.int32)
        blocks = [*np.searchsorted(self.positions, [stage.first_layer for stage in plan.stages]), len(self.positions)]
        starts[: len(blocks)] = blocks
        recompute = np.zeros(self._width, np.uint8)
        for index in range(len(plan.stages)):
            recompute[index] = bool(plan.runs(index))
        shape = np.array([np.searchsorted(self.sizes, plan.micro_batch_size), len(plan.stages), 1], np.int32)
        step = self.library.dapple_step
        step.restype = ctypes.c_double
        arrays = (shape, starts, owner, order, recompute, np.zeros(self._width, np.int32))
        return float(step(ctypes.byref(self.tables), self._width, *map(address, arrays)))

    @property
    def _width(self) -> int:
        return min(len(self.positions), self.problem.cluster.devices * int(self.tables.most_chunks)) + 1

    def _layout(
        self,
        shape: NDArray[np.int32],
        starts: NDArray[np.int32],
        owner: NDArray[np.int32],
        order: NDArray[np.int32],
        recompute: NDArray[np.uint8],
        in_flight: NDArray[np.int32],
        rows: NDArray[np.int64],
        seconds: float,
    ) -> Layout:
        size, workers, chunks = shape.tolist()
        of_workers: list[list[int]] = [[] for _ in range(workers)]
        for worker, device in zip(owner.tolist(), order.tolist(), strict=True):
            if worker >= 0 and rows[device]:
                of_workers[worker].append(device)  # its index in ``self.devices``
        named = _name_in_order([self.devices[d] for own in of_workers for d in own], self.problem.cluster)
        count, samples = workers * chunks, int(self.sizes[size])
        bounds = [*(int(self.positions[block]) for block in starts[:count]), len(self.problem.profile.layers)]
        stages = []
        for index, (first, end) in enumerate(itertools.pairwise(bounds)):
            own = tuple(named[self.devices[d]] for d in of_workers[index % workers])
            shares = [rows[d] for d in of_workers[index % workers]]
            kinds = {self.problem.cluster.kind_of(device) for device in own}
            unequal = len(kinds) > 1 and len(set(shares)) > 1
            stages.append(StagePlan(first, end - 1, own, tuple(map(float, shares)) if unequal else None))
        again = [layer for s in range(count) if recompute[s] for layer in range(bounds[s], bounds[s + 1])]
        whole = len(again) == len(self.problem.profile.layers)
        schedule = f"interleaved-1f1b:v={chunks}"
        if chunks == 1:
            schedule = _name(in_flight[:count].tolist(), self.problem.global_batch_size // samples)
        return Layout(tuple(stages), samples, schedule, whole or tuple(again) or False, float(seconds))


def _name_in_order(devices: Sequence[int], cluster: Cluster) -> dict[int, int]:
    """Return for each of these devices an equal one to use instead, so that a plan uses equal devices in order.

    To the search equal devices are the same, and so are equal servers, so it may use any of them first. If some pair of
    servers has its own link, no device is replaced.
    """
    if cluster.links:
        return dict(zip(devices, devices, strict=True))
    homes, kinds = cluster.homes, cluster.device_kinds
    kinds_of: list[tuple[str | None, ...]] = [() for _ in cluster.servers]
    unnamed = defaultdict[tuple[int, str | None], deque[int]](deque)  # devices by server and kind
    for device, (home, kind) in enumerate(zip(homes, kinds, strict=True)):
        kinds_of[home] += (kind,)
        unnamed[home, kind].append(device)
    alike = defaultdict[tuple[str | None, ...], deque[int]](deque)  # servers by the kinds of their devices
    for server, own in enumerate(kinds_of):
        alike[own].append(server)
    server_for, named = dict[int, int](), dict[int, int]()
    for device in devices:
        home = homes[device]
        if home not in server_for:
            server_for[home] = alike[kinds_of[home]].popleft()
        named[device] = unnamed[server_for[home], kinds[device]].popleft()
    return named


def _name(warm_up: Sequence[int], micro_batches: int) -> str:
    """Return the name of the schedule with these K_i: the name of a policy that has them, or a list of K_i."""
    for policy in ("dapple-a", "dapple-b"):
        if ScheduleSpec.parse(policy).warm_up(len(warm_up), micro_batches) == tuple(warm_up):
            return policy
    return "K=" + ",".join(map(str, warm_up))


def _lines(profile: Profile, direction: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a and b of each segment and layer: seconds of n rows are a + b n between two measured batch sizes."""
    sizes = profile.measured_sizes
    seconds = [getattr(profile, f"{direction}_seconds")(size) for size in sizes]
    if len(sizes) == 1:
        return np.zeros((1, len(seconds[0]))), np.array([seconds[0] / sizes[0]])
    slopes = [(b - a) / (n - m) for (m, a), (n, b) in itertools.pairwise(zip(sizes, seconds, strict=True))]
    falls = slopes[0] * sizes[0] <= seconds[0]  # else the line would be negative near 0 rows, so it goes through 0
    below = np.where(falls, slopes[0], seconds[0] / sizes[0])
    every = [below, *slopes, slopes[-1]]
    through = [(sizes[0], seconds[0]), *zip(sizes, seconds, strict=True)]
    return np.array([y - slope * n for (n, y), slope in zip(through, every, strict=True)]), np.array(every)
