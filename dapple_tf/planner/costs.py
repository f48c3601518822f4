"""Costs of all stages that the blocks of a chain can form: seconds on each kind of device, and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.plans import StagePlan
from dapple_tf.profiler.linearise import Chain
from dapple_tf.profiler.profile import profile_on
from dapple_tf.simulator.arrays import Floats, Integers, prefix_sums, runs
from dapple_tf.timeline.stage_costs import usable_bytes


@dataclass(frozen=True, eq=False)
class ChainCosts:
    """Costs of a chain of N blocks of a problem's model, for micro-batches of ``size`` samples.

    Arrays [N + 1] marked "sums" hold the sums over the first 0, 1 ... N blocks. In arrays [N, N + 1] the entry i, j is
    for a stage of the blocks i to j (exclusive); entries with j <= i have no meaning. Bytes are those of a whole
    micro-batch.
    """

    problem: PlanningProblem
    chain: Chain
    size: int
    _known: dict[tuple[str | None, float], tuple[Floats, Floats]] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        """N."""
        return len(self.chain.parameter_bytes)

    @property
    def micro_batches(self) -> int:
        """M, the number of micro-batches of a step."""
        return self.problem.global_batch_size // self.size

    @property
    def memory_bytes(self) -> float:
        """The usable bytes of the device with least memory."""
        return usable_bytes(self.problem.cluster.least_memory)

    @cached_property
    def parameter_bytes(self) -> Floats:
        """Bytes of parameters, sums."""
        return prefix_sums(self.chain.parameter_bytes)

    @cached_property
    def stash_bytes(self) -> Floats:
        """Bytes that backward keeps, sums."""
        return prefix_sums(self.chain.stash_bytes) * self._scale

    @cached_property
    def working_bytes(self) -> Floats:
        """Bytes of each block's largest working set of a layer, [N]."""
        return self.chain.working_bytes * self._scale

    @cached_property
    def boundary_bytes(self) -> Floats:
        """Bytes that cross the cut before each block, and the one after the last block, [N + 1]; 0 at both ends."""
        return self.chain.boundary_bytes * self._scale

    @cached_property
    def splittable(self) -> NDArray[np.bool_]:
        """Whether stages with different replica counts can meet at each cut, [N + 1]."""
        return np.concatenate([[True], self.chain.splittable, [True]])

    def block_seconds(self, samples: float, device: int = 0) -> tuple[Floats, Floats]:
        """Return the forward and backward seconds [N] of ``samples`` samples on a device.

        Backward includes the forward where it is re-computed.
        """
        profile = profile_on(self.problem.profile, self.problem.cluster, device)
        forward, backward = replace(self.chain, profile=profile).block_seconds(samples)
        return forward, backward + forward if self.problem.recompute else backward

    def second_sums(self, samples: float, device: int = 0) -> tuple[Floats, Floats]:
        """Return the forward and backward seconds of ``samples`` samples on a device, sums. Do not write to them."""
        key = self.problem.cluster.kind_of(device), samples
        if key not in self._known:
            forward, backward = self.block_seconds(samples, device)
            self._known[key] = prefix_sums(forward), prefix_sums(backward)
        return self._known[key]

    @cached_property
    def parameter_runs(self) -> Floats:
        """Bytes of parameters, [N, N + 1]."""
        return runs(self.parameter_bytes)

    @cached_property
    def fixed_bytes(self) -> Floats:
        """Bytes of weights, gradients and optimizer slots, [N, N + 1]."""
        return self.parameter_runs * self.problem.values_per_weight

    @cached_property
    def _kept(self) -> tuple[Floats, Floats]:
        """The stash and the largest working set, [N, N + 1]."""
        working = np.broadcast_to(self.working_bytes, (self.blocks, self.blocks))
        largest = np.maximum.accumulate(np.triu(working), axis=1)
        return runs(self.stash_bytes), np.concatenate([np.zeros((self.blocks, 1)), largest], axis=1)

    def held_bytes(self, share: float | Floats, *, recompute: bool | None = None) -> tuple[Floats, Floats]:
        """Return the bytes [N, N + 1] that a device of a stage always holds, and those of each micro-batch in flight.

        ``share``: the part of each micro-batch that the device computes. ``recompute``: whether only inputs are
        stashed; None takes the problem's own setting.
        """
        stash, working = self._kept
        if self.problem.recompute if recompute is None else recompute:
            return self.fixed_bytes + (working + stash) * share, self.boundary_bytes[:-1, None] * share
        return self.fixed_bytes + working * share, stash * share

    def needed_bytes(
        self, held: float | Integers, share: float | Floats = 1.0, *, recompute: bool | None = None
    ) -> Floats:
        """Return the bytes [N, N + 1] that a device of a stage holds with ``held`` micro-batches in flight.

        The other arguments are as in ``held_bytes``.
        """
        always, each = self.held_bytes(share, recompute=recompute)
        return always + held * each

    @property
    def _scale(self) -> float:
        return self.size / self.chain.batch_size


def make_stages(chain: Chain, bounds: Sequence[int], devices: Iterable[Iterable[int]]) -> tuple[StagePlan, ...]:
    """Return stages on these ``devices``; ``bounds``: the first block of each stage, and the number of blocks."""
    layers = [chain.positions[bound] for bound in bounds]
    return tuple(
        StagePlan(first, end - 1, tuple(own)) for (first, end), own in zip(pairwise(layers), devices, strict=True)
    )
