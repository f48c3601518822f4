"""Call the C++ search by DAPPLE's formulas with the costs that it reads (DAPPLE, section IV.C).

``simulator/native/formula.h`` has the search, and describes its steps.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dapple_tf.errors import PlanError
from dapple_tf.planner.costs import ChainCosts, make_stages
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.planner.search.placement import device_indices
from dapple_tf.planner.search.search_space import SearchSpace
from dapple_tf.plans import StagePlan
from dapple_tf.simulator.arrays import Floats, Integers, prefix_sums
from dapple_tf.simulator.interrupts import check_stop, stop_flag
from dapple_tf.simulator.memory import values_per_weight
from dapple_tf.simulator.native.library import address, load_library
from dapple_tf.simulator.transfer import ring_seconds


class CostTables(NamedTuple):
    """Arrays that the search reads: N blocks, P placements, R replica counts, E transitions.

    A *transition* is a pair of placements that two consecutive stages can have. Seconds are those of one micro-batch;
    bytes are those of one micro-batch over all replicas of a stage. Arrays marked "sums" are prefix sums over blocks,
    so a stage costs the difference of two entries. The order of the fields is that of ``CostTables`` in C++.
    """

    micro_batches: int
    micro_batch_size: int
    memory_bytes: float  # usable bytes of one device
    fixed_bytes_per_parameter_byte: float  # weights and gradients; optimizer slots, where each replica has all
    shared_bytes_per_parameter_byte: float  # optimizer slots, where the replicas of a stage share them out
    recompute: bool
    overlap: bool
    forward: Floats  # [R, N + 1] seconds, sums
    backward: Floats  # [R, N + 1] seconds, sums; re-computed forwards included
    least_remaining: Floats  # [N + 1] least device-seconds of the blocks from here on
    parameter_bytes: Floats  # [N + 1] sums
    trained: Integers  # [N + 1] sums: blocks with parameters
    stash_bytes: Floats  # [N + 1] sums
    working_bytes: Floats  # [N]
    boundary_bytes: Floats  # [N + 1] bytes that cross the cut before each block; 0 at both ends
    splittable: NDArray[np.bool_]  # [N + 1] whether stages of unequal replica counts can meet before each block
    replicas: Integers  # [P]
    seconds_row: Integers  # [P] the row of its replica count in forward and backward
    allreduce_latency: Floats  # [P] seconds
    allreduce_seconds_per_byte: Floats  # [P]
    exposed: Floats  # [rows, N, N + 1] seconds of AllReduce after a stage's last gradients; of size 0 without overlap
    exposed_row: Integers  # [P]
    devices_left: Integers  # [P] devices that are still unused after the placement
    first_transition: Integers  # [P + 2] where each placement's transitions begin; row P is the start of the pipeline
    next_placement: Integers  # [E]
    same_replicas: NDArray[np.bool_]  # [E] whether both placements have as many replicas
    rest_transition: Integers  # [P] the transition that gives all devices left to the next stage; -1 if none is left
    transfer_latency: Floats  # [E] seconds
    transfer_seconds_per_byte: Floats  # [E]


_SCALARS: tuple[tuple[str, type[Any]], ...] = (
    ("blocks", ctypes.c_int32),
    ("placements", ctypes.c_int32),
    ("micro_batches", ctypes.c_int64),
    ("micro_batch_size", ctypes.c_int64),
    ("memory_bytes", ctypes.c_double),
    ("fixed_bytes_per_parameter_byte", ctypes.c_double),
    ("shared_bytes_per_parameter_byte", ctypes.c_double),
    ("recompute", ctypes.c_uint8),
    ("overlap", ctypes.c_uint8),
)


class _Tables(ctypes.Structure):
    """``CostTables`` of formula.h."""

    _fields_ = (*_SCALARS, *((name, ctypes.c_void_p) for name in CostTables._fields[len(_SCALARS) - 2 :]))


def make_cost_tables(problem: PlanningProblem, space: SearchSpace, micro_batch_size: int) -> CostTables:
    """Return the tables of ``space`` for micro-batches of ``micro_batch_size`` samples."""
    costs, replicas = ChainCosts(problem, space.chain, micro_batch_size), space.replicas
    splits = problem.schedule != "auto" and problem.spec.splits_backward
    counts = np.unique(replicas)
    slices = micro_batch_size / counts
    forward, backward = (np.array(rows) for rows in zip(*map(costs.block_seconds, slices), strict=True))
    weights = np.array([space.chain.weights_seconds(n) for n in slices]) * splits
    device_seconds = (counts[:, None] * (forward + backward - weights)).min(axis=0)
    row, profile = np.searchsorted(counts, replicas), space.chain.profile
    gradients = [profile.weights_seconds(n) if splits else profile.backward_seconds(n) for n in slices]
    exposed, exposed_row = _exposed_tables(space, np.array(gradients), row, problem.overlap)
    return CostTables(
        micro_batches=costs.micro_batches,
        micro_batch_size=micro_batch_size // problem.least_rows,
        memory_bytes=costs.memory_bytes,
        fixed_bytes_per_parameter_byte=values_per_weight(0 if problem.shard_optimizer else problem.optimizer_slots),
        shared_bytes_per_parameter_byte=problem.optimizer_slots * problem.shard_optimizer,
        recompute=bool(problem.recompute),
        overlap=problem.overlap,
        forward=prefix_sums(forward),
        backward=prefix_sums(backward),
        least_remaining=np.append(np.cumsum(device_seconds[::-1])[::-1], 0.0),
        parameter_bytes=costs.parameter_bytes,
        trained=np.concatenate([[0], np.cumsum(space.chain.parameter_bytes > 0)]),
        stash_bytes=costs.stash_bytes,
        working_bytes=costs.working_bytes,
        boundary_bytes=costs.boundary_bytes,
        splittable=costs.splittable,
        replicas=replicas,
        seconds_row=row,
        allreduce_latency=space.allreduce[:, 0],
        allreduce_seconds_per_byte=space.allreduce[:, 1],
        exposed=exposed,
        exposed_row=exposed_row,
        devices_left=space.devices_left,
        **space.transitions,
    )


def _exposed_tables(
    space: SearchSpace, gradients: Floats, seconds_row: Integers, overlap: bool
) -> tuple[Floats, Integers]:
    """Return ``exposed`` and ``exposed_row``: a row for each distinct replica count, AllReduce latency and speed.

    ``gradients``: seconds of each layer's gradients, by replica count. As in ``simulator.costs`` the ring of each layer
    with parameters pays the latency, and starts as soon as the layer's gradients exist.
    """
    if not overlap:
        return np.zeros((0, 0, 0)), np.zeros(len(seconds_row), np.int64)
    keys = list(zip(seconds_row.tolist(), *space.allreduce.T.tolist(), strict=True))
    rows = {key: index for index, key in enumerate(sorted(set(keys)))}
    parameters, positions = space.chain.profile.parameter_bytes, space.chain.positions
    rings = np.array(
        [[ring_seconds(latency, per_byte, amount) for amount in parameters] for _, latency, per_byte in rows]
    )
    backward, blocks = gradients[[count for count, _, _ in rows]], len(positions) - 1
    exposed = np.zeros((len(rows), blocks, blocks + 1))
    ready, done = np.zeros((len(rows), blocks + 1)), np.zeros((len(rows), blocks + 1))  # by the end of the stage
    for first in range(blocks - 1, -1, -1):
        later = np.s_[:, first + 1 :]
        for layer in range(positions[first + 1] - 1, positions[first] - 1, -1):
            ready[later] += backward[:, layer, None]
            done[later] = np.maximum(done[later], ready[later]) + rings[:, layer, None]
        exposed[:, first] = np.maximum(0.0, done - ready)
    return exposed, np.array([rows[key] for key in keys], np.int64)


@dataclass(frozen=True)
class FoundPlan:
    """A complete plan: the first block and the placement of each stage, and its score in seconds."""

    score: float
    starts: tuple[int, ...]
    placements: tuple[int, ...]


def make_found_stages(problem: PlanningProblem, space: SearchSpace, found: FoundPlan) -> tuple[StagePlan, ...]:
    """Return the stages of a plan found in ``space``, with layers and devices."""
    placements = (space.placements.items[placement] for placement in found.placements)
    devices = (device_indices(problem.cluster, placement, space.order) for placement in placements)
    return make_stages(space.chain, [*found.starts, len(space.chain.parameter_bytes)], devices)


def search_by_formula(
    tables: CostTables, *, ceiling: float = np.inf, width: int, results: int = 1, require_warm_up: bool = False
) -> tuple[FoundPlan, ...]:
    """Return plans on all devices with the least latency by formulas 1 to 3, below ``ceiling`` seconds.

    They are found by formulas 4 and 5 of DAPPLE. There are at most ``results`` plans, and each state has at most
    ``width`` labels. With ``require_warm_up`` only plans count whose stages can hold the warm-up of policy A, S - i
    micro-batches: with a smaller warm-up a pipeline does not run as the formulas say. Plans are sorted by latency, then
    by the number of stages, then by their first blocks. The C++ library must be there. Raises PlanError where memory is
    lacking.
    """
    library = load_library()
    assert library is not None, "the registry refuses planners that need it"
    kept = list[NDArray[Any]]()

    def field(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        kinds = {"b": np.uint8, "i": np.int64, "f": np.float64}
        kept.append(np.ascontiguousarray(value, kinds[value.dtype.kind]))
        return kept[-1].ctypes.data

    blocks = len(tables.working_bytes)
    given = _Tables(blocks, len(tables.replicas), *map(field, tables))
    latencies, stages = np.zeros(results), np.zeros(results, np.int32)
    starts, placements = (np.zeros((results, blocks), np.int32) for _ in range(2))
    count = library.dapple_formula_search(
        *(ctypes.byref(given), ctypes.c_int64(width), ctypes.c_double(ceiling), results, int(require_warm_up)),
        *map(address, (latencies, stages, starts, placements, stop_flag())),
    )
    check_stop()
    if count < 0:
        raise PlanError(
            "searching by DAPPLE's formulas needs more memory than this process can have: free memory, or take planner "
            "'best'"
        )
    order = np.lexsort((*starts[:count].T[::-1], stages[:count], latencies[:count]))
    found = zip(latencies[order].tolist(), stages[order].tolist(), starts[order], placements[order], strict=True)
    return tuple(FoundPlan(score, tuple(own[:s].tolist()), tuple(at[:s].tolist())) for score, s, own, at in found)
