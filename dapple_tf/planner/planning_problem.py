"""Input and output types of planners: ``PlanningProblem``, ``Candidate`` and ``PlannerResult``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dapple_tf.errors import PlanError, ScheduleError
from dapple_tf.plan import Plan, StagePlan, check_workers
from dapple_tf.planner.cost_tables import CostTables, make_cost_tables
from dapple_tf.planner.pipedream_formula import PipedreamPrediction
from dapple_tf.planner.placement import device_indices
from dapple_tf.planner.pricing import fastest_schedule, stage_cost_arrays
from dapple_tf.planner.search import FoundPlan
from dapple_tf.planner.search_space import SearchSpace, find_search_spaces
from dapple_tf.simulator.costs import stage_costs
from dapple_tf.simulator.memory import usable_bytes
from graph_passes.schedules.policies import runs_several_stages, splits_backward
from profiler.cluster import Cluster
from profiler.linearise import Chain, linearise
from profiler.profile import Profile


@dataclass(frozen=True)
class PlanningProblem:
    """Plan ``profile`` on ``cluster`` for a global batch (samples) with one of these micro-batch sizes (ascending).

    ``schedule``: a name, or "auto" for the fastest policy. ``recompute``: as in ``Plan``, but the searches re-compute
    all layers or none. ``optimizer_slots``: values that the optimizer keeps of each weight. ``overlap``: AllReduce runs
    during the last backward.
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
        """The profile as a chain of blocks."""
        return linearise(self.profile)

    @cached_property
    def shares_devices(self) -> bool:
        """Whether the schedule is given, and runs several stages on a device."""
        return self.schedule != "auto" and runs_several_stages(self.schedule)

    @cached_property
    def search_spaces(self) -> tuple[SearchSpace, ...]:
        """The spaces to search, at each micro-batch size; see ``find_search_spaces``."""
        return find_search_spaces(self.chain, self.cluster)

    def cost_tables(self, space: SearchSpace, micro_batch_size: int) -> CostTables:
        """Return the tables for a search of ``space`` with this micro-batch size."""
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
        """Return the stages of a plan found in ``space``, with layers and devices."""
        positions = space.chain.positions
        bounds = [positions[start] for start in found.starts] + [len(self.profile.layers)]
        return tuple(
            StagePlan(first, end - 1, device_indices(self.cluster, space.placements.items[placement], space.order))
            for first, end, placement in zip(bounds, bounds[1:], found.placements, strict=False)
        )

    def make_plan(self, stages: Sequence[StagePlan], micro_batch_size: int, schedule: str, planner: str) -> Plan:
        """Return the plan with these stages, without a prediction; ``planner``: the name in its file."""
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

    def evaluate(
        self, stages: Sequence[StagePlan], micro_batch_size: int, origin: str, schedule: str | None = None
    ) -> Candidate | None:
        """Simulate these stages under the fastest schedule allowed, or under ``schedule``.

        None if they do not fit the memory, if some replica would get no sample, or if the schedule has other stages on
        the same devices. ``origin``: see ``Candidate``.
        """
        if max(stage.replicas for stage in stages) > micro_batch_size:
            return None
        wanted = self.schedule if schedule is None else schedule
        policy = "dapple-a" if wanted == "auto" else wanted  # the costs are the same for all policies
        plan = self.make_plan(stages, micro_batch_size, policy, origin)
        try:
            check_workers(plan)
        except (PlanError, ScheduleError):
            return None
        costs = stage_cost_arrays(stage_costs(plan, self.profile, self.cluster, optimizer_slots=self.optimizer_slots))
        found = fastest_schedule(costs, plan.micro_batches, usable_bytes(self.cluster.device_memory), wanted)
        if found.seconds == float("inf"):
            return None
        return Candidate(tuple(stages), micro_batch_size, found.schedule, found.seconds, origin)

    def evaluate_all_sizes(self, stages: Sequence[StagePlan], origin: str) -> list[Candidate]:
        """Simulate these stages at every micro-batch size; return what fits."""
        found = [self.evaluate(stages, size, origin) for size in self.micro_batch_sizes]
        return [candidate for candidate in found if candidate is not None]


@dataclass(frozen=True)
class Candidate:
    """Stages under a schedule, and the simulated ``seconds`` of a step.

    ``origin``: where the stages come from: "one device", "DP", "straight", "search", "two stages",
    "DAPPLE's formulas", "PipeDream's formulas" or "chunks" (devices run several stages).
    """

    stages: tuple[StagePlan, ...]
    micro_batch_size: int
    schedule: str
    seconds: float
    origin: str

    @property
    def device_count(self) -> int:
        """The number of devices."""
        return len({device for stage in self.stages for device in stage.devices})


@dataclass(frozen=True)
class PlannerResult:
    """The plan that a planner chose, and the fastest candidate of each other origin, by rising seconds.

    ``proven_optimal``: no plan of one stage per device in the search space is faster in the simulator.
    ``formula_seconds``: the latency by formula 2, if the planner chose by it. ``pipedream``: the prediction of
    PipeDream's formulas, if the planner chose by them.
    """

    chosen: Candidate
    runners_up: tuple[Candidate, ...] = ()
    proven_optimal: bool = False
    formula_seconds: float | None = None
    pipedream: PipedreamPrediction | None = None
