"""What a pipeline does, decided once: by the plan given, by what was asked for, by a profile, or by an estimate."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dapple_tf.autoplan.estimate import Costs, estimate_costs
from dapple_tf.autoplan.estimated import choose_for_stages, cluster_at_hand
from dapple_tf.autoplan.profiled import Decided, complete_plan, count_slots, plan_automatically, with_recompute
from dapple_tf.autoplan.recompute_option import choose_recompute
from dapple_tf.autoplan.request import Request, check_batch, plan_request
from dapple_tf.autoplan.schedule_choice import Choice
from dapple_tf.compiler import PlannedModel, StagedModel
from dapple_tf.devices import list_devices
from dapple_tf.distributed.membership import Job
from dapple_tf.errors import ClusterError, DappleWarning, PlanError, UsageError
from dapple_tf.frontend.batch import batch_size
from dapple_tf.frontend.capture import Captured
from dapple_tf.plan import Plan, StagePlan
from dapple_tf.simulator.simulate import Timeline as Simulated
from graph_passes.analysis.layers import Layers
from graph_passes.ir.graph import Shape
from graph_passes.schedules.policies import truncate_schedule
from profiler.cluster import Cluster

# Of a model's work: a layer of so much hides layers that nobody can cut.
_MOST = 0.8


@dataclass(frozen=True)
class Cuts:
    """The layers of a trace that start a stage (all but the first stage), and those that backward computes again."""

    starts: tuple[int, ...]
    recomputed: tuple[int, ...]


class Autoplan:
    """The plan of a step: the one given, or the one made from the ``request`` at the first trace, and its reasons.

    In a ``job`` rank 0 decides for all, and every rank must make the same calls. Raises PlanError for arguments that
    contradict each other.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: Any,
        request: Request,
        plan: Plan | None,
        devices: Sequence[str | int] | None,
        cluster: Cluster | None,
        job: Job | None,
    ) -> None:
        _check_asked(request, plan, cluster)
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._request = request
        self._devices = devices
        self._cluster = cluster
        self._job = job
        self._given = plan
        self._decided = None if plan is None else Decided(plan)
        self._estimated: tuple[Costs, Mapping[str, Sequence[Shape]]] | None = None
        self.layer_names: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        """The plan; UsageError before there is one."""
        if self._decided is None:
            raise UsageError("nothing is decided before the first batch: call the step, or give example_batch")
        return self._decided.plan

    @property
    def choice(self) -> Choice | None:
        """Why the plan has its schedule and M, where they were left "auto" and the simulator chose them."""
        return None if self._decided is None else self._decided.choice

    @property
    def simulated(self) -> Simulated | None:
        """The simulated step of the plan, where the plan was made here from a profile."""
        return None if self._decided is None else self._decided.simulated

    def micro_batch_size(self, batch_size: int) -> int:
        """Return the samples of a micro-batch, 2 at least, as far as the request tells before there is a plan."""
        return max(2, batch_size // max(1, self._request.count_micro_batches(batch_size)))

    def decide(
        self, captured: Captured, layers: Layers, shapes: Mapping[str, Sequence[Shape]], batch: Sequence[Any]
    ) -> Cuts:
        """Make the plan at the first trace, or check the one given, and return where it cuts this trace.

        A later trace is cut at the layers of the same names: other dtypes may come with other casts. ``shapes``: of all
        values for one micro-batch. Raises PlanError where the plan is not for this model or batch, and what making it
        raises.
        """
        if not self.layer_names:
            self._decide_first(captured, layers, shapes, batch)
        plan, names = self.plan, self.layer_names
        recomputed = {names[i] for i in plan.recomputed}
        return Cuts(
            tuple(layers.find(names[start]) for start in plan.starts),
            tuple(i for i, layer in enumerate(layers.layers) if plan.recompute is True or layer.name in recomputed),
        )

    def _decide_first(
        self, captured: Captured, layers: Layers, shapes: Mapping[str, Sequence[Shape]], batch: Sequence[Any]
    ) -> None:
        size = batch_size(batch)
        names = tuple(layer.name for layer in layers.layers)
        costs = estimate_costs(layers, shapes)
        if self._job is not None:
            asked = {"number of samples": size, "call of dapple.pipeline": self._request, "plan": self._given}
            self._job.compare({**asked, "layers of the model": names})
        decided = self._decided
        if decided is None:
            choose = partial(self._choose, captured, layers, costs, batch)
            decided = choose() if self._job is None else self._job.run_on_rank_0(choose)
        plan = decided.plan
        if plan.stages[-1].last_layer != len(names) - 1:
            raise PlanError(
                f"the plan is for {plan.stages[-1].last_layer + 1} layers, but {layers.graph.name} has "
                f"{len(names)}: it was made for another model"
            )
        check_batch(size, plan.micro_batches, plan.replicas)
        largest = max(range(len(names)), key=lambda i: costs.layers[i])
        if len(plan.stages) > 1 and costs.layers[largest] > _MOST * sum(costs.layers):
            warnings.warn(
                f"layer {names[largest]!r} seems to hold most of the work and cannot be cut: where it is a call of "
                "another tf.function, call that one's python_function",
                DappleWarning,
                stacklevel=9,
            )
        self._decided, self.layer_names = decided, names
        if self._given is None and decided.choice is None and self._request.open_schedule:
            self._estimated = costs, shapes

    def choose_schedule(self, model: StagedModel, batch_size: int) -> None:
        """Choose policy and D for the first trace by an estimate, where neither was given nor profiled."""
        if self._estimated is None or self._decided is None:
            return
        (costs, shapes), self._estimated = self._estimated, None
        planned = PlannedModel(model, self._decided.plan, batch_size)
        slots = count_slots(self._optimizer, [model.variables[name] for name in model.gradients])
        choose = partial(_estimate, planned, costs, shapes, slots, ranks=self._job is not None)
        try:
            choice = choose() if self._job is None else self._job.run_on_rank_0(choose)
        except PlanError as error:  # by an estimate, and of memory that devices may share: no reason to give up
            schedule = self._decided.plan.schedule
            warnings.warn(f"{error}. Trying {schedule} all the same", DappleWarning, stacklevel=8)
            return
        if choice is not None:
            plan = dataclasses.replace(self._decided.plan, schedule=choice.schedule)
            self._decided = dataclasses.replace(self._decided, plan=plan, choice=choice)

    def _choose(self, captured: Captured, layers: Layers, costs: Costs, batch: Sequence[Any]) -> Decided:
        """The plan that was asked for."""
        ranks = self._job is not None
        devices = len(list_devices(self._devices)) if self._job is None else self._job.size
        slots = count_slots(self._optimizer, [captured.variables[name] for name in captured.trainable])
        if self._request.automatic:
            decided = plan_automatically(
                self._loss_fn,
                batch,
                self._request,
                slots=slots,
                devices=devices,
                cluster=self._cluster,
                replicable=not captured.stateful,
                ranks=ranks,
            )
            return with_recompute(decided, choose_recompute(self._request.recompute, layers, decided.plan.stages))
        plan = plan_request(self._request, layers, costs, batch_size(batch), devices)
        if self._cluster is None and not self._request.open_micro_batches:
            return Decided(plan)
        return complete_plan(
            self._loss_fn,
            batch,
            self._request,
            plan,
            slots=slots,
            devices=devices,
            cluster=self._cluster,
            ranks=ranks,
        )


def _estimate(
    planned: PlannedModel, costs: Costs, shapes: Mapping[str, Sequence[Shape]], slots: int, *, ranks: bool
) -> Choice | None:
    """See ``choose_for_stages``; None where nobody knows what the job runs on."""
    try:
        cluster = cluster_at_hand(planned.plan, ranks=ranks)
    except ClusterError:
        return None
    return choose_for_stages(planned, costs, shapes, slots, cluster, ranks=ranks)


def _check_asked(request: Request, plan: Plan | None, cluster: Cluster | None) -> None:
    if plan is not None and not isinstance(plan, Plan):
        raise PlanError(f"plan is a {type(plan).__name__}, not a dapple.Plan: read a file with dapple.Plan.load(path)")
    if plan is not None and (request.stages != "auto" or request.replicas is not None):
        raise PlanError("give a plan, or stages and replicas, not both")
    if plan is not None and request.recompute:
        raise PlanError(
            "give a plan, or recompute, not both: a plan says itself what is re-computed (its field recompute)"
        )
    if cluster is not None and (plan is not None or not request.open):
        raise PlanError(
            "a cluster is for planning, and nothing is left to plan: leave it out, or leave stages, micro_batches "
            'or schedule "auto"'
        )


def fit_plan(plan: Plan, size: int) -> Plan:
    """The plan for a batch of ``size`` samples: fewer micro-batches, then fewer replicas, where it is short."""
    replicas = min(max(plan.replicas), size)
    micro_batches = max(1, min(plan.micro_batches, size // replicas))
    if micro_batches == plan.micro_batches and replicas == max(plan.replicas):
        return plan
    stages = tuple(StagePlan(s.first_layer, s.last_layer, s.devices[: min(s.replicas, replicas)]) for s in plan.stages)
    schedule = truncate_schedule(plan.schedule, micro_batches)
    return dataclasses.replace(plan, micro_batches=micro_batches, stages=stages, schedule=schedule)
