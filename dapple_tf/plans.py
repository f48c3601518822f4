"""A plan: the layers and devices of each stage, the number of micro-batches, and the schedule.

File format ``dapple-plan/1`` (JSON).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec

from dapple_tf.errors import PlanError, ScheduleError
from dapple_tf.graph_passes.analysis.row_bounds import least_rows, share_bounds, whole_shares
from dapple_tf.graph_passes.passes.recompute import find_runs
from dapple_tf.graph_passes.schedules.schedule import Schedule
from dapple_tf.graph_passes.schedules.slicer import sliced_1f1b
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from dapple_tf.graph_passes.schedules.weight_versions import Versions
from dapple_tf.graph_passes.schedules.window import sharing_replicas
from dapple_tf.graph_passes.schedules.worker_map import WorkerMap
from dapple_tf.profiler.files import describe_reason, write_atomically
from dapple_tf.profiler.quote import quote
from dapple_tf.profiler.read_files import naming_file, read_json
from dapple_tf.profiler.records import Count, Figure, Name, read_record
from dapple_tf.profiler.servers import is_finite
from dapple_tf.profiler.units import format_samples
from dapple_tf.window_plan import Synchronous, Training, WindowPlan
from dapple_tf.wording import format_count

REQUESTED = "requested"
"""The planner's name in a plan that follows the stages and replicas of the options."""

FORMAT = "dapple-plan/1"

# Limits of a plan in a file, far above what can be trained.
_MOST_MICRO_BATCHES = 100_000
_MOST_LAYERS = 1_000_000
_LONGEST_SCHEDULE = 4_000_000  # characters

_NAMED_SIZES = 16  # in a description of a plan

MORE_DEVICES = "make more with dapple.init(devices=n), on the command line with --devices n"
"""The advice for a process that has too few logical devices."""

RecomputeLevel = bool | Literal["all", "none"]
"""Whether backward computes the activations of all layers again: True or "all", False or "none"."""

RECOMPUTE_WORDS: Mapping[str, bool] = MappingProxyType({"all": True, "none": False})
"""The words for all layers and for none, of the options ``recompute`` and ``--recompute``."""


def as_flag(recompute: Any) -> Any:
    """Return True or False for a word of RECOMPUTE_WORDS, and any other value as it is."""
    return RECOMPUTE_WORDS.get(recompute, recompute) if isinstance(recompute, str) else recompute


@dataclass(frozen=True)
class StagePlan:
    """A stage: layers ``first_layer`` to ``last_layer`` (inclusive), with one replica on each of ``devices``.

    ``shares``: numbers in the proportion of the rows that the devices take of each micro-batch; None is equal shares.
    ``worker``: the virtual worker that the stage belongs to, if the plan has any (HetPipe).
    """

    first_layer: Count
    last_layer: Count
    devices: tuple[Count, ...]
    shares: tuple[Figure, ...] | None = None
    worker: Count | None = None

    @property
    def replicas(self) -> int:
        """r, the number of devices among which each micro-batch is split."""
        return len(self.devices)

    @cached_property
    def row_shares(self) -> tuple[int, ...]:
        """The shares as whole numbers (see ``whole_shares``); empty where they are equal."""
        return whole_shares(self.shares or ())

    def in_rows(self, samples: int) -> StagePlan:
        """Return the stage with shares that are the whole rows that each device takes of a micro-batch of ``samples``.

        Training takes the same rows. They are as equal, or as close to the given shares, as whole rows can be; a device
        may take none. If all devices take equally many rows, the result is the stage itself.
        """
        if not self.row_shares and samples % self.replicas == 0:
            return self
        bounds = [share_bounds(0, samples, i, self.replicas, self.row_shares) for i in range(self.replicas)]
        return replace(self, shares=tuple(float(end - begin) for begin, end in bounds))

    @property
    def fractions(self) -> tuple[float, ...]:
        """The part of each micro-batch that each device takes; their sum is 1."""
        total = sum(self.row_shares)
        return tuple(share / total for share in self.row_shares) or (1 / self.replicas,) * self.replicas


