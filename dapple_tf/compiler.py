"""Compile a captured model and a plan into a pipelined graph. The order of the passes is defined here and only here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from dapple_tf.drawing.table import format_ranges
from dapple_tf.errors import PlanError
from dapple_tf.exactness import Exactness
from dapple_tf.graph_passes.analysis.variable_use import find_variables
from dapple_tf.graph_passes.ir.graph import DType, Graph, Shape, TensorType
from dapple_tf.graph_passes.passes.accumulate import Accumulate
from dapple_tf.graph_passes.passes.add_in_place import AddInPlace
from dapple_tf.graph_passes.passes.allreduce import AllReduce
from dapple_tf.graph_passes.passes.apply import Apply
from dapple_tf.graph_passes.passes.base import Observer, Pass, run_passes
from dapple_tf.graph_passes.passes.batch_loss import check_forwards_first
from dapple_tf.graph_passes.passes.check_numerics import CheckNumerics
from dapple_tf.graph_passes.passes.combine_statistics import CombineStatistics
from dapple_tf.graph_passes.passes.copy_variables import CopyVariables
from dapple_tf.graph_passes.passes.expose_gradients import ExposeGradients
from dapple_tf.graph_passes.passes.gather_slices import GatherSlices
from dapple_tf.graph_passes.passes.instrument import Instrument
from dapple_tf.graph_passes.passes.join_replicas import JoinReplicas
from dapple_tf.graph_passes.passes.lengthen import Lengthening, find_received, shorten
from dapple_tf.graph_passes.passes.local_input import LocalInput
from dapple_tf.graph_passes.passes.look_up_rows import LookUpRows
from dapple_tf.graph_passes.passes.microbatch import Microbatch
from dapple_tf.graph_passes.passes.order import Order
from dapple_tf.graph_passes.passes.overlap import Overlap
from dapple_tf.graph_passes.passes.place import Place, PlaceRank
from dapple_tf.graph_passes.passes.project import Project
from dapple_tf.graph_passes.passes.rank_variables import RankVariables
from dapple_tf.graph_passes.passes.recompute import Recompute
from dapple_tf.graph_passes.passes.round_gradients import RoundGradients
from dapple_tf.graph_passes.passes.send_together import SendTogether
from dapple_tf.graph_passes.passes.share_statistics import ShareStatistics
from dapple_tf.graph_passes.passes.split_concat import SplitConcat
from dapple_tf.graph_passes.passes.split_weights import SplitWeights
from dapple_tf.graph_passes.passes.verify_pipeline import VerifyPipeline
from dapple_tf.graph_passes.passes.verify_ranks import verify_ranks
from dapple_tf.graph_passes.passes.windows.group_gradients import GroupGradients
from dapple_tf.graph_passes.passes.windows.order_window import OrderWindow
from dapple_tf.graph_passes.passes.windows.repeat_minibatches import RepeatMinibatches
from dapple_tf.graph_passes.passes.windows.update_groups import UpdateGroups
from dapple_tf.graph_passes.passes.windows.use_versions import UseVersions
from dapple_tf.graph_passes.passes.windows.verify_window import VerifyWindow
from dapple_tf.graph_passes.passes.write_statistics import WriteStatistics
from dapple_tf.graph_passes.schedules.schedule import Schedule
from dapple_tf.graph_passes.schedules.spec import forward_only
from dapple_tf.plans import MORE_DEVICES, REQUESTED, Plan, check_workers
from dapple_tf.profiler.units import format_devices
from dapple_tf.staged_model import StagedModel
from dapple_tf.window_check import check_window_model
from dapple_tf.wording import format_count


@dataclass(frozen=True, eq=False)
class PlannedModel:
    """A staged model, and the ``plan`` under which it runs a batch of ``batch_size`` samples.

    ``local``: the ranks of a job are given only the rows that they need.
    """

    model: StagedModel
    plan: Plan
    batch_size: int
    local: bool = False

    @property
    def exactness(self) -> Exactness:
        """Why a step differs from one device's under this plan."""
        if self.plan.uncut:
            return Exactness()  # ``compile_step`` takes a model that is exact then
        own = self.model.interface.exactness
        if self.plan.runs_whole_minibatches:  # each minibatch runs uncut on one replica
            return Exactness(own.of_minibatches.reasons, windows=True, tried=own.tried)
        many, replicas = self.plan.micro_batches > 1, self.plan.replicas
        writes = (reason for stage, reason in self.model.pass_facts.backward_writes if many or replicas[stage] > 1)
        return Exactness((*own.reasons, *writes), windows=self.plan.window is not None, tried=own.tried)

    def same(self, other: PlannedModel) -> bool:
        """Return whether both run the same steps."""
        mine, others = ((p.plan, p.batch_size, p.local) for p in (self, other))
        return self.model is other.model and mine == others


