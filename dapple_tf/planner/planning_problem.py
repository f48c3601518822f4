"""Input and output types of planners: ``PlanningProblem``, ``Candidate`` and ``PlannerResult``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from dapple_tf.errors import PlanError, ScheduleError
from dapple_tf.graph_passes.analysis.row_bounds import least_rows
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from dapple_tf.planner.row_shares import can_meet, share_rows
from dapple_tf.planner.step_simulation import fastest_schedule, least_step_seconds, stage_cost_arrays
from dapple_tf.planner.systems.pipedream_formula import PipedreamPrediction
from dapple_tf.plans import Plan, StagePlan, check_workers
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.linearise import Chain, linearise
from dapple_tf.profiler.profile import Profile
from dapple_tf.simulator.contention import Flows, plan_flows
from dapple_tf.simulator.costs import CostModel
from dapple_tf.simulator.interrupts import check_stop
from dapple_tf.simulator.memory import fit_to_one_limit, values_per_weight
from dapple_tf.simulator.simulate import simulate
from dapple_tf.timeline.stage_costs import usable_bytes
from dapple_tf.timeline.timeline import SimulatedTimeline

_KEPT_FLOWS = 64  # on thousands of devices each takes some megabytes


@dataclass(frozen=True)
class PlanningProblem:
    """Plan ``profile`` on ``cluster`` for a global batch (samples) with one of these micro-batch sizes (ascending).

    ``schedule``: a name, or "auto" for the fastest of dapple-a, dapple-b and gpipe. ``recompute``: as in ``Plan``, but
    the searches re-compute all layers or none. ``optimizer_slots``: values that the optimizer keeps of each weight.
    ``overlap``: AllReduce runs during the last backward. ``contention``: steps are simulated with contention for the
    servers' network interfaces. ``shard_optimizer``: as in ``Plan``. ``whole_rows``: as in ``dapple.simulate``.
    ``least_rows``: how many rows of a micro-batch each replica of a stage must at least get.
    """

    profile: Profile
    cluster: Cluster
    global_batch_size: int
    micro_batch_sizes: tuple[int, ...]
    schedule: str = "auto"
    recompute: bool | tuple[int, ...] = False
    optimizer_slots: int = 2
    overlap: bool = False
    contention: bool = True
    whole_rows: bool = True
    least_rows: int = 1
    shard_optimizer: bool = False

    @cached_property
    def chain(self) -> Chain:
        """The profile as a chain of blocks."""
        return linearise(self.profile)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: the fields, without what was computed from them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def spec(self) -> ScheduleSpec:
        """The schedule that is given. Raises ScheduleError for "auto"."""
        return ScheduleSpec.parse(self.schedule)

    @cached_property
    def shares_devices(self) -> bool:
        """Whether a schedule is given that runs several stages on a device."""
        return self.schedule != "auto" and self.spec.runs_several_stages

    def schedule_or(self, usual: str) -> str:
        """Return the schedule that is given, or the ``usual`` one under "auto"."""
        return usual if self.schedule == "auto" else self.schedule

    def check_devices(self, planner: str, most: int) -> None:
        """Raise PlanError if the cluster has more devices than ``planner`` is for."""
        if self.cluster.devices > most:
            raise PlanError(
                f"the cluster has {self.cluster.devices} devices; planner {planner!r} is for at most {most}: use "
                "planner 'best'"
            )

    @property
    def searches_order(self) -> bool:
        """Whether a schedule is given whose order of actions is searched for (``zb-auto``)."""
        return self.schedule != "auto" and self.spec.is_searched

    def make_plan(
        self,
        stages: Sequence[StagePlan],
        micro_batch_size: int,
        schedule: str,
        planner: str,
        recompute: bool | tuple[int, ...] = False,
    ) -> Plan:
        """Return the plan with these stages, without a prediction; ``planner``: the name in its file.

        ``recompute``: as in ``Plan``; the problem's own, if set, takes precedence. Where stages have virtual workers,
        each runs micro-batches of that size.
        """
        return Plan(
            model=self.profile.model,
            planner=planner,
            global_batch_size=self.global_batch_size,
            micro_batch_size=micro_batch_size,
            micro_batches=self._micro_batches(stages, micro_batch_size),
            schedule=schedule,
            recompute=self.recompute or recompute,
            stages=tuple(stages),
            overlap=self.overlap,
            shard_optimizer=self.shard_optimizer,
        )

    def plan_of(self, candidate: Candidate, planner: str) -> Plan:
        """Return the candidate as a plan, without a prediction; ``planner``: the name in its file."""
        sizes, named = candidate.sizes, candidate.schedule if candidate.sizes is None else "dapple-a"
        bare = self.make_plan(candidate.stages, candidate.micro_batch_size, named, planner, candidate.recompute)
        if sizes is None:
            return bare
        return replace(
            bare,
            micro_batch_size=max(sizes),
            micro_batches=len(sizes),
            schedule=candidate.schedule,
            micro_batch_sizes=sizes,
        )

    def simulate(self, plan: Plan) -> SimulatedTimeline:
        """Return the timeline of a step or window of ``plan``."""
        return simulate(
            plan,
            self.profile,
            self.cluster,
            optimizer_slots=self.optimizer_slots,
            contention=self.contention,
            whole_rows=self.whole_rows,
        )

    def evaluate(
        self,
        stages: Sequence[StagePlan],
        micro_batch_size: int,
        origin: str,
        schedule: str | None = None,
        recompute: bool | tuple[int, ...] = False,
        ceiling: float = math.inf,
    ) -> Candidate | None:
        """Simulate these stages under the problem's schedule ("auto": the fastest policy), or under ``schedule``.

        Stages without shares get them by the speeds of their devices, where those are unequal (see ``share_rows``).
        Return None for stages that cannot be a plan: they do not fit the memory, a replica would get no sample,
        neighbouring stages would have unequal shares at a cut whose tensors cannot be split, or the schedule puts other
        stages on one device. Return None too if the step is not shorter than ``ceiling``
        (seconds). ``origin``: see ``Candidate``. ``recompute``: see ``make_plan``.
        """
        check_stop()
        stages = share_rows(stages, micro_batch_size, self.profile, self.cluster)
        if max(least_rows(stage.replicas, stage.row_shares) for stage in stages) * self.least_rows > micro_batch_size:
            return None
        if not (self.cluster.is_uniform or can_meet(stages, self.profile)):
            return None
        wanted = self.schedule if schedule is None else schedule
        splits = wanted != "auto" and ScheduleSpec.parse(wanted).splits_backward
        micro_batches = self._micro_batches(stages, micro_batch_size)
        # Reason: this shows of most slow plans that they are too slow, without costs and simulation.
        least = least_step_seconds(
            self.costs, stages, micro_batch_size, micro_batches, splits=splits, overlap=self.overlap
        )
        if least * (1 - 1e-9) >= ceiling:
            return None
        policy = "dapple-a" if wanted == "auto" else wanted  # the costs are the same for all policies
        plan = self.make_plan(stages, micro_batch_size, policy, origin, recompute)
        try:
            check_workers(plan)
        except (PlanError, ScheduleError):
            return None
        of_stages = self.costs.stage_costs(plan, optimizer_slots=self.optimizer_slots)
        of_stages, memory = fit_to_one_limit(plan, of_stages, self.cluster)
        flows = self.find_flows([self.costs.in_rows(s, micro_batch_size) for s in stages])
        arrays = stage_cost_arrays(of_stages, flows)
        found = fastest_schedule(arrays, plan.micro_batches, usable_bytes(memory), wanted, ceiling)
        if found.seconds == math.inf:
            return None
        return Candidate(stages, micro_batch_size, found.schedule, found.seconds, origin, plan.recompute)

    def find_flows(self, stages: Sequence[StagePlan]) -> Flows | None:
        """Return the flows of these stages; None where they share no interface, or without contention."""
        if not self.contention:
            return None
        key = tuple((stage.devices, stage.row_shares) for stage in stages)
        if key not in self._flows:  # a search moves cuts far more often than devices
            if len(self._flows) == _KEPT_FLOWS:
                self._flows.clear()
            self._flows[key] = plan_flows(stages, self.cluster)
        flows = self._flows[key]
        return flows if flows.directions else None

    def _micro_batches(self, stages: Sequence[StagePlan], micro_batch_size: int) -> int:
        """Return how many micro-batches every virtual worker of these stages runs."""
        return self.global_batch_size // micro_batch_size // (1 + (stages[-1].worker or 0))

    @cached_property
    def costs(self) -> CostModel:
        """The cost model, which keeps what it has computed of links and layers."""
        return CostModel(self.profile, self.cluster, whole_rows=self.whole_rows)

    @cached_property
    def _flows(self) -> dict[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], Flows]:
        return {}

    @property
    def values_per_weight(self) -> float:
        """The number of values that a device stores for a weight: the weight, its gradient, the optimizer's slots.

        Where replicas share the slots out among them, the number is that of a stage on all devices, the least of any
        stage. ``evaluate`` counts the values of each stage exactly.
        """
        return self.values_on(self.cluster.devices)

    def values_on(self, replicas: int) -> float:
        """Return ``values_per_weight`` of a stage with this number of replicas."""
        return values_per_weight(self.optimizer_slots, replicas if self.shard_optimizer else 1)

    def evaluate_all_sizes(self, stages: Sequence[StagePlan], origin: str) -> list[Candidate]:
        """Simulate these stages at every micro-batch size; return what fits. See ``evaluate``."""
        found = [self.evaluate(stages, size, origin) for size in self.micro_batch_sizes]
        return [candidate for candidate in found if candidate is not None]


@dataclass(frozen=True)
class Candidate:
    """Stages under a schedule, and the simulated ``seconds`` of a step.

    ``origin``: where the stages come from: "one device", "DP", "straight" (stages of equal compute), "DAPPLE's
    formulas", "PipeDream's formulas", "SPP's algorithm 3", "AutoPipe's heuristic", "BaPipe's partition", "unequal
    devices" (see ``fit_cuts``), "local search" (the search of planner "best"), "chunks" (devices run several stages),
    or the name of a planner. ``recompute``: as in ``Plan``. ``sizes``: the samples of each micro-batch, where
    AutoPipe's Slicer has halved some.
    """

    stages: tuple[StagePlan, ...]
    micro_batch_size: int
    schedule: str
    seconds: float
    origin: str
    recompute: bool | tuple[int, ...] = False
    sizes: tuple[int, ...] | None = None

    @property
    def device_count(self) -> int:
        """The number of devices."""
        return len({device for stage in self.stages for device in stage.devices})

    @property
    def rank(self) -> tuple[float, int, int]:
        """The key by which planners sort: the seconds, then the number of stages, then the number of devices."""
        return self.seconds, len(self.stages), self.device_count


@dataclass(frozen=True)
class PlannerResult:
    """The plan that a planner chose, and runners-up: for each origin the fastest candidate with other stages.

    The runners-up are in order of rising seconds. ``formula_seconds``: the step by the paper's own costs, if the
    planner chose by them; ``formula`` says by which.
    ``pipedream``: the prediction of PipeDream's formulas, if the planner chose by them.
    """

    chosen: Candidate
    runners_up: tuple[Candidate, ...] = ()
    formula_seconds: float | None = None
    formula: str = "latency by the paper's formulas 1 to 3"
    pipedream: PipedreamPrediction | None = None

    @staticmethod
    def fastest(candidates: Iterable[Candidate | None]) -> PlannerResult | None:
        """Return a result with the fastest candidate and no runners-up; None where there is no candidate."""
        fastest = min((c for c in candidates if c is not None), key=lambda c: c.seconds, default=None)
        return None if fastest is None else PlannerResult(fastest)

    @staticmethod
    def ranked(candidates: Iterable[Candidate]) -> PlannerResult | None:
        """Return the fastest candidate, and as runners-up for each origin the fastest one with other stages.

        Of equally fast candidates the one with fewest stages, then fewest devices, is chosen. Return None if there are
        no candidates.
        """
        order = sorted(candidates, key=lambda c: c.rank)
        if not order:
            return None
        by_origin: dict[str, Candidate] = {}
        for candidate in order[1:]:
            if candidate.stages != order[0].stages:
                by_origin.setdefault(candidate.origin, candidate)
        return PlannerResult(order[0], tuple(by_origin.values()))


# --- The micro-batch sizes that are possible


_LARGEST_BATCH = 10**12  # samples; finding the divisors of a larger number takes seconds
_MOST_MICRO_BATCHES = 16384  # more take long to simulate, and make the bubble hardly shorter


def list_micro_batch_sizes(global_batch_size: int, wanted: int | None) -> tuple[int, ...]:
    """Return the sizes (samples) that divide the global batch into at most 16384 micro-batches, or the ``wanted`` one.

    Raises PlanError if the global batch is empty or above 10^12, or if ``wanted`` does not divide it.
    """
    if not 1 <= global_batch_size <= _LARGEST_BATCH:
        raise PlanError(f"global_batch_size is {global_batch_size}; it must be from 1 to {_LARGEST_BATCH}")
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
