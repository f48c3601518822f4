"""What a planner is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dapple_tf.plan import Plan, StagePlan
from dapple_tf.planner.cost_tables import CostTables, make_cost_tables
from dapple_tf.planner.placement import device_indices
from dapple_tf.planner.pricing import fastest_schedule, stage_cost_arrays
from dapple_tf.planner.search import FoundPlan
from dapple_tf.planner.search_space import SearchSpace, find_search_spaces
from dapple_tf.simulator.costs import stage_costs
from dapple_tf.simulator.memory import usable_bytes
from graph_passes.schedules.policies import splits_backward
from profiler.cluster import Cluster
from profiler.linearise import Chain, linearise
from profiler.profile import Profile


@dataclass(frozen=True)
class PlanningProblem:
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
    def search_spaces(self) -> tuple[SearchSpace, ...]:
        """What is searched; one space where it is everything."""
        return find_search_spaces(self.chain, self.cluster)

    def cost_tables(self, space: SearchSpace, micro_batch_size: int) -> CostTables:
        """The search's tables for one micro-batch size."""
        return make_cost_tables(
            space,
            self.global_batch_size,
            micro_batch_size,
            optimizer_slots=self.optimizer_slots,
            recompute=bool(self.recompute),
            overlap=self.overlap,
            splits_backward=splits_backward(self.schedule),
        )

    def stage_plans(self, space: SearchSpace, found: FoundPlan) -> tuple[StagePlan, ...]:
        """The stages of a plan that the search of ``space`` found."""
        positions = space.chain.positions
        bounds = [positions[start] for start in found.starts] + [len(self.profile.layers)]
        return tuple(
            StagePlan(first, end - 1, device_indices(self.cluster, space.placements.items[place], space.order))
            for first, end, place in zip(bounds, bounds[1:], found.placements, strict=False)
        )

    def make_plan(self, stages: Sequence[StagePlan], micro_batch_size: int, schedule: str, planner: str) -> Plan:
        """A plan of these stages for this problem."""
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

    def evaluate(self, stages: Sequence[StagePlan], micro_batch_size: int, origin: str) -> Candidate | None:
        """These stages under the best schedule allowed, by the simulator; None where they do not fit."""
        if max(stage.replicas for stage in stages) > micro_batch_size:
            return None
        plan = self.make_plan(
            stages, micro_batch_size, "dapple-a" if self.schedule == "auto" else self.schedule, origin
        )
        costs = stage_cost_arrays(stage_costs(plan, self.profile, self.cluster, optimizer_slots=self.optimizer_slots))
        found = fastest_schedule(costs, plan.micro_batches, usable_bytes(self.cluster.device_memory), self.schedule)
        if found.seconds == float("inf"):
            return None
        return Candidate(tuple(stages), micro_batch_size, found.schedule, found.seconds, origin)

    def evaluate_all_sizes(self, stages: Sequence[StagePlan], origin: str) -> list[Candidate]:
        """``evaluate`` at every micro-batch size at which the stages fit."""
        found = [self.evaluate(stages, size, origin) for size in self.micro_batch_sizes]
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
class PlannerResult:
    """What a planner chose, and the best of each other origin, by seconds.

    ``proven``: no plan of the search space is faster. ``latency``: formula 2's seconds, where the planner went by it.
    """

    chosen: Candidate
    runners_up: tuple[Candidate, ...] = ()
    proven_optimal: bool = False
    formula_seconds: float | None = None