class StepVariant(Enum):
    """The purpose of a step's graph besides training."""

    PLAIN = "plain"
    TIMED = "times"
    """It also returns the start and end of every call, exchange, AllReduce and update."""
    WITH_GRADIENTS = "gradients"
    """It also returns the gradient of every trained variable."""
    CHECKED = "check"
    """It fails, before any variable changes, where the loss or a gradient is not finite."""


def passes(model: StagedModel, plan: Plan, devices: Sequence[str], home: str, variant: StepVariant) -> tuple[Pass, ...]:
    """Return the passes of ``plan`` in order; the comments say what each needs. See ``pipeline_graph``."""
    facts = model.pass_facts
    placed = _place_stages(plan, devices)
    if not model.trains:
        return _forward_passes(model, plan, placed, home)
    if plan.window is not None:
        return window_passes(model, plan, placed, home, variant)
    schedule = plan.build_schedule()
    check_workers(plan)
    if facts.head_inputs:
        check_forwards_first(schedule)
    order: list[Pass] = [
        *([Recompute(facts.runs)] if any(facts.runs) else []),  # changes what stages take; what it adds can be split
        *([LookUpRows(facts.lookups)] if facts.lookups else []),  # in what Recompute repeats too
        *(
            [SplitWeights(schedule.split, plan.micro_batches)] if schedule.split else []
        ),  # rewrites stage functions; their calls come next
        # calls of stages exist from here on
        _call_stages(model, plan.micro_batches, plan.sizes, schedule.split),
        SplitConcat(plan.replicas, facts.shared, plan.shares),  # before anything that has one node a replica
        *([SendTogether(schedule)] if schedule.together else []),  # needs the tensors of every replica
        CopyVariables(shares=facts.shares),  # needs the replicas
        Accumulate(),  # needs every replica's backward, and its weights' part
        *([Overlap()] if plan.overlap else []),  # cuts the sums that AllReduce will take
        AllReduce(facts.shares),  # needs every replica's sum
        *([RoundGradients(facts.narrow)] if facts.narrow and not plan.uncut else []),  # the complete sums
        *([GatherSlices(facts.sparse, facts.shares)] if facts.sparse else []),  # needs every replica's backward
        *([WriteStatistics()] if facts.statistics else []),  # needs every replica's forward; AllReduce takes other sums
        Order(schedule),  # needs all calls; before timing, which repeats its edges
        *([AddInPlace(schedule)] if plan.micro_batches > 1 else []),  # no pass cuts or orders the sums any more
    ]
    if model.updates is not None:
        order.append(Apply(model.updates, model.global_clipnorm))  # behind a barrier of all that is there
    if variant is StepVariant.WITH_GRADIENTS:
        order.append(ExposeGradients())  # needs what AllReduce left
    if variant is StepVariant.CHECKED:
        order.append(CheckNumerics(gradients=not facts.skips))  # needs what AllReduce left, and the loss
    if variant is StepVariant.TIMED:
        order.append(Instrument())  # last of the rewrites: stamps what the others made
    order += [Place(placed, home), VerifyPipeline(schedule, facts.shares)]
    return tuple(order)


def window_passes(
    model: StagedModel, plan: Plan, placed: tuple[tuple[str, ...], ...], home: str, variant: StepVariant
) -> tuple[Pass, ...]:
    """Return the passes of asynchronous windows in order; they repeat the graph of one minibatch."""
    interface, facts = model.interface, model.pass_facts
    check_window_model(model, plan)
    versions = plan.versions
    window, trained = versions.window, frozenset(model.trained)
    assert model.updates is not None  # check_window_model refuses models without an optimizer
    # The next minibatches have written these before a minibatch's backward re-computes its forward.
    written = find_variables(model.graph).once
    return (
        *([Recompute(facts.runs, written)] if any(facts.runs) else []),
        *([LookUpRows(facts.lookups)] if facts.lookups else []),
        _call_stages(model, window.micro_batches, plan.sizes),  # the calls of one minibatch
        *([] if plan.runs_whole_minibatches else [SplitConcat(plan.replicas, facts.shared, plan.shares)]),
        Accumulate(),  # needs every backward; its sums are repeated too
        RepeatMinibatches(window, interface.merges),  # gives calls their replicas, where these take minibatches in turn
        CopyVariables(trained),  # needs the replicas of all minibatches
        GroupGradients(window, facts.sparse),  # needs the sums of all minibatches
        UpdateGroups(window, model.updates, model.counter),  # needs complete gradients, and commits
        UseVersions(versions, trained),  # needs the updates, between which versions are stored
        OrderWindow(versions),  # needs all calls and updates; before timing, which repeats its edges
        *([Instrument()] if variant is StepVariant.TIMED else []),
        Place(placed, home),
        VerifyWindow(versions, trained),
    )


