"""Decide the plan of a pipelined step once: by the plan given, the user's options, a profile or an estimate."""

from __future__ import annotations

import dataclasses
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dapple_tf.autoplan.batch_fit import check_batch_size, check_plan_fits, fit_plan
from dapple_tf.autoplan.decision import PlanDecision
from dapple_tf.autoplan.forward_plan import follow_plan, plan_forward
from dapple_tf.autoplan.layer_estimates import EstimatedCosts, estimate_costs
from dapple_tf.autoplan.measured_problem import PlanningInputs, count_slots
from dapple_tf.autoplan.options import Options, check_contradictions
from dapple_tf.autoplan.recompute_option import choose_recompute
from dapple_tf.autoplan.schedule_auto import ScheduleChoice
from dapple_tf.autoplan.schedule_estimated import choose_estimated_schedule, detect_cluster
from dapple_tf.autoplan.stages_auto import check_enough_layers, choose_stages, predict_seconds
from dapple_tf.autoplan.stages_requested import choose_micro_batches, plan_requested_stages, stages_at_home
from dapple_tf.compiler import PlannedModel
from dapple_tf.devices import list_devices
from dapple_tf.distributed.membership import Job, describe_missing_init
from dapple_tf.errors import ClusterError, PlanError, UsageError, warn_user
from dapple_tf.exactness import BatchLoss, Inexact
from dapple_tf.frontend.batch import batch_size
from dapple_tf.frontend.captured import Captured, Traced
from dapple_tf.graph_passes.analysis.layers import Layers
from dapple_tf.graph_passes.ir.graph import Shape
from dapple_tf.graph_passes.ir.names import without_target
from dapple_tf.messages import LOGGER
from dapple_tf.planner.asynchronous import window_plan
from dapple_tf.plans import Plan
from dapple_tf.profiler.units import format_samples
from dapple_tf.staged_model import StagedModel
from dapple_tf.timeline.recording import planned_seconds
from dapple_tf.timeline.timeline import Timeline
from dapple_tf.wording import format_count

# A layer with more than this share of the model's work probably hides layers inside a call that cannot be cut.
_DOMINANT_SHARE = 0.8


@dataclass(frozen=True)
class StageCuts:
    """Layer numbers of one trace: those that start a stage (but the first stage), and those to re-compute."""

    starts: tuple[int, ...]
    recomputed: tuple[int, ...]


