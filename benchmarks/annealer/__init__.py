"""A planner of its own to challenge "best" with: simulated annealing in C++, compiled when it is first needed.

It shares no code with the planners or the simulator, and searches more: whole rows or fractions of rows, K_i of each
stage, interleaved stages on unequal workers, re-computation of single stages, unequal devices. A layout's step takes
microseconds, with contention tens of microseconds.
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.plans import Plan, StagePlan
from dapple_tf.simulator.memory import usable_bytes
from dapple_tf.simulator.transfer import link_tables
from profiler.profile import Profile

_FOLDER = Path(__file__).parent
_BUILT = _FOLDER.parents[1] / "out"
_ANY_WARM_UP = -1
_POINTER = ctypes.c_void_p
_INTEGERS = ("blocks", "layers", "kinds", "segments", "devices", "servers", "sizes")
_ARRAYS = (
    *("breaks", "forward_a", "forward_b", "backward_a", "backward_b", "parameters", "stash", "working", "boundary"),
    *("splittable", "layer_backward_a", "layer_backward_b", "layer_parameters", "positions", "kind", "server"),
    *("memory", "inside", "inside_latency"),
)
_FLAGS = ("overlap", "contention", "whole_rows", "may_recompute", "own_links")


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
        *((name, ctypes.c_uint8) for name in _FLAGS),
        ("slope", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Annealer:
    """The tables of a problem. ``chunks``: the most stages of a worker, a power of 2."""

    problem: PlanningProblem
    tables: Any
    work: NDArray[np.float64]
    speeds: NDArray[np.float64]
    sizes: NDArray[np.int64]
    positions: NDArray[np.int32]
    arrays: tuple[NDArray[Any], ...]
    chunks: int

    @staticmethod
    def of(
        problem: PlanningProblem,
        *,
        chunks: int = 4,
        whole_rows: bool = False,
        may_recompute: bool = True,
        slope: int = _ANY_WARM_UP,
    ) -> Annealer:
        """Return the tables. ``slope``: K_i = slope (S - 1 - i) + 1 where memory allows it; -1: searched too."""
        cluster, chain, profile = problem.cluster, problem.chain, problem.profile
        kinds = list(dict.fromkeys(cluster.device_kinds))
        profiles = [profile.of_kind(kind, cluster.kind_speed(kind)) for kind in kinds]
        positions = np.array(chain.positions, np.int32)
        blocks = len(chain.parameter_bytes)

        def by_block(rows: NDArray[np.float64]) -> NDArray[np.float64]:
            return _sums(np.add.reduceat(rows, positions[:blocks], axis=-1))

        lines = [{field: _lines(own, field) for field in ("forward", "backward")} for own in profiles]
        forward, backward = ([of_kind[field] for of_kind in lines] for field in ("forward", "backward"))
        links = link_tables(cluster)
        sizes = np.array(problem.micro_batch_sizes, np.int64)
        kept: list[NDArray[Any]] = []

        def array(values: Any, dtype: Any = np.float64) -> int:
            kept.append(np.ascontiguousarray(values, dtype))
            return int(kept[-1].ctypes.data)

        measured = profile.measured_sizes
        tables = _Problem(
            *(blocks, len(profile.layers), len(kinds), len(forward[0][0]), cluster.devices, len(cluster.servers)),
            len(sizes),
            array(measured if len(measured) > 1 else ()),
            *(array([by_block(each[part]) for each in of]) for of in (forward, backward) for part in (0, 1)),
            array(_sums(chain.parameter_bytes)),
            array(_sums(chain.stash_bytes)),
            array(chain.working_bytes),
            array([0.0, *chain.crossing_bytes, 0.0]),
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
            2.0 + problem.optimizer_slots,
            *(problem.overlap, problem.contention, whole_rows, may_recompute, links.has_own),
            slope,
        )
        both = [own.forward_seconds(own.batch_size) + own.backward_seconds(own.batch_size) for own in profiles]
        speeds = np.array([both[0].sum() / max(own.sum(), 1e-300) for own in both])
        return Annealer(problem, tables, by_block(both[0]), speeds, sizes, positions[:blocks], tuple(kept), chunks)

    def search(self, amount: int, *, seed: int = 1, threads: int = 2) -> Plan | None:
        """Return the fastest plan found with this ``amount`` of work (10^7 takes about 0.1 s); None if none fits."""
        devices, width = self.problem.cluster.devices, self._width
        shape, rows = np.zeros(4, np.int32), np.zeros(devices, np.int64)
        starts, in_flight = np.zeros(width, np.int32), np.zeros(width, np.int32)
        owner, order = np.zeros(devices, np.int32), np.zeros(devices, np.int32)
        recompute, seconds, stop = np.zeros(width, np.uint8), np.zeros(1), np.zeros(1, np.uint8)
        results = (shape, starts, owner, order, recompute, in_flight, rows, seconds)
        library().annealer_search(
            *(ctypes.byref(self.tables), self.work.ctypes.data_as(_POINTER), self.speeds.ctypes.data_as(_POINTER)),
            *(self.chunks, threads, ctypes.c_int64(amount), ctypes.c_uint64(seed), 1, width),
            *(each.ctypes.data_as(_POINTER) for each in (*results, stop)),
        )
        if not seconds[0] < 1e12:
            return None
        size, workers, chunks, _ = shape.tolist()
        sets = [[d for w, d in zip(owner.tolist(), order.tolist(), strict=True) if w == own] for own in range(workers)]
        stages = workers * chunks
        schedule = f"interleaved-1f1b:v={chunks}" if chunks > 1 else _name(in_flight[:stages].tolist())
        return self._plan(int(self.sizes[size]), starts[: stages + 1], sets, rows, schedule, recompute[:stages])

    def step_seconds(self, plan: Plan) -> float:
        """Return the step of a plan of one stage per device, K_i by the slope; 10^12 and more if it does not fit."""
        devices = self.problem.cluster.devices
        used = [device for stage in plan.stages for device in stage.devices]
        order = np.array([*used, *(d for d in range(devices) if d not in set(used))], np.int32)
        owner = np.full(devices, -1, np.int32)
        owner[: len(used)] = [s for s, stage in enumerate(plan.stages) for _ in stage.devices]
        starts = np.zeros(self._width, np.int32)
        blocks = [*np.searchsorted(self.positions, [stage.first_layer for stage in plan.stages]), len(self.positions)]
        starts[: len(blocks)] = blocks
        recompute = np.zeros(self._width, np.uint8)
        for index in range(len(plan.stages)):
            recompute[index] = bool(plan.runs(index))
        shape = np.array([np.searchsorted(self.sizes, plan.micro_batch_size), len(plan.stages), 1, 2], np.int32)
        step = library().annealer_step
        step.restype = ctypes.c_double
        arrays = (shape, starts, owner, order, recompute, np.zeros(self._width, np.int32))
        return float(step(ctypes.byref(self.tables), self._width, *(a.ctypes.data_as(_POINTER) for a in arrays)))

    @property
    def _width(self) -> int:
        return min(len(self.positions), self.problem.cluster.devices * self.chunks) + 1

    def _plan(
        self,
        size: int,
        starts: NDArray[np.int32],
        sets: Sequence[Sequence[int]],
        rows: NDArray[np.int64],
        schedule: str,
        recompute: NDArray[np.uint8],
    ) -> Plan:
        bounds = [*(int(self.positions[block]) for block in starts[:-1]), len(self.problem.profile.layers)]
        stages = []
        for index, (first, end) in enumerate(itertools.pairwise(bounds)):
            own = [device for device in sets[index % len(sets)] if rows[device]]
            kinds = {self.problem.cluster.kind_of(device) for device in own}
            shares = tuple(float(rows[device]) for device in own)
            unequal = len(kinds) > 1 and len(set(shares)) > 1
            stages.append(StagePlan(first, end - 1, tuple(own), shares if unequal else None))
        again = [layer for s, stage in enumerate(stages) if recompute[s] for layer in range(bounds[s], bounds[s + 1])]
        whole = len(again) == len(self.problem.profile.layers)
        return self.problem.make_plan(stages, size, schedule, "challenger", whole or tuple(again) or False)


@cache
def library() -> ctypes.CDLL:
    """Return the compiled annealer; compiling takes about 10 seconds, once for each change of its sources."""
    sources = [*_FOLDER.glob("*.h"), _FOLDER / "planner.cc"]
    built = _BUILT / "annealer.so"
    if not built.exists() or built.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        _BUILT.mkdir(parents=True, exist_ok=True)
        options = ("-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
        subprocess.run(["g++", *options, str(_FOLDER / "planner.cc"), "-o", str(built)], check=True)
    return ctypes.CDLL(str(built))


def _name(warm_up: list[int]) -> str:
    """Return the schedule of these K_i."""
    stages = len(warm_up)
    if warm_up == list(range(stages, 0, -1)):
        return "dapple-a"
    return "K=" + ",".join(map(str, warm_up))


def _lines(profile: Profile, direction: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a and b of each segment and layer: seconds of n rows are a + b n between two measured batch sizes."""
    sizes = profile.measured_sizes
    seconds = [getattr(profile, f"{direction}_seconds")(size) for size in sizes]
    if len(sizes) == 1:
        return np.zeros((1, len(seconds[0]))), np.array([seconds[0] / sizes[0]])
    slopes = [(b - a) / (n - m) for (m, a), (n, b) in itertools.pairwise(zip(sizes, seconds, strict=True))]
    falls = slopes[0] * sizes[0] <= seconds[0]  # else the line would be below 0 for no rows: through the origin
    below = np.where(falls, slopes[0], seconds[0] / sizes[0])
    every = [below, *slopes, slopes[-1]]
    through = [(sizes[0], seconds[0]), *zip(sizes, seconds, strict=True)]
    return np.array([y - slope * n for (n, y), slope in zip(through, every, strict=True)]), np.array(every)


def _sums(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([np.zeros((*rows.shape[:-1], 1)), np.cumsum(rows, axis=-1)], axis=-1)