def _call_stages(
    model: StagedModel, micro_batches: int, sizes: tuple[int, ...], split: frozenset[tuple[int, int]] = frozenset()
) -> Microbatch:
    """Return the pass that calls the stages of ``model`` on each micro-batch; ``sizes``, ``split``: see there."""
    interface, head_inputs = model.interface, model.pass_facts.head_inputs
    return Microbatch(model.stages, micro_batches, interface.merges, interface.loss, head_inputs, split, sizes)


def _forward_passes(model: StagedModel, plan: Plan, placed: tuple[tuple[str, ...], ...], home: str) -> tuple[Pass, ...]:
    """Return the passes of a model that only runs forward, whatever the plan's schedule of training is."""
    facts = model.pass_facts
    schedule = _schedule_of(model, plan)
    return (
        _call_stages(model, plan.micro_batches, plan.sizes),
        SplitConcat(plan.replicas, facts.shared, plan.shares),
        CopyVariables(shares=facts.shares),
        *([WriteStatistics()] if facts.statistics else []),
        Order(schedule),
        Place(placed, home),
        VerifyPipeline(schedule, facts.shares),
    )


def _place_stages(plan: Plan, devices: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the devices of each stage; PlanError where there are not as many."""
    try:
        return tuple(tuple(devices[d] for d in stage.devices) for stage in plan.stages)
    except IndexError:
        wanted = sorted({d for stage in plan.stages for d in stage.devices})
        raise PlanError(
            f"the plan uses devices {format_ranges(wanted)}, but there are only {len(devices)}, from 0: "
            f"{MORE_DEVICES}, or make a plan for {format_devices(len(devices))} (dapple plan --cluster)"
        ) from None


def pipeline_graph(
    model: StagedModel,
    plan: Plan,
    devices: Sequence[str],
    home: str,
    *,
    variant: StepVariant = StepVariant.PLAIN,
    observers: Sequence[Observer] = (),
) -> Graph:
    """Return the pipelined graph that carries out ``plan`` on ``devices`` (names, indexed by the plan).

    ``home``: the device of the batch, the loss and everything else that belongs to no stage. Raises PlanError where
    the plan uses devices that there are not, and ScheduleError where its schedule cannot run.
    """
    return run_passes(model.graph, passes(model, plan, devices, home, variant), observers)


def local_graph(
    model: StagedModel,
    plan: Plan,
    devices: Sequence[str],
    home: str,
    *,
    variant: StepVariant = StepVariant.PLAIN,
    observers: Sequence[Observer] = (),
) -> Graph:
    """Return the graph that one process runs: that of ``pipeline_graph``, where some calls may be in parts.

    Its nodes may stand in another order. Where a few micro-batches show the whole graph, ``observers`` see theirs.
    """

    def build(plan: Plan) -> tuple[Graph, ...]:
        graph = pipeline_graph(model, plan, devices, home, variant=variant, observers=observers)
        # After all passes that look at whole calls.
        return (run_passes(graph, [JoinReplicas()] if model.joins else [], observers, verified=graph),)

    graphs, lengthenings = _build_few(model, plan, variant, build, [0])
    return lengthenings[0].whole() if lengthenings else graphs[0]


def job_graphs(
    model: StagedModel,
    plan: Plan,
    size: int,
    rank: int,
    device: str,
    home: str,
    *,
    variant: StepVariant = StepVariant.PLAIN,
    local: bool = False,
) -> tuple[tuple[Graph, ...], Graph]:
    """Return the graphs of all ranks, maybe for fewer micro-batches, and that of ``rank`` on its devices.

    ``device``: of the rank's stages; ``home``: of everything else. See ``rank_graphs``.
    """

    def build(plan: Plan) -> tuple[Graph, ...]:
        graphs = rank_graphs(model, plan, size, variant=variant, local=local)
        return (*graphs, run_passes(graphs[rank], [PlaceRank(device, home)], verified=graphs[rank]))

    (*graphs, own), lengthenings = _build_few(model, plan, variant, build, [*range(size), rank])
    return tuple(graphs), lengthenings[-1].whole() if lengthenings else own


def _build_few(
    model: StagedModel,
    plan: Plan,
    variant: StepVariant,
    build: Callable[[Plan], tuple[Graph, ...]],
    ranks: Sequence[int],
) -> tuple[tuple[Graph, ...], Sequence[Lengthening]]:
    """Return the graphs that ``build`` makes of the plan with a few of its micro-batches, to be lengthened to the plan.

    Where a few do not show what the graphs of the plan are, return these, and no lengthenings. ``ranks``: the rank of
    each of the graphs, which begin with those of all ranks.
    """
    # An instrumented graph has the stamps of all rounds in one node, in the order of the step.
    can_shorten = plan.window is None and variant is not StepVariant.TIMED
    short = shorten(_schedule_of(model, plan)) if can_shorten else None
    if short is not None:
        first, second = (build(_with_few(model, plan, schedule)) for schedule in (short.first, short.second))
        lengthenings = [
            Lengthening.find(one, two, short, plan.sizes, find_received(first, one, rank))
            for one, two, rank in zip(first, second, ranks, strict=True)
        ]
        found = [each for each in lengthenings if each is not None]
        if len(found) == len(lengthenings):
            return first, found
    return build(plan), ()


def _schedule_of(model: StagedModel, plan: Plan) -> Schedule:
    """Return the order of the model's actions; one that does not train runs forwards only, whatever the plan says."""
    return plan.build_schedule() if model.trains else forward_only(plan.worker_map, plan.micro_batches)


def _with_few(model: StagedModel, plan: Plan, schedule: Schedule) -> Plan:
    """Return the plan with a schedule of fewer micro-batches, the first ones."""
    count = schedule.micro_batches
    text = str(schedule) if model.trains else plan.schedule
    few = replace(plan, schedule=text, micro_batches=count, micro_batch_sizes=None)
    if not (sizes := plan.sizes[:count]):
        return few
    return replace(few, micro_batch_sizes=sizes, micro_batch_size=max(sizes), global_batch_size=sum(sizes))


def rank_graphs(
    model: StagedModel,
    plan: Plan,
    size: int,
    *,
    variant: StepVariant = StepVariant.PLAIN,
    local: bool = False,
    observers: Sequence[Observer] = (),
) -> tuple[Graph, ...]:
    """Return the graphs of all ranks of a job of ``size`` processes, without devices, checked against each other.

    A rank runs all stages of its device in ``plan``. ``local``: each takes only the rows of the batch that it needs,
    and the batch size as its last input. Raises PlanError where the plan is for another number of ranks, and GraphError
    where two ranks' exchanges do not match.
    """
    used = sorted({device for stage in plan.stages for device in stage.devices})
    if used != list(range(size)):
        if plan.planner == REQUESTED:
            raise PlanError(
                f"what was asked for, {format_count(len(plan.stages), 'stage')} with replicas {list(plan.replicas)}, "
                f"uses {format_count(len(used), 'rank')}, {used}, but the job has {size}: start as many processes, ask "
                f"for stages and replicas that use {size}, or give stages='auto'"
            )
        raise PlanError(
            f"the plan is for {format_count(len(used), 'rank')}, {used}, but the job has {size}: start one process for "
            f"each device of the plan, or make a plan that uses {format_devices(size)} (dapple plan --cluster)"
        )
    # A rank's exchanges are timed too, so time stamps are added after the projection.
    timed = variant is StepVariant.TIMED
    devices = [f"/rank:{rank}" for rank in range(size)]
    whole = local_graph(model, plan, devices, "/rank:*", variant=StepVariant.PLAIN if timed else variant)
    types = tuple(
        (name, TensorType(DType(variable.dtype.name), Shape(tuple(variable.shape.as_list()))))
        for name, variable in sorted(model.variables.items())
    )
    ranks, shares = tuple(stage.devices for stage in plan.stages), model.pass_facts.shares
    sharded = find_variables(model.graph, shares).sharded
    # After all passes that expect whole calls.
    statistics: list[Pass] = [CombineStatistics(), ShareStatistics()] if plan.window is None else []
    # RankVariables needs the copies that CopyVariables made.
    whole = run_passes(whole, [*statistics, RankVariables(types, ranks, shares)], observers, verified=whole)
    # Project needs RankVariables, to find the values that ranks exchange.
    last: list[Pass] = [*([LocalInput()] if local else []), *([Instrument()] if timed else [])]
    graphs = tuple(
        run_passes(whole, [Project(ranks, rank, sharded), *last], observers, verified=whole) for rank in range(size)
    )
    verify_ranks(graphs)
    return graphs