class Autoplan:
    """The plan of a step: the one given, or one made from the ``options`` at the first trace.

    ``options``: those that the user gave; the first trace settles some that they leave open. In a ``job`` rank 0
    decides for all ranks, and every rank must make the same calls. Raises PlanError for arguments that contradict each
    other.
    """

    def __init__(self, loss_fn: Traced, optimizer: Any, options: Options, job: Job) -> None:
        check_contradictions(options)
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self.options = options
        self._wanted_cluster = options.cluster
        self._replicable = True
        self._job = job
        self._decision = None if options.plan is None else PlanDecision(options.plan)
        self._estimates: tuple[EstimatedCosts, Mapping[str, Sequence[Shape]]] | None = None
        self.layer_names: tuple[str, ...] = ()

    def train(self, loss_fn: Traced) -> None:
        """Plan anew, for ``loss_fn``, a phase of the function that was given."""
        self._loss_fn = loss_fn
        self._decision = None
        self.layer_names = ()

    @property
    def plan(self) -> Plan:
        """The plan; UsageError before there is one."""
        if self._decision is None:
            raise UsageError("there is no plan before the first batch: call the step, or give example_batch")
        return self._decision.plan

    @property
    def planned(self) -> bool:
        """Whether training has been traced, and has its plan."""
        return bool(self.layer_names)

    @property
    def choice(self) -> ScheduleChoice | None:
        """The simulated candidates of the schedule and M, where these were "auto"."""
        return None if self._decision is None else self._decision.choice

    @property
    def simulated(self) -> Timeline | None:
        """The simulated step of the plan, where the plan was made from a profile."""
        return None if self._decision is None else self._decision.simulated

    def predict_on(self, hosts: Sequence[tuple[str, int]]) -> tuple[float, float] | None:
        """Return the simulated seconds of a step of this plan, and of the best one on other ``hosts``.

        ``hosts``: each with its number of ranks. None where the plan was not made from a profile, no plan uses all
        ranks, or the links between the hosts are not known.
        """
        problem = None if self._decision is None else self._decision.problem
        now = None if problem is None else planned_seconds(self.plan)
        if problem is None or now is None:
            return None
        try:
            if self._wanted_cluster is not None:
                cluster = self._wanted_cluster.on_hosts(hosts)
            elif len(hosts) == 1 and len(problem.cluster.servers) == 1:
                cluster = problem.cluster
                while cluster.devices < hosts[0][1]:
                    cluster, _ = cluster.with_another_device()
            else:
                return None
            return now, predict_seconds(problem, cluster, replicable=self._replicable)
        except (ClusterError, PlanError):
            return None

    @property
    def inexact(self) -> Inexact:
        """The treatment of a loss whose micro-batches would not add up to the whole batch's; see ``Inexact``."""
        return "allow" if self.options.training.in_turn else self.options.inexact

    @property
    def batch_loss(self) -> BatchLoss:
        """Whether a loss that combines samples may run once, after the forwards of all micro-batches."""
        if self.options.batch_loss == "auto" and not _may_wait(self.options):
            return False
        return self.options.batch_loss

    def runs_uncut(self, samples: int) -> bool:
        """Return whether a batch of ``samples`` is, or may become, one micro-batch on one replica of each stage.

        It may become so before there is a plan, where the options leave M open: ``decide`` then plans it for a model
        that needs it.
        """
        if self.options.window is not None:
            return False
        if self._decision is not None:
            return fit_plan(self._decision.plan, samples).uncut
        return self.options.can_run_uncut

    def micro_batch_size(self, samples: int) -> int:
        """Return the samples of the largest micro-batch, at least 2, as the options give it without a plan."""
        return max(2, self.options.largest_micro_batch(samples))

    def check_first_batch(self, samples: int) -> None:
        """Raise PlanError where there is no plan yet, and the requested sizes do not fit a batch of ``samples``."""
        training = self.options.training
        training.check_samples(samples, training.parts, (1,))
        if self._decision is None and (sizes := self.options.sizes(samples)):
            check_batch_size(samples, len(sizes), self.options.replicas or (1,), sizes)

    def decide(
        self, captured: Captured, layers: Layers, shapes: Mapping[str, Sequence[Shape]], batch: Sequence[Any]
    ) -> StageCuts:
        """Make the plan at the first trace, or check the one given, and return where it cuts this trace.

        A later trace is cut at the layers of the same names: for other dtypes it may hold other casts, so numbers may
        differ. ``shapes``: of all values, for one micro-batch. Raises PlanError where the plan does not fit this model
        or batch, and the errors of the files that make it.
        """
        if not self.layer_names:
            self.options = _settle_batch_loss(self.options, captured)
            if captured.needs_uncut and self.options.can_run_uncut:  # only M = 1 computes what one device does
                self.options = dataclasses.replace(self.options, micro_batches=1)
            self._decide_first(captured, layers, shapes, batch)
        plan, names = self.plan, self.layer_names
        recomputed = {names[i] for i in plan.recomputed}
        return StageCuts(
            tuple(layers.find(names[start]) for start in plan.starts),
            tuple(i for i, layer in enumerate(layers.layers) if plan.recompute is True or layer.name in recomputed),
        )

    def move_cuts(self, homes: Mapping[int, int], layers: Layers) -> None:
        """Move cuts of the plan so that layers run on the devices of the variables that they change, if they can.

        ``homes``: these devices, by the position of a layer. ``layers``: those that the plan counts. Nothing is moved
        if the user has named the layers that start a stage, or if the model cannot be cut so.
        """
        assert self._decision is not None, "decide comes first"
        plan = self._decision.plan
        if not (self.options.stages_are_auto or isinstance(self.options.stages, int)):
            return
        stages = stages_at_home(plan, homes, layers.positions())
        if stages is not None and stages != plan.stages:
            moved = dataclasses.replace(plan, stages=stages, predicted=None)
            self._decision = dataclasses.replace(self._decision, plan=moved, simulated=None)

    def plan_forward(self, layers: Layers, shapes: Mapping[str, Sequence[Shape]]) -> Plan:
        """Return the plan of a function of the same model that only runs forward.

        Its stages have the devices that they have in training; before training has a plan, they are balanced by an
        estimate. Raises the errors of options that do not fit this function.
        """
        costs = estimate_costs(layers, shapes)
        if self._decision is not None:
            return follow_plan(self._decision.plan, self.layer_names, layers, costs, all_devices=not self._job.is_alone)
        return plan_forward(self.options, layers, costs, self._device_count, all_devices=not self._job.is_alone)

    @property
    def _device_count(self) -> int:
        """The number of devices that there are: of the ranks of the job, or the logical ones of this process."""
        return len(list_devices(self.options.devices)) if self._job.is_alone else self._job.size

    def choose_schedule(self, model: StagedModel, samples: int) -> None:
        """Choose policy and D for the first trace by an estimate, where the schedule is still "auto"."""
        if self._estimates is None or self._decision is None:
            return
        (costs, shapes), self._estimates = self._estimates, None
        planned = PlannedModel(model, self._decision.plan, samples)
        slots = count_slots(self._optimizer, [model.variables[without_target(name)] for name in model.trained])
        choose = partial(_choose_by_estimate, planned, costs, shapes, slots, ranks=not self._job.is_alone)
        try:
            choice = self._job.run_on_rank_0(choose)
        except PlanError as error:  # no reason to give up: it is an estimate, and devices may share their memory
            schedule = self._decision.plan.schedule
            warn_user(f"{error}. Trying {schedule} all the same")
            return
        if choice is not None:
            self._decision = self._decision.with_schedule(choice)

    def _decide_first(
        self, captured: Captured, layers: Layers, shapes: Mapping[str, Sequence[Shape]], batch: Sequence[Any]
    ) -> None:
        samples = batch_size(batch)
        names = tuple(layer.name for layer in layers.layers)
        costs = estimate_costs(layers, shapes)
        self._job.agree("number of samples", samples)
        self._job.agree("call of dapple.pipeline", self.options)
        self._job.agree("plan", None if self.options.plan is None else self.options.plan.to_json())
        self._job.agree("layers of the model", names)
        if self.options.elastic:
            self.options, self._decision = self._fit_devices(layers, costs, samples)
        decision = self._decision
        if decision is None:
            decision = self._job.run_on_rank_0(partial(self._make_decision, captured, layers, costs, batch))
        window = self.options.window
        if window is not None and (decision.plan.window, decision.plan.global_batch_size) != (window, samples):
            decision = PlanDecision(window_plan(decision.plan, window, samples))
        if self.options.shard_optimizer:
            decision = dataclasses.replace(decision, plan=dataclasses.replace(decision.plan, shard_optimizer=True))
        if decision.plan.shard_optimizer and max(decision.plan.replicas) == 1:
            warn_user(
                "shard_optimizer=True changes nothing: no stage of the plan has replicas, over which the optimizer's "
                "slots could be shared out. Give replicas, or leave it out"
            )
        check_plan_fits(decision.plan, layers, samples)
        if self.options.plan is not None and self._job.rank == 0:
            _warn_of_other_batch(self.options.plan, decision.plan, samples)
        if len(decision.plan.stages) > 1:
            _warn_of_dominant_layer(names, costs)
        if missing := describe_missing_init():
            warn_user(missing)
        self._decision, self.layer_names = decision, names
        unknown = self.options.spec is None or self.options.spec.is_searched
        if self.options.plan is None and decision.choice is None and unknown and decision.plan.window is None:
            self._estimates = costs, shapes

    def _fit_devices(self, layers: Layers, costs: EstimatedCosts, samples: int) -> tuple[Options, PlanDecision | None]:
        """Return the options and the given plan without what does not fit the devices that there are.

        In a job the stages or the plan must use every rank. Where they do not fit, the planner makes a new plan. Of the
        cluster only the hosts of the ranks are kept.
        """
        options, decision, job = self.options, self._decision, self._job
        devices = self._device_count
        if decision is not None or not options.stages_are_auto:
            plan = self.plan if decision else plan_requested_stages(options, layers, costs, samples, sys.maxsize)
            if plan.device_count > devices if job.is_alone else plan.device_count != devices:
                have = format_count(devices, "device" if job.is_alone else "rank")
                if self._job.rank == 0:
                    LOGGER.info("elastic: there are %s, and %d were asked for: planning anew", have, plan.device_count)
                sharded = options.shard_optimizer or plan.shard_optimizer
                options, decision = dataclasses.replace(options.open_to_new_plan(), shard_optimizer=sharded), None
        if options.cluster is not None and options.cluster.devices != devices:
            hosts = [] if job.is_alone else list(Counter(job.gather(socket.gethostname())).items())
            options = dataclasses.replace(options, cluster=options.cluster.on_hosts(hosts) if hosts else None)
        return options, decision

    def _make_decision(
        self, captured: Captured, layers: Layers, costs: EstimatedCosts, batch: Sequence[Any]
    ) -> PlanDecision:
        """Return the plan for the options."""
        self._replicable = not captured.stateful and not (self.options.can_run_uncut and captured.needs_uncut)
        trained = [captured.variables[without_target(name)] for name in captured.trainable]
        inputs = PlanningInputs(
            self._loss_fn,
            batch,
            self.options,
            optimizer_slots=count_slots(self._optimizer, trained),
            devices=self._device_count,
            cluster=self.options.cluster,
            replicable=self._replicable,
            ranks=not self._job.is_alone,
        )
        if self.options.stages_are_auto:
            check_enough_layers(self.options, layers)
            decision = choose_stages(inputs)
            if self.options.recompute is False:
                return decision  # the planner re-computes where memory is short
            recompute = choose_recompute(self.options.recompute, layers, decision.plan.stages)
            return decision.with_recompute(recompute)
        plan = plan_requested_stages(self.options, layers, costs, inputs.samples, inputs.devices)
        if self.options.cluster is None and not self.options.micro_batches_are_auto:
            return PlanDecision(plan)
        return choose_micro_batches(inputs, plan)


