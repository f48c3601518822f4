"""What a pipeline does, decided once: by the plan given, by what was asked for, by a profile, or by an estimate."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from dapple_tf.autoplan.estimated import choose_for_stages, cluster_at_hand
from dapple_tf.autoplan.profiled import Decided, complete_plan, count_slots, plan_automatically, with_recompute
from dapple_tf.autoplan.recompute_option import choose_recompute
from dapple_tf.autoplan.request import Costs, Request, check_batch, plan_request
from dapple_tf.autoplan.schedule_choice import Choice
from dapple_tf.devices import list_devices
from dapple_tf.distributed.membership import Job
from dapple_tf.errors import ClusterError, DappleWarning, PlanError
from dapple_tf.frontend.capture import Captured
from dapple_tf.plan import Plan, StagePlan
from dapple_tf.runtime.memory_recorder import Built
from dapple_tf.simulator.simulate import Timeline as Simulated
from graph_passes.analysis.layers import Layers
from graph_passes.ir.graph import Shape
from graph_passes.schedules.policies import for_fewer
from profiler.cluster import Cluster

# Of a model's work: a layer of so much hides layers that nobody can cut.
_MOST = 0.8


class Decision:
    """The plan, made at the first trace from the ``request`` or given, and why it is what it is.

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
        self._given = plan is not None
        self.plan = plan
        self.choice: Choice | None = None
        self.simulated: Simulated | None = None  # a step of the plan, where it was made here
        self.layer_names: tuple[str, ...] = ()

    def find_starts(self, layers: Layers) -> list[int]:
        """Where the stages of a later trace start: other dtypes may come with other casts, so by the layers' names."""
        assert self.plan is not None
        return [layers.find(self.layer_names[start]) for start in self.plan.starts]

    def find_recomputed(self, layers: Layers) -> tuple[int, ...]:
        """The layers of a trace that backward makes again: all, or those that the first trace had by these names."""
        assert self.plan is not None
        if self.plan.recompute is True:
            return tuple(range(len(layers.layers)))
        names = {self.layer_names[i] for i in self.plan.recomputed}
        return tuple(i for i, layer in enumerate(layers.layers) if layer.name in names)

    def make(self, captured: Captured, layers: Layers, costs: Costs, batch: Sequence[Any]) -> list[int]:
        """Make the plan at the first trace, or check the one given; the layers that start a stage.

        Raises PlanError where the plan is not for this model or batch, and what making it raises.
        """
        size = int(tf.nest.flatten(tuple(batch))[0].shape[0])
        self.layer_names = tuple(layer.name for layer in layers.layers)
        if self._job is not None:
            asked = {"number of samples": size, "call of dapple.pipeline": self._request, "plan": self.plan}
            self._job.compare({**asked, "layers of the model": self.layer_names})
        if self.plan is None:
            choose = partial(self._choose, captured, layers, costs, batch)
            decided = choose() if self._job is None else self._job.decide(choose)
            self.plan, self.choice, self.simulated = decided.plan, decided.choice, decided.simulated
        plan = self.plan
        if plan.stages[-1].last_layer != len(layers.layers) - 1:
            raise PlanError(
                f"the plan is for {plan.stages[-1].last_layer + 1} layers, but {layers.graph.name} has "
                f"{len(layers.layers)}: it was made for another model"
            )
        check_batch(size, plan.micro_batches, plan.replicas)
        largest = max(range(len(layers.layers)), key=lambda i: costs.layers[i])
        if len(plan.stages) > 1 and costs.layers[largest] > _MOST * sum(costs.layers):
            warnings.warn(
                f"layer {self.layer_names[largest]!r} seems to hold most of the work and cannot be cut: where it is a "
                "call of another tf.function, call that one's python_function",
                DappleWarning,
                stacklevel=7,
            )
        return list(plan.starts)

    def settle(self, built: Built, costs: Costs, shapes: Mapping[str, Sequence[Shape]]) -> None:
        """Take policy and D for the plan's stages by an estimate, where they are open and nothing was profiled."""
        if self._given or self.choice is not None or not self._request.open_schedule:
            return
        slots = count_slots(self._optimizer, [built.staged.variables[name] for name in built.staged.gradients])
        choose = partial(_estimate, built, costs, shapes, slots, ranks=self._job is not None)
        try:
            self.choice = choose() if self._job is None else self._job.decide(choose)
        except PlanError as error:  # by an estimate, and of memory that devices may share: no reason to give up
            warnings.warn(f"{error}. Trying {built.plan.schedule} all the same", DappleWarning, stacklevel=7)
        if self.choice is not None:
            self.plan = dataclasses.replace(built.plan, schedule=self.choice.schedule)

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
        size = int(tf.nest.flatten(tuple(batch))[0].shape[0])
        plan = plan_request(self._request, layers, costs, size, devices)
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
    built: Built, costs: Costs, shapes: Mapping[str, Sequence[Shape]], slots: int, *, ranks: bool
) -> Choice | None:
    """See ``choose_for_stages``; None where nobody knows what the job runs on."""
    try:
        cluster = cluster_at_hand(built.plan, ranks=ranks)
    except ClusterError:
        return None
    return choose_for_stages(built, costs, shapes, slots, cluster, ranks=ranks)


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
    schedule = for_fewer(plan.schedule, micro_batches)
    return dataclasses.replace(plan, micro_batches=micro_batches, stages=stages, schedule=schedule)
