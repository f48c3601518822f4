"""The two training modes: synchronous steps, which update the weights once per batch, and asynchronous windows.

``Plan.training`` is a ``Synchronous`` or a ``WindowPlan``. Both have the same properties, so that what differs between
the two is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.errors import PlanError
from dapple_tf.graph_passes.schedules.weight_versions import POLICIES, Versions, WeightPolicy, weight_versions
from dapple_tf.graph_passes.schedules.window import Window, depth_warm_up, round_robin_warm_up
from dapple_tf.profiler.records import Count
from dapple_tf.profiler.units import format_samples
from dapple_tf.wording import format_count

USUAL_MINIBATCHES = 64
"""Minibatches of a window where none are given."""


@dataclass(frozen=True)
class Words:
    """The words for what one call trains: a step, or an asynchronous window.

    ``unit``, ``units``: one, and several. ``batch``: the samples that a call takes. ``training``: the label of the
    progress. ``loss``: the name of a call's loss, and ``curve`` of a curve of these.
    """

    unit: str
    units: str
    batch: str
    training: str
    loss: str
    curve: str


@dataclass(frozen=True)
class Synchronous:
    """Training in steps: all micro-batches of a batch use the same weights, which change once."""

    words: ClassVar[Words] = Words("step", "steps", "batch", "training", "loss", "loss")
    minibatches: ClassVar[int] = 1
    parts: ClassVar[int] = 1
    in_turn: ClassVar[bool] = False

    def check(self, replicas: Sequence[int], micro_batches: int, *, shard_optimizer: bool) -> None:
        """Accept any number of micro-batches, and a sharded optimizer."""

    def check_samples(self, samples: int, micro_batches: int, replicas: Sequence[int]) -> None:
        """Accept any batch: one that is small is cut into fewer micro-batches."""

    def cuts_evenly(self, samples: int, micro_batches: int, size: int) -> bool:
        """Return whether micro-batches of ``size`` are a whole batch of ``samples``."""
        return size * micro_batches == samples

    def versions(self, replicas: Sequence[int]) -> Versions:
        """Raise PlanError: only windows have several versions of the weights."""
        raise PlanError("the plan is synchronous: it has no window")

    def describe_parts(self, micro_batches: int, sizes: str) -> str:
        """Return M and the ``sizes`` of each."""
        return f"{format_count(micro_batches, 'micro-batch')} of {sizes}"

    def describe_step(self, schedule: str, micro_batches: int) -> str:
        """Return the schedule and M, for a title."""
        return f"{schedule}, M = {micro_batches}"

    def describe_order(self, replicas: Sequence[int]) -> Mapping[str, Sequence[str]]:
        """Return no columns: the order follows from the schedule."""
        return {}


@dataclass(frozen=True)
class WindowPlan:
    """The asynchronous part of a plan: a window has ``minibatches`` minibatches, and each updates the weights.

    ``weights``: see ``graph_passes.schedules.weight_versions``. ``depth``: the minibatches in flight on the first
    stage, or None for as many as keep the pipeline busy. ``micro_batches``: with "2bw", the micro-batches of each
    minibatch, or None for as many as the warm-up of the first stage. Raises PlanError for values out of range.
    """

    minibatches: Count
    weights: WeightPolicy = "stash"
    depth: Count | None = None
    micro_batches: Count | None = None

    def __post_init__(self) -> None:
        _check_number("minibatches", self.minibatches)
        if self.weights not in POLICIES:
            raise PlanError(f"weights={self.weights!r}: give one of {', '.join(map(repr, POLICIES))}")
        if self.depth is not None:
            _check_number("depth", self.depth)
        if self.micro_batches is not None:
            if self.in_turn:
                raise PlanError(
                    f"micro_batches={self.micro_batches!r} with weights={self.weights!r}: in a window each minibatch "
                    "runs whole, so give minibatches only, or weights='2bw', which cuts them"
                )
            _check_number("micro_batches", self.micro_batches)

    @property
    def in_turn(self) -> bool:
        """Whether replicas of a stage take whole minibatches in turn; else they share each micro-batch."""
        return self.weights != "2bw"

    @property
    def parts(self) -> int:
        """The number of micro-batches of a window, as far as it is known without the stages: the least it can be."""
        return self.minibatches * (self.micro_batches or 1)

    @property
    def words(self) -> Words:
        """The words by which messages name a window of this plan, and its loss."""
        units = f"windows of {format_count(self.minibatches, 'minibatch')}"
        return Words("window", units, "window", "training window", "mean loss", "mean loss of a window")

    def check(self, replicas: Sequence[int], micro_batches: int, *, shard_optimizer: bool) -> None:
        """Raise PlanError unless a plan with these fields can train in windows."""
        if micro_batches != (size := self.versions(replicas).window.size):
            raise PlanError(f"micro_batches is {micro_batches}, but the window has {size} in all its minibatches")
        if shard_optimizer:
            raise PlanError(
                "shard_optimizer is true, but the plan is for asynchronous windows, whose replicas each store weights "
                "of their own: leave out shard_optimizer, or window"
            )

    def minibatch_size(self, samples: int) -> int:
        """Return the samples of a minibatch to plan for; PlanError unless a window of ``samples`` divides evenly."""
        if samples < 1 or samples % self.minibatches:
            raise PlanError(
                f"global_batch_size={samples} is no multiple of minibatches={self.minibatches}: with mode='async' it "
                "is the samples of a whole window, and every minibatch has as many"
            )
        return samples // self.minibatches

    def check_samples(self, samples: int, micro_batches: int, replicas: Sequence[int]) -> None:
        """Raise PlanError unless a window of ``samples`` has a sample for each replica of each micro-batch."""
        if samples // micro_batches < max(replicas):
            raise PlanError(
                f"a window of {format_samples(samples)} is cut into {micro_batches} minibatches or micro-batches, and "
                f"each needs at least {format_samples(max(replicas))}: give a larger window (the batch of a call is "
                "one), leave this one out (drop_remainder=True), or give fewer minibatches"
            )

    def cuts_evenly(self, samples: int, micro_batches: int, size: int) -> bool:
        """Return whether ``size`` is that of the largest parts of a window of ``samples``; others have one less."""
        return size == -(-samples // micro_batches)

    def describe_parts(self, micro_batches: int, sizes: str) -> str:
        """Return the number of minibatches, and of the micro-batches of each, and the ``sizes`` of these."""
        each = "" if self.in_turn else f"{format_count(micro_batches // self.minibatches, 'micro-batch')} of "
        return f"{format_count(self.minibatches, 'minibatch')} of {each}{sizes}"

    def describe_step(self, schedule: str, micro_batches: int) -> str:
        """Return the minibatches and the weights, for a title: the schedule follows from these and the stages."""
        return f"window of {self.minibatches} minibatches, weights {self.weights!r}"

    def describe_order(self, replicas: Sequence[int]) -> Mapping[str, Sequence[str]]:
        """Return K of each stage and the versions of the weights that its replicas keep, as columns of a table."""
        versions = self.versions(replicas)
        return {"K": [*map(str, versions.window.warm_up)], "versions": [*map(str, versions.slots)]}

    def warm_up(self, replicas: Sequence[int]) -> tuple[int, ...]:
        """Return K_s of each stage, for stages of ``replicas`` devices.

        Raises PlanError for a depth if stages are replicated: it is defined for pipelines without replicas only.
        """
        if self.depth is not None:
            if max(replicas) > 1:
                raise PlanError(
                    f"depth={self.depth} with replicas {list(replicas)}: a depth is for pipelines without replicas; "
                    "leave one of them out"
                )
            return depth_warm_up(len(replicas), self.depth)
        return round_robin_warm_up(replicas) if self.in_turn else tuple(range(len(replicas), 0, -1))

    def versions(self, replicas: Sequence[int]) -> Versions:
        """Return the order of a window on stages of ``replicas`` devices, and the weights that each action uses.

        Raises PlanError for a depth with replicas, and for too few micro-batches;
        ScheduleError where the minibatches cannot be dealt to the replicas, and where the order deadlocks.
        """
        warm_up = self.warm_up(replicas)
        count = 1 if self.in_turn else self.micro_batches or warm_up[0]
        if not self.in_turn and count < warm_up[0]:
            raise PlanError(
                f"weights='2bw' with micro_batches={count}: each minibatch needs at least {warm_up[0]} "
                "micro-batches, the warm-up of the first stage, or two versions of the weights are not enough"
            )
        window = Window(self.minibatches, tuple(replicas), warm_up, count, self.in_turn)
        return weight_versions(window, self.weights)


Training = Synchronous | WindowPlan
"""A training mode."""


def _check_number(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise PlanError(f"{name}={value!r}: give a whole number from 1 on")
