"""The schedule for stages that are given: policy, D and M by the simulator, and why (DAPPLE, sections V.C and VI.D)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dapple_tf.errors import PlanError
from dapple_tf.planner.pricing import POLICIES, fastest_schedule, stage_cost_arrays
from dapple_tf.simulator.communication_ratio import activation_communication_ratio
from dapple_tf.simulator.costs import StageCosts
from dapple_tf.simulator.memory import usable_bytes
from graph_passes.schedules.policies import (
    abbreviate_schedule,
    build_schedule,
    count_micro_batches,
    count_stages,
    read_policy,
)
from profiler.units import format_bytes

# A policy that holds more micro-batches must be faster by more than this, or memory is spent for nothing.
_WORTH = 1e-3


@dataclass(frozen=True)
class Choice:
    """A schedule and a number of micro-batches; ``seconds`` of the step under each policy that fits, by its name.

    ``acr``: see ``activation_communication_ratio``. ``measured``: from a profile, and not from an estimate of each
    layer's work. ``memory``: bytes of a device; ``held``: how many micro-batches each stage has room for, with that M.
    """

    schedule: str
    micro_batches: int
    acr: float
    seconds: Mapping[str, float]
    measured: bool
    memory: float
    held: tuple[int, ...]

    def __str__(self) -> str:
        base = "" if self.measured else " (estimated)"
        text = f"schedule {abbreviate_schedule(self.schedule)}, M = {self.micro_batches}: ACR {self.acr:.3f}{base}"
        ours = self.seconds[self.schedule]
        others = [
            f"{name} {_compare(seconds, ours)}" for name, seconds in self.seconds.items() if name != self.schedule
        ]
        if others:
            text += f"; {', '.join(others)}"
        limit = None if count_stages(self.schedule) else read_policy(self.schedule)[1]
        if limit is not None:
            stage = min(range(len(self.held)), key=lambda s: self.held[s])
            text += f"; D = {limit}: a device's {format_bytes(self.memory)} hold no more micro-batches of stage {stage}"
        return text


def choose_schedule(
    costs: Mapping[int, Sequence[StageCosts]], memory: float, *, policies: Sequence[str] = POLICIES, measured: bool
) -> Choice:
    """The fastest of the ``policies`` over all numbers of micro-batches M; of equals the first.

    ``costs``: of each stage, by M. ``memory``: bytes of a device. D is what the memory holds (DAPPLE, V.C). Raises
    PlanError where no M fits: which stage lacks how many bytes, and what would help; ScheduleError for explicit K_i,
    or a text, that cannot be.
    """
    for policy in policies:
        if count_stages(policy):
            most = max(costs)
            build_schedule(policy, len(costs[most]), count_micro_batches(policy, costs) or most)
    best: Choice | None = None
    for m, stages in sorted(costs.items()):
        rows = stage_cost_arrays(stages)
        found = [fastest_schedule(rows, m, usable_bytes(memory), policy) for policy in policies]
        seconds = {entry.schedule: entry.seconds for entry in found if entry.seconds < float("inf")}
        if not seconds:
            continue
        least = min(seconds.values())
        name = next(name for name, value in seconds.items() if value <= least * (1 + _WORTH))
        if best is None or seconds[name] < best.seconds[best.schedule] * (1 - _WORTH):
            held = tuple(_count_held(stage, memory, m) for stage in stages)
            acr = activation_communication_ratio(stages)
            best = Choice(name, m, acr, seconds, measured, memory, held)
    if best is None:
        raise PlanError(_explain_shortage(costs, memory, policies))
    return best


def _count_held(stage: StageCosts, memory: float, micro_batches: int) -> int:
    """How many micro-batches' stashes fit beside the rest, at most all."""
    room = usable_bytes(memory) - stage.fixed_bytes - stage.working_bytes
    return micro_batches if room >= micro_batches * stage.stash_bytes else max(0, int(room / stage.stash_bytes))


def _explain_shortage(costs: Mapping[int, Sequence[StageCosts]], memory: float, policies: Sequence[str]) -> str:
    """The stage that lacks most with the smallest micro-batches, one in flight, and what would help."""
    m = max(costs)
    needs = [stage.fixed_bytes + stage.working_bytes + stage.stash_bytes for stage in costs[m]]
    worst = max(range(len(needs)), key=lambda s: needs[s])
    stage, lacks = costs[m][worst], needs[worst] - memory
    if needs[worst] <= usable_bytes(memory):
        return (
            f"schedule {' or '.join(policies)} holds more micro-batches of stage {worst}, "
            f"{format_bytes(stage.stash_bytes)} each with M = {m}, than a device's {format_bytes(memory)} have room "
            "for: use schedule 'auto'"
        )
    text = (
        f"no schedule fits: with M = {m} and one micro-batch in flight stage {worst} needs "
        f"{format_bytes(needs[worst])} (weights, gradients and slots {format_bytes(stage.fixed_bytes)}, a stash "
        f"{format_bytes(stage.stash_bytes)}, at work {format_bytes(stage.working_bytes)}) and lacks "
        f"{format_bytes(lacks)} of a device's {format_bytes(memory)}"
    )
    if stage.fixed_bytes > memory:
        return f"{text}. Its weights alone do not fit: use more stages, or an optimizer of fewer slots"
    return f"{text}. Use more micro-batches, or more stages: recompute=True saves nothing of one micro-batch in flight"


def _compare(seconds: float, ours: float) -> str:
    if not ours or abs(seconds / ours - 1) < _WORTH / 2:
        return "takes as long"
    return f"takes {abs(seconds / ours - 1):.1%} {'longer' if seconds > ours else 'less, but holds more'}"