@dataclass(frozen=True)
class Plan:
    """A division of a model's training into stages, micro-batches and a schedule. Batch sizes are in samples.

    ``recompute``: the layers whose activations backward computes again instead of keeping them: all (True), none
    (False), or those with these numbers. ``predicted``: the simulator's prediction, if there is one. ``overlap``:
    AllReduce starts during the last backward, layer by layer, not after it. ``micro_batch_sizes``: the samples of each
    micro-batch of a whole batch, where they were given; ``micro_batch_size`` is then the largest. A batch of another
    size is cut in their proportion (see ``graph_passes.analysis.row_bounds``). ``window``: for asynchronous training;
    the batch is then a window, and micro-batches are those of all its minibatches. ``shard_optimizer``: each replica
    of a stage keeps the optimizer's slots of some of its variables, and updates these. Where stages have a ``worker``,
    each virtual worker is a pipeline of all layers, which runs ``micro_batches`` micro-batches of its own, an equal
    part of the batch. Raises PlanError naming the field that is wrong.
    """

    model: Name
    planner: Name
    global_batch_size: Count
    micro_batch_size: Count
    micro_batches: Count
    schedule: Annotated[str, msgspec.Meta(max_length=_LONGEST_SCHEDULE)]
    recompute: bool | tuple[Count, ...]
    stages: tuple[StagePlan, ...]
    predicted: Mapping[str, Any] | None = None
    overlap: bool = False
    micro_batch_sizes: tuple[Count, ...] | None = None
    window: WindowPlan | None = None
    shard_optimizer: bool = False

    @property
    def spec(self) -> ScheduleSpec:
        """The schedule, read from its text. Raises ScheduleError if the text is not a schedule."""
        return ScheduleSpec.parse(self.schedule)

    def build_schedule(self) -> Schedule:
        """Return the actions of every worker. Raises ScheduleError where the schedule is not for these stages and M."""
        return self.spec.build(len(self.stages), self.micro_batches)

    @property
    def uncut(self) -> bool:
        """Whether each batch is one micro-batch on one replica of each stage, as on one device."""
        return self.window is None and self.micro_batches == 1 and max(self.replicas) == 1

    @property
    def training(self) -> Training:
        """The training mode: ``Synchronous``, or the ``WindowPlan`` of asynchronous windows."""
        return self.window or Synchronous()

    def __post_init__(self) -> None:
        if not self.stages:
            raise PlanError("a plan needs at least one stage")
        if self.micro_batches < 1:
            raise PlanError(f"micro_batches is {self.micro_batches}; it must be at least 1")
        self.training.check(self.replicas, self.micro_batches, shard_optimizer=self.shard_optimizer)
        if self.micro_batch_sizes is not None:
            _check_sizes(self, self.micro_batch_sizes)
        check_virtual_workers(self.stages)
        expected = 0
        for index, stage in enumerate(self.stages):
            if index and stage.worker != self.stages[index - 1].worker:
                expected = 0
            if stage.last_layer < stage.first_layer:
                raise PlanError(
                    f"stages[{index}]: last_layer {stage.last_layer} is before first_layer {stage.first_layer}"
                )
            if stage.first_layer != expected:
                raise PlanError(
                    f"stages[{index}] holds layers {stage.first_layer} to {stage.last_layer}, but must start at "
                    f"{expected}"
                )
            distinct = {device for device in stage.devices if device >= 0}
            if not distinct or len(distinct) != len(stage.devices):
                raise PlanError(
                    f"stages[{index}].devices is {list(stage.devices)}: name at least one device, each once, from 0"
                )
            _check_shares(index, stage)
            expected = stage.last_layer + 1
        if not isinstance(self.recompute, bool):
            _check_layers(self.recompute, expected)
        if self.runs_whole_minibatches and self.shares:
            raise PlanError(
                "stages have shares, but replicas take whole minibatches of an asynchronous window in turn: leave out "
                "shares, or window"
            )

    @property
    def notation(self) -> str:
        """``DP``, ``straight``, ``one device``, or the replicas of each stage: ``8:8`` (DAPPLE, section VI.B).

        Where devices run several stages, the replicas of each worker, and how many stages: ``8:8, 2 stages per
        device``.
        """
        if self.virtual_workers:
            each = "|".join(worker.notation for worker in self.virtual_workers)
            return f"{len(self.virtual_workers)} virtual workers, {each}"
        stages_of = self.worker_map.stages_of
        replicas = [self.replicas[stages[0]] for stages in stages_of]
        text = ":".join(map(str, replicas))
        if len(stages_of) == 1:
            text = "DP" if replicas[0] > 1 else "one device"
        elif set(replicas) == {1}:
            text = "straight"
        least, most = min(map(len, stages_of)), max(map(len, stages_of))
        if most > 1:
            text += f", {most if least == most else f'{least} to {most}'} stages per device"
        return text

    @cached_property
    def sliced(self) -> int:
        """The number of micro-batches that AutoPipe's Slicer runs in two halves; ``micro_batches`` counts each half."""
        try:
            together = self.spec.together
        except ScheduleError:  # of a plan that is only shown
            return 0
        halves = len({action.micro_batch for action in together if action.kind == "B"})
        whole = self.micro_batches - halves
        if not 0 < halves <= min(len(self.stages), whole):
            return 0
        return halves if self.schedule == str(sliced_1f1b(len(self.stages), whole, halves)) else 0

    @property
    def whole_micro_batches(self) -> int:
        """The number of micro-batches; one that runs as two halves counts once."""
        return self.micro_batches - self.sliced

    @property
    def short_schedule(self) -> str:
        """The schedule as it is shown. A text that is not a schedule is shown too, in quotes."""
        try:
            return "dapple-a, sliced" if self.sliced else self.spec.short
        except ScheduleError:
            return quote(self.schedule)

    @property
    def headline(self) -> str:
        """The plan in a line: replicas, layers of each stage, micro-batches and schedule."""
        layers = ":".join(str(stage.last_layer - stage.first_layer + 1) for stage in self.stages)
        return (
            f"plan {self.notation}, layers {layers}, {self.describe_micro_batches()}, schedule {self.short_schedule}"
            f"{self.describe_recompute()}{', AllReduce overlaps backward' if self.overlap else ''}"
            f"{', sharded optimizer' if self.shard_optimizer else ''}"
        )

    def describe_recompute(self) -> str:
        """Return what is re-computed, to append to the schedule: ``, recompute of 3 of 5 layers``; "" for nothing."""
        count, every = len(self.recomputed), self.stages[-1].last_layer + 1
        return f", recompute of {'all' if count == every else f'{count} of {every}'} layers" if count else ""

    def describe(self, layer_names: Sequence[str] = ()) -> str:
        """Return a line for the whole plan, and one for each stage with its devices and layers.

        ``layer_names``: the names of all layers; without them layers are shown by number.
        """
        how = f"{self.describe_micro_batches()}, schedule {self.short_schedule}"
        if self.window is not None:
            how = self._describe_windows(self.window)
        sharded = ", sharded optimizer" if self.shard_optimizer else ""
        lines = [f"{format_count(len(self.stages), 'stage')}, {how}{self.describe_recompute()}{sharded}"]
        for i, stage in enumerate(self.stages):
            devices = f"device{'s' * (stage.replicas > 1)} {', '.join(map(str, stage.devices))}"
            first, last = (layer_names[i] if layer_names else i for i in (stage.first_layer, stage.last_layer))
            layers = f"{first} .. {last}" if layer_names else f"layers {first} to {last}"
            lines.append(f"  stage {i}, {devices}: {layers}")
        return "\n".join(lines)

    def _describe_windows(self, window: WindowPlan) -> str:
        """Return the minibatches, weights and warm-up of windows."""
        sizes = self._describe_parts(window.minibatches)
        order = self.versions.window
        parts = f" in {format_count(order.micro_batches, 'micro-batch')}" if order.micro_batches > 1 else ""
        warm_up = ",".join(map(str, order.warm_up))
        return f"windows of {window.minibatches} minibatches of {sizes}{parts}, weights {window.weights}, K={warm_up}"

    def _describe_parts(self, count: int) -> str:
        """Return the samples of each of ``count`` parts of a batch, as equal as they can be."""
        least, more = divmod(self.global_batch_size, count)
        return f"{least} or {least + 1} samples" if more else format_samples(least)

    def __str__(self) -> str:
        return self.describe()

    def __repr__(self) -> str:
        return f"<{self.headline}>"

    @property
    def sizes(self) -> tuple[int, ...]:
        """``micro_batch_sizes``; empty where micro-batches are equal."""
        return self.micro_batch_sizes or ()

    @property
    def starts(self) -> tuple[int, ...]:
        """The first layer of every stage but the first."""
        return tuple(stage.first_layer for stage in self.stages[1:])

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas of each stage."""
        return tuple(stage.replicas for stage in self.stages)

    def slot_replicas(self, stage: StagePlan) -> int:
        """Return the number of replicas of a stage that share the optimizer's slots out among them."""
        return stage.replicas if self.shard_optimizer else 1

    @property
    def runs_whole_minibatches(self) -> bool:
        """Whether replicas take whole minibatches of a window in turn, and compute each as one device does."""
        return self.training.in_turn

    @property
    def sharing(self) -> tuple[int, ...]:
        """The number of replicas of each stage that share a micro-batch: all, or 1 if they take minibatches in turn."""
        return sharing_replicas(self.replicas, in_turn=self.runs_whole_minibatches)

    @property
    def shares(self) -> tuple[tuple[int, ...], ...]:
        """The ``row_shares`` of each stage; empty where no stage has unequal ones."""
        shares = tuple(stage.row_shares for stage in self.stages)
        return shares if any(shares) else ()

    @property
    def virtual_workers(self) -> tuple[Plan, ...]:
        """The pipeline of each virtual worker on its part of the batch, as a plan of its own; empty without any."""
        count = len({stage.worker for stage in self.stages if stage.worker is not None})
        return tuple(
            replace(
                self,
                global_batch_size=self.global_batch_size // count,
                stages=tuple(replace(stage, worker=None) for stage in self.stages if stage.worker == worker),
                predicted=None,
            )
            for worker in range(count)
        )

    @property
    def least_samples(self) -> int:
        """The least size of a micro-batch with which every replica of every stage gets a sample."""
        return max(least_rows(stage.replicas, stage.row_shares) for stage in self.stages)

    @property
    def worker_map(self) -> WorkerMap:
        """The workers: stages with the same devices are on one worker."""
        workers = list(dict.fromkeys(stage.devices for stage in self.stages))
        return WorkerMap.of([workers.index(stage.devices) for stage in self.stages])

    @property
    def versions(self) -> Versions:
        """The order of the plan's asynchronous window, and the weights that its actions use.

        Raises PlanError for a synchronous plan.
        """
        return self.training.versions(self.replicas)

    @property
    def device_count(self) -> int:
        """The number of devices that the plan uses."""
        return len({device for stage in self.stages for device in stage.devices})

    @property
    def device_numbers(self) -> range:
        """The numbers of devices from 0 to the largest that the plan uses."""
        return range(1 + max(max(stage.devices) for stage in self.stages))

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The numbers of the layers that backward computes again."""
        if isinstance(self.recompute, bool):
            return tuple(range(self.stages[-1].last_layer + 1)) if self.recompute else ()
        return self.recompute

    def _without_slices(self) -> Plan:
        """Return the plan without sliced micro-batches: two halves become one micro-batch again."""
        cut, sizes = 2 * self.sliced, self.sizes
        whole = (*map(sum, zip(sizes[:cut:2], sizes[1:cut:2], strict=True)), *sizes[cut:])
        return replace(self, schedule="dapple-a", micro_batches=len(whole), micro_batch_sizes=whole)

    def describe_micro_batches(self) -> str:
        """Return M and the samples of each, such as ``3 micro-batches of 2 or 3 samples`` for a batch of 8.

        Given sizes are named in order, ``3 micro-batches of 2, 2 and 4 samples``; of many only the range. Of a window:
        ``64 minibatches of 8 samples``, or ``8 minibatches of 4 micro-batches of 2 samples``. Sliced ones are counted
        whole: ``8 micro-batches of 4 samples, the first 2 in two halves``.
        """
        if self.sliced:
            halves = f"the first {self.sliced}" if self.sliced > 1 else "the first one"
            return f"{self._without_slices().describe_micro_batches()}, {halves} in two halves"
        sizes = self._describe_parts(self.micro_batches)
        if len(set(self.sizes)) > 1:
            sizes = f"{_list_sizes(self.sizes)} samples"
        return self.training.describe_parts(self.micro_batches, sizes)

    def runs(self, stage: int) -> tuple[range, ...]:
        """Return the ranges of consecutive layers of a stage that are re-computed together."""
        own = self.stages[stage]
        return find_runs(self.recomputed, own.first_layer, own.last_layer + 1)

    @staticmethod
    def from_json(data: Any) -> Plan:
        """Return the plan of parsed JSON; PlanError names the field that is wrong."""
        if isinstance(data, dict) and data.get("recompute") is None:  # a file may leave it out
            data = {**data, "recompute": False}
        plan = read_record(data, Plan, PlanError, file_format=FORMAT)
        _check_size(plan)
        if plan.window is not None:  # its order follows from the window, which Plan has checked
            if data["window"].get("weights") is None:  # has a default in Python only
                raise PlanError("window.weights is missing")
            return plan
        try:
            for part in plan.virtual_workers or (plan,):
                part.spec.check(len(part.stages), part.micro_batches)
        except ScheduleError as error:
            raise PlanError(f"schedule: {error}") from error
        return plan

    def to_json(self) -> dict[str, Any]:
        """Return the plan as its file holds it."""
        data = {"format": FORMAT, **asdict(self)}
        for name in ("overlap", "shard_optimizer", "micro_batch_sizes", "window"):
            if not data[name]:
                del data[name]  # the default is not written
        for stage in data["stages"]:
            for name in ("shares", "worker"):
                if stage[name] is None:
                    del stage[name]
        return data

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to ``path`` as JSON; a failure leaves the old file.

        Raises PlanError where the file cannot be written.
        """
        try:
            write_atomically(Path(path), json.dumps(self.to_json(), indent=2) + "\n")
        except (OSError, ValueError) as error:
            raise PlanError(f"{path}: the plan cannot be written: {describe_reason(error)}") from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan; PlanError names the file and the field that is wrong."""
        with naming_file(path, PlanError):
            return Plan.from_json(read_json(path, PlanError))


def check_workers(plan: Plan) -> None:
    """Raise PlanError unless exactly those stages share devices that share a worker in the plan's schedule.

    The stages of one worker have the same devices, and no other worker has any of them. Raises ScheduleError where the
    schedule is for another number of stages.
    """
    workers = plan.spec.worker_map(len(plan.stages))
    stage_of: dict[int, int] = {}
    for stages in workers.stages_of:
        devices = plan.stages[stages[0]].devices
        for stage in stages[1:]:
            if plan.stages[stage].devices != devices:
                raise PlanError(
                    f"schedule {plan.spec.short} runs stages {list(stages)} on one worker, but "
                    f"stage {stages[0]} is on devices {list(devices)} and stage {stage} on "
                    f"{list(plan.stages[stage].devices)}: give them the same devices"
                )
            if plan.stages[stage].row_shares != plan.stages[stages[0]].row_shares:
                raise PlanError(
                    f"schedule {plan.spec.short} runs stages {list(stages)} on one worker, but "
                    f"stages {stages[0]} and {stage} have unequal shares, {list(plan.stages[stages[0]].fractions)} and "
                    f"{list(plan.stages[stage].fractions)}: give them the same"
                )
        for device in devices:
            if device in stage_of:
                raise PlanError(
                    f"device {device} is in stage {stage_of[device]} and in stage {stages[0]}: a device can be in only "
                    "one stage, or in stages that the schedule runs on one worker"
                )
            stage_of[device] = stages[0]


def check_virtual_workers(stages: Sequence[StagePlan]) -> None:
    """Raise PlanError unless no stage has a ``worker``, or each of 0, 1 ... has all layers on devices of its own."""
    workers = [stage.worker for stage in stages if stage.worker is not None]
    if not workers:
        return
    if len(workers) < len(stages) or workers != sorted(workers):
        given = [stage.worker for stage in stages]
        raise PlanError(f"the stages have the workers {given}: give all stages one, in rising order from 0, or none")
    distinct = sorted(set(workers))
    if distinct != list(range(len(distinct))):
        raise PlanError(f"the stages have the workers {distinct}: number them from 0")
    ends = {stage.worker: stage.last_layer for stage in stages}
    if len(set(ends.values())) > 1:
        raise PlanError(f"the virtual workers end at the layers {list(ends.values())}: each must have all layers")
    owner: dict[int, int | None] = {}
    for index, stage in enumerate(stages):
        if len(stage.devices) != 1:
            raise PlanError(f"stages[{index}] of a virtual worker is on devices {list(stage.devices)}: give it one")
        if stage.devices[0] in owner:
            raise PlanError(f"device {stage.devices[0]} is in two stages of virtual workers: a device can be in one")
        owner[stage.devices[0]] = stage.worker


def _check_shares(index: int, stage: StagePlan) -> None:
    """Raise PlanError unless the shares of stage ``index`` are absent, or a number above 0 for each device."""
    shares: object = stage.shares  # not yet known to be what its type says
    if stage.shares is None:
        return
    if not isinstance(shares, (list, tuple)):
        raise PlanError(f"stages[{index}].shares is {quote(shares)}, not a list of numbers; None is equal shares")
    if len(stage.shares) != stage.replicas:
        raise PlanError(
            f"stages[{index}].shares has {format_count(len(stage.shares), 'number')}, but the stage has "
            f"{format_count(stage.replicas, 'device')}: give one for each, or none for equal shares"
        )
    for i, share in enumerate(stage.shares):
        if not (is_finite(share) and share > 0):
            raise PlanError(
                f"stages[{index}].shares[{i}] is {quote(share)}, not a finite number above 0: leave a device that "
                "is to take no rows out of devices"
            )


def _check_layers(layers: tuple[int, ...], count: int) -> None:
    """Raise PlanError unless ``layers`` are ascending numbers below ``count``."""
    for index, layer in enumerate(layers):
        if layer not in range(count):
            raise PlanError(f"recompute[{index}] is layer {layer}, but the layers are 0 to {count - 1}")
        if index and layer <= layers[index - 1]:
            raise PlanError(
                f"recompute[{index}] is layer {layer} after {layers[index - 1]}: name each layer once, ascending"
            )


def _check_sizes(plan: Plan, sizes: tuple[int, ...]) -> None:
    """Raise PlanError unless the given sizes of micro-batches agree with the plan's other fields."""
    for index, size in enumerate(sizes):
        if size < 1:
            raise PlanError(f"micro_batch_sizes[{index}] is {size}; a micro-batch has at least 1 sample")
    if len(sizes) != plan.micro_batches:
        raise PlanError(f"micro_batch_sizes has {len(sizes)} sizes, but micro_batches is {plan.micro_batches}")
    if sum(sizes) != plan.global_batch_size:
        raise PlanError(f"micro_batch_sizes add up to {sum(sizes)}, but global_batch_size is {plan.global_batch_size}")
    if max(sizes) != plan.micro_batch_size:
        raise PlanError(
            f"the largest of micro_batch_sizes is {max(sizes)}, but micro_batch_size is {plan.micro_batch_size}"
        )


def _list_sizes(sizes: tuple[int, ...]) -> str:
    if len(sizes) > _NAMED_SIZES:
        return f"{min(sizes)} to {max(sizes)}"
    return f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"


def _check_size(plan: Plan) -> None:
    if plan.micro_batches > _MOST_MICRO_BATCHES:
        raise PlanError(f"micro_batches is {plan.micro_batches}; a plan has at most {_MOST_MICRO_BATCHES}")
    if plan.stages[-1].last_layer >= _MOST_LAYERS:
        raise PlanError(f"the stages hold {plan.stages[-1].last_layer + 1} layers; a plan has at most {_MOST_LAYERS}")
