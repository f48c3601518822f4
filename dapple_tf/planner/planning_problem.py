"""What a planner is asked, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dapple_tf.errors import PlanError
from dapple_tf.plan import Plan, StagePlan
from dapple_tf.planner.cost_tables import Space, Tables, tables
from dapple_tf.planner.placement import device_numbers
from dapple_tf.planner.pricing import price, rows_of
from dapple_tf.planner.search import Found
from dapple_tf.planner.search_space import find_spaces
from dapple_tf.simulator.costs import stage_costs
from dapple_tf.simulator.memory import usable_bytes
from graph_passes.schedules.policies import splits_backward
from profiler.cluster import Cluster
from profiler.linearise import Chain, linearise
from profiler.profile import Profile

_MOST_MICRO_BATCHES = 16384  # more take long to simulate, and hide no bubble that fewer do not


@dataclass(frozen=True)
class Task:
    """Plan ``profile`` on ``cluster`` for a global batch (samples), with any of these micro-batch sizes (ascending).

    ``schedule`` is a name, or "auto" for the best policy. ``optimizer_slots``: values the optimizer keeps of each
    weight. ``recompute``: as in ``Plan``, but what is searched has all layers re-computed or none. ``overlap``:
    AllReduce during the last backward.
    """

    profile: Profile
    cluster: Cluster
    global_batch_size: int
    micro_batch_sizes: tuple[int, ...]
    schedule: str = "auto"
    recompute: bool | tuple[int, ...] = False
    optimizer_slots: int = 2
    overlap: bool = False

    @cached_property
    def chain(self) -> Chain:
        """The profile's blocks."""
        return linearise(self.profile)

    @cached_property
    def spaces(self) -> tuple[Space, ...]:
        """What is searched; one space where it is everything."""
        return find_spaces(self.chain, self.cluster)

    def tables(self, space: Space, micro_batch_size: int) -> Tables:
        """The search's tables for one micro-batch size."""
        return tables(
            space,
            self.global_batch_size,
            micro_batch_size,
            optimizer_slots=self.optimizer_slots,
            recompute=bool(self.recompute),
            overlap=self.overlap,
            splits=splits_backward(self.schedule),
        )

    def stages(self, space: Space, found: Found) -> tuple[StagePlan, ...]:
        """The stages of a plan that the search of ``space`` found."""
        positions = space.chain.positions
        bounds = [positions[start] for start in found.starts] + [len(self.profile.layers)]
        return tuple(
            StagePlan(first, end - 1, device_numbers(self.cluster, space.placements.items[place], space.order))
            for first, end, place in zip(bounds, bounds[1:], found.placements, strict=False)
        )

    def plan(self, stages: Sequence[StagePlan], micro_batch_size: int, schedule: str, planner: str) -> Plan:
        """A plan of these stages for this task."""
        return Plan(
            model=self.profile.model,
            planner=planner,
            global_batch_size=self.global_batch_size,
            micro_batch_size=micro_batch_size,
            micro_batches=self.global_batch_size // micro_batch_size,
            schedule=schedule,
            recompute=self.recompute,
            stages=tuple(stages),
            overlap=self.overlap,
        )

    def price(self, stages: Sequence[StagePlan], micro_batch_size: int, origin: str) -> Candidate | None:
        """These stages under the best schedule allowed, by the simulator; None where they do not fit."""
        if max(stage.replicas for stage in stages) > micro_batch_size:
            return None
        plan = self.plan(stages, micro_batch_size, "dapple-a" if self.schedule == "auto" else self.schedule, origin)
        rows = rows_of(stage_costs(plan, self.profile, self.cluster, optimizer_slots=self.optimizer_slots))
        found = price(rows, plan.micro_batches, usable_bytes(self.cluster.device_memory), self.schedule)
        if found.seconds == float("inf"):
            return None
        return Candidate(tuple(stages), micro_batch_size, found.schedule, found.seconds, origin)

    def price_all(self, stages: Sequence[StagePlan], origin: str) -> list[Candidate]:
        """``price`` at every micro-batch size at which the stages fit."""
        found = [self.price(stages, size, origin) for size in self.micro_batch_sizes]
        return [candidate for candidate in found if candidate is not None]


@dataclass(frozen=True)
class Candidate:
    """Stages under a schedule, and what the simulator says of them; ``origin``: where they came from."""

    stages: tuple[StagePlan, ...]
    micro_batch_size: int
    schedule: str
    seconds: float
    origin: str


@dataclass(frozen=True)
class Decision:
    """What a planner chose, and the best of each other origin, by seconds.

    ``proven``: no plan of the search space is faster. ``latency``: formula 2's seconds, where the planner went by it.
    """

    chosen: Candidate
    others: tuple[Candidate, ...] = ()
    proven: bool = False
    latency: float | None = None


def micro_batch_sizes(global_batch_size: int, wanted: int | None) -> tuple[int, ...]:
    """The sizes that divide the global batch into at most 16384 micro-batches, or the one wanted.

    Raises PlanError for sizes below 1, or one that does not divide the batch.
    """
    if global_batch_size < 1:
        raise PlanError(f"global_batch_size is {global_batch_size}; it must be at least 1")
    small = [size for size in range(1, math.isqrt(global_batch_size) + 1) if global_batch_size % size == 0]
    divisors = tuple(sorted({*small, *(global_batch_size // size for size in small)}))
    if wanted is None:
        return tuple(size for size in divisors if global_batch_size // size <= _MOST_MICRO_BATCHES)
    if wanted not in divisors:
        near = sorted(sorted(divisors, key=lambda size: abs(size - wanted))[:3])
        raise PlanError(
            f"micro_batch_size={wanted} does not divide global_batch_size={global_batch_size}: "
            f"use {' or '.join(map(str, near))}"
        )
    return (wanted,)
