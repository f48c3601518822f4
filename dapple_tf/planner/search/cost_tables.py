"""The costs of a planning problem as arrays: seconds, bytes and transfers of every block of layers and placement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dapple_tf.planner.search.search_space import SearchSpace
from dapple_tf.simulator.arrays import Floats, Integers, prefix_sums
from dapple_tf.simulator.compiled import compiled
from dapple_tf.simulator.memory import usable_bytes, values_per_weight
from dapple_tf.simulator.transfer import LinkTables, ring_seconds


class CostTables(NamedTuple):
    """Arrays that the compiled search reads: N blocks, P placements, R replica counts, E transitions.

    A *transition* is a pair of placements that two consecutive stages can have. Seconds are those of one micro-batch;
    bytes are those of one micro-batch over all replicas of a stage. Arrays marked "sums" are prefix sums over blocks,
    so a stage costs the difference of two entries.
    """

    forward: Floats  # [R, N + 1] seconds, sums
    backward: Floats  # [R, N + 1] seconds, sums; re-computed forwards included
    weights: Floats  # [R, N + 1] seconds, sums: gradients of weights if the schedule runs them on their own, else 0
    least_remaining: Floats  # [N + 1] least device-seconds of the blocks from here on, gradients of weights excluded
    parameter_bytes: Floats  # [N + 1] sums
    trained: Integers  # [N + 1] sums: blocks with parameters
    stash_bytes: Floats  # [N + 1] sums
    working_bytes: Floats  # [N]
    boundary_bytes: Floats  # [N + 1] bytes that cross the cut before each block; 0 at both ends
    splittable: NDArray[np.bool_]  # [N + 1] whether stages of unequal replica counts can meet before each block
    replicas: Integers  # [P]
    seconds_row: Integers  # [P] the row of its replica count in forward, backward and weights
    allreduce_latency: Floats  # [P] seconds
    allreduce_seconds_per_byte: Floats  # [P]
    exposed: Floats  # [rows, N, N + 1] seconds of AllReduce after a stage's last gradients; of size 0 without overlap
    exposed_row: Integers  # [P]
    devices_left: Integers  # [P] devices unused after it
    first_transition: Integers  # [P + 2] where each placement's transitions begin; row P is the start of the pipeline
    next_placement: Integers  # [E]
    same_replicas: NDArray[np.bool_]  # [E] whether both placements have as many replicas
    rest_transition: Integers  # [P] the transition that gives all devices left to the next stage; -1 if none is left
    transfer_latency: Floats  # [E] seconds
    transfer_seconds_per_byte: Floats  # [E]
    server_offsets: Integers  # [P + 1] where the servers of each placement's devices begin
    servers: Integers
    links: LinkTables
    layer_gradients: Floats  # [R, L] seconds of each layer's gradients, for rings; of size 0 without overlap
    layer_parameter_bytes: Floats  # [L]
    positions: Integers  # [N + 1] the first layer of each block
    micro_batches: int
    micro_batch_size: int
    memory_bytes: float  # usable bytes of one device
    fixed_bytes_per_parameter_byte: float  # weights, gradients and optimizer slots
    recompute: bool


def make_cost_tables(
    space: SearchSpace,
    global_batch_size: int,
    micro_batch_size: int,
    *,
    optimizer_slots: int,
    recompute: bool,
    overlap: bool,
    splits_backward: bool = False,
) -> CostTables:
    """Return the tables of ``space`` for micro-batches of ``micro_batch_size`` samples.

    ``optimizer_slots``: values that the optimizer keeps of each weight. ``overlap``: AllReduce runs during the last
    backward. ``splits_backward``: the schedule runs gradients of weights as actions of their own.
    """
    chain, replicas = space.chain, space.replicas
    counts = np.unique(replicas)
    seconds = [chain.block_seconds(micro_batch_size / r) for r in counts]
    forward = np.array([f for f, _ in seconds])
    backward = np.array([b for _, b in seconds]) + (forward if recompute else 0)
    weights = np.array([chain.weights_seconds(micro_batch_size / r) for r in counts]) * splits_backward
    device_seconds = (counts[:, None] * (forward + backward - weights)).min(axis=0)
    row = np.searchsorted(counts, replicas)
    profile, slices = chain.profile, micro_batch_size / counts
    gradients = [profile.weights_seconds(n) if splits_backward else profile.backward_seconds(n) for n in slices]
    exposed, exposed_row = _exposed_tables(space, gradients, row, overlap)
    scale = micro_batch_size / chain.batch_size
    return CostTables(
        forward=prefix_sums(forward),
        backward=prefix_sums(backward),
        weights=prefix_sums(weights),
        least_remaining=np.append(np.cumsum(device_seconds[::-1])[::-1], 0.0),
        parameter_bytes=prefix_sums(chain.parameter_bytes),
        trained=np.concatenate([[0], np.cumsum(chain.parameter_bytes > 0)]),
        stash_bytes=prefix_sums(chain.stash_bytes) * scale,
        working_bytes=chain.working_bytes * scale,
        boundary_bytes=chain.boundary_bytes * scale,
        splittable=np.concatenate([[True], chain.splittable, [True]]),
        replicas=replicas,
        seconds_row=row,
        allreduce_latency=space.allreduce[:, 0].copy(),
        allreduce_seconds_per_byte=space.allreduce[:, 1].copy(),
        exposed=exposed,
        exposed_row=exposed_row,
        devices_left=space.devices_left,
        **space.transitions._asdict(),
        server_offsets=space.home_servers[0],
        servers=space.home_servers[1],
        links=space.links,
        layer_gradients=np.array(gradients, np.float64) if overlap else np.zeros((len(counts), 0)),
        layer_parameter_bytes=np.asarray(profile.parameter_bytes, np.float64),
        positions=np.array(chain.positions, np.int64),
        micro_batches=global_batch_size // micro_batch_size,
        micro_batch_size=micro_batch_size,
        memory_bytes=usable_bytes(space.cluster.least_memory),
        fixed_bytes_per_parameter_byte=values_per_weight(optimizer_slots),
        recompute=recompute,
    )


def _exposed_tables(
    space: SearchSpace, gradients: Sequence[Floats], seconds_row: Integers, overlap: bool
) -> tuple[Floats, Integers]:
    """Return ``exposed`` and ``exposed_row``: a row for each distinct replica count, AllReduce latency and speed.

    ``gradients``: seconds of each layer's, by replica count. As in ``simulator.costs`` the ring of
    each layer with parameters pays the latency.
    """
    if not overlap:
        return np.zeros((0, 0, 0)), np.zeros(len(seconds_row), np.int64)
    profile, positions = space.chain.profile, np.array(space.chain.positions)
    keys = list(zip(seconds_row.tolist(), *space.allreduce.T.tolist(), strict=True))
    rows = {key: index for index, key in enumerate(sorted(set(keys)))}
    blocks = len(positions) - 1
    exposed = np.zeros((len(rows), blocks, blocks + 1))
    for (count, latency, seconds_per_byte), index in rows.items():
        of_layers = [ring_seconds(latency, seconds_per_byte, amount) for amount in profile.parameter_bytes]
        _fill_exposed(exposed[index], gradients[count], np.array(of_layers), positions)
    return exposed, np.array([rows[key] for key in keys], np.int64)


@compiled
def _fill_exposed(exposed: Floats, gradients: Floats, allreduce: Floats, positions: Integers) -> None:
    """Fill in ``exposed_seconds`` (simulator.costs) of every run of blocks.

    Runs that end with the same block share their sums: each extends the one before by a block to the front.
    """
    for end in range(1, len(positions)):
        ready, done, layer = 0.0, 0.0, positions[end]
        for first in range(end - 1, -1, -1):
            while layer > positions[first]:
                layer -= 1
                ready += gradients[layer]
                done = max(done, ready) + allreduce[layer]
            exposed[first, end] = max(0.0, done - ready)
