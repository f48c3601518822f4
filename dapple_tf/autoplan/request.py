"""The plan that a user asked for by hand: a number of stages or their first layers, replicas, micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dapple_tf.autoplan.estimate import Costs
from dapple_tf.autoplan.recompute_option import Recompute, check_recompute, choose_recompute
from dapple_tf.errors import PlanError
from dapple_tf.plan import Plan, StagePlan
from graph_passes.analysis.layers import Layers
from graph_passes.passes.partition import balance
from graph_passes.schedules.policies import build_schedule, check_schedule_name, count_micro_batches, count_stages

_USUAL_MICRO_BATCHES = 8


@dataclass(frozen=True)
class Request:
    """``stages``: a count, the names of layers that start a stage, or "auto"; ``replicas`` per stage.

    "auto" with replicas is as many stages as those name; without (``automatic``) it is for a planner to say.
    ``micro_batches`` and ``schedule`` may be "auto": the simulator says. ``recompute``: see ``choose_recompute``.
    Raises PlanError for values of other kinds, and ScheduleError for a schedule that is none.
    """

    stages: int | Sequence[str] | str = "auto"
    replicas: Sequence[int] | None = None
    micro_batches: int | str = 8
    schedule: str = "auto"
    recompute: Recompute = False

    @property
    def automatic(self) -> bool:
        """Whether stages and replicas are left to a planner."""
        return self.stages == "auto" and self.replicas is None

    @property
    def open(self) -> bool:
        """Whether anything is left to a planner or the simulator."""
        return self.automatic or self.open_micro_batches or self.open_schedule

    @property
    def open_micro_batches(self) -> bool:
        """Whether M is left to the simulator."""
        return self.micro_batches == "auto"

    @property
    def open_schedule(self) -> bool:
        """Whether the schedule is left to the simulator."""
        return self.schedule == "auto"

    def count_micro_batches(self, samples: int, replicas: int = 1) -> int:
        """M for a batch of so many samples; until the simulator has said it, as many as most pipelines take.

        ``replicas``: the most of a stage, each of which needs a sample.
        """
        if isinstance(self.micro_batches, int):
            return self.micro_batches
        return max(1, min(_USUAL_MICRO_BATCHES, samples // replicas))

    def __post_init__(self) -> None:
        if not isinstance(self.micro_batches, int) and self.micro_batches != "auto":
            raise PlanError(f"micro_batches={self.micro_batches!r}: give a whole number, or 'auto'")
        if not isinstance(self.schedule, str):
            raise PlanError(f"schedule={self.schedule!r}: give a name, such as 'dapple-a'")
        if not self.open_schedule:
            check_schedule_name(self.schedule)
        if self.replicas is not None and not _all(self.replicas, int):
            raise PlanError(f"replicas={self.replicas!r}: give one whole number for each stage, such as [2, 1]")
        if not isinstance(self.stages, int) and self.stages != "auto" and not _all(self.stages, str):
            raise PlanError(f"stages={self.stages!r}: give a number, a list of layer names, or 'auto'")
        check_recompute(self.recompute)


def _all(items: object, kind: type) -> bool:
    return isinstance(items, Sequence) and not isinstance(items, str) and all(isinstance(item, kind) for item in items)


def plan_request(request: Request, layers: Layers, costs: Costs, global_batch_size: int, devices: int) -> Plan:
    """Carry out ``request`` for a model, a batch of so many samples, and so many devices.

    The schedule "auto" is dapple-a until the simulator has been asked. Raises PlanError (counts that do not fit),
    PartitionError (cuts that cannot be made) or ScheduleError (a schedule of other stages or micro-batches).
    """
    starts = _starts(request, layers, costs)
    count = len(starts) + 1
    replicas = tuple(request.replicas) if request.replicas is not None else (1,) * count
    if len(replicas) != count:
        raise PlanError(f"replicas={list(replicas)} names {len(replicas)} stages, but there are {count}")
    if min(replicas) < 1:
        raise PlanError(f"replicas={list(replicas)}: every stage needs at least one device")
    if sum(replicas) > devices:
        raise PlanError(
            f"{count} stages with replicas {list(replicas)} need {sum(replicas)} devices, but there are {devices}: "
            "ask for fewer, or make more with dapple.init(devices=n)"
        )
    micro_batches = request.count_micro_batches(global_batch_size, max(replicas))
    check_batch(global_batch_size, micro_batches, replicas)
    _check_schedule(request, count, micro_batches, global_batch_size // max(replicas))
    bounds = [0, *starts, len(layers.layers)]
    stages, used = [], 0
    for first, end, r in zip(bounds, bounds[1:], replicas, strict=False):
        stages.append(StagePlan(first, end - 1, tuple(range(used, used + r))))
        used += r
    schedule = "dapple-a" if request.open_schedule else request.schedule
    return Plan(
        model=layers.graph.name,
        planner="requested",
        global_batch_size=global_batch_size,
        micro_batch_size=-(-global_batch_size // micro_batches),
        micro_batches=micro_batches,
        schedule=schedule,
        recompute=choose_recompute(request.recompute, layers, stages),
        stages=tuple(stages),
    )


def _check_schedule(request: Request, stages: int, micro_batches: int, most: int) -> None:
    """ScheduleError for one that so many stages cannot have, with ``micro_batches``, or where M is open at ``most``."""
    name = request.schedule
    if request.open_schedule:
        return
    if not request.open_micro_batches:
        build_schedule(name, stages, micro_batches)
    elif count_stages(name):
        build_schedule(name, stages, count_micro_batches(name, range(1, most + 1)) or most)


def check_batch(size: int, micro_batches: int, replicas: Sequence[int]) -> None:
    """PlanError unless every slice of every micro-batch gets at least one sample."""
    if micro_batches < 1:
        raise PlanError(f"micro_batches={micro_batches}: it must be at least 1")
    if micro_batches > size:
        raise PlanError(
            f"micro_batches={micro_batches} is more than the {size} samples of the batch: use at most {size}"
        )
    if size // micro_batches < max(replicas):
        raise PlanError(
            f"a batch of {size} samples in {micro_batches} micro-batches gives some only {size // micro_batches} "
            f"samples, too few for {max(replicas)} replicas: use fewer micro-batches or a larger batch"
        )


def _starts(request: Request, layers: Layers, costs: Costs) -> list[int]:
    wanted = request.stages
    if wanted == "auto":
        wanted = len(request.replicas or (1,))
    if isinstance(wanted, int):
        if wanted < 1:
            raise PlanError(f"stages={wanted}: there must be at least one")
        positions = list(layers.positions())
        if request.replicas is not None and len(set(request.replicas)) > 1:
            positions = [p for p in positions if layers.cut(p).splittable]
            if len(positions) < wanted - 1 <= len(layers.positions()):
                raise PlanError(
                    f"{wanted} stages of differing replicas {list(request.replicas)} are wanted, but only "
                    f"{len(positions)} cuts cross nothing but tensors with a batch axis, which alone can be split: "
                    "give all stages equal replicas, or name the layers that start them"
                )
        return balance(costs.layers, positions, [costs.cuts[p - 1] for p in positions], wanted)
    starts = [layers.find(name) for name in wanted]
    for before, after, name in zip(starts, starts[1:], wanted[1:], strict=False):
        if after <= before:
            raise PlanError(f"stages={list(wanted)}: {name!r} does not come after the layer before it in the model")
    return [start for start in starts if start > 0]  # naming the first stage's first layer too is fine