def _warn_of_other_batch(given: Plan, used: Plan, samples: int) -> None:
    """Warn where the plan that was ``given`` was made for another batch than one of ``samples``."""
    if given.window == used.window and given.global_batch_size != samples:
        unit = given.training.words.batch
        warn_user(
            f"the plan was made for a {unit} of {format_samples(given.global_batch_size)}, and the first {unit} has "
            f"{samples}: its micro-batches have other sizes than planned, and the predicted step time and memory are "
            f"not those of this run. Give a {unit} of {given.global_batch_size}, or plan for this one: dapple plan "
            f"--global-batch-size {samples}, or dapple.plan(..., global_batch_size={samples})"
        )


def _warn_of_dominant_layer(names: Sequence[str], costs: EstimatedCosts) -> None:
    largest = max(range(len(names)), key=lambda i: costs.layers[i])
    if costs.layers[largest] > _DOMINANT_SHARE * sum(costs.layers):
        warn_user(
            f"layer {names[largest]!r} seems to hold most of the work and cannot be cut: if it is a call of another "
            "tf.function, call the python_function of that tf.function"
        )


def _settle_batch_loss(options: Options, captured: Captured) -> Options:
    """Return the options with True or False as ``batch_loss``, and for "auto" the only schedule with a loss head."""
    if captured.dependence is None or captured.dependence.loss_head is None:
        return dataclasses.replace(options, batch_loss=False)
    schedule = "gpipe" if options.spec is None else str(options.spec)
    return dataclasses.replace(options, batch_loss=True, schedule=schedule)


def _may_wait(options: Options) -> bool:
    """Return whether the schedule may run all forwards of the last stage before its first backward."""
    if (plan := options.plan) is not None:
        schedule = plan.build_schedule()
        return schedule.warm_up[-1] == schedule.micro_batches
    return (
        options.spec is None
        or str(options.spec).partition(":")[0] in ("gpipe", "looped-bfs")
        or options.wanted_micro_batches == 1
        or len(options.given_sizes) == 1
    )


def _choose_by_estimate(
    planned: PlannedModel, costs: EstimatedCosts, shapes: Mapping[str, Sequence[Shape]], slots: int, *, ranks: bool
) -> ScheduleChoice | None:
    """Return ``choose_estimated_schedule`` on the cluster at hand; None where the job's cluster is unknown."""
    try:
        cluster = detect_cluster(planned.plan, ranks=ranks)
    except ClusterError:
        return None
    return choose_estimated_schedule(planned, costs, shapes, slots, cluster, ranks=ranks)
