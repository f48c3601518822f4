"""What a plan will do: a step simulated action by action under the cost model, and what follows from it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dapple_tf.drawing.chart import scale_bytes, scale_time
from dapple_tf.errors import PlanError
from dapple_tf.plan import Plan
from dapple_tf.plan_check import check_plan
from dapple_tf.simulator.communication_ratio import activation_communication_ratio
from dapple_tf.simulator.costs import StageCosts, stage_costs
from dapple_tf.simulator.critical import Event, critical_path, critical_stage
from dapple_tf.simulator.engine import decode
from dapple_tf.simulator.execution import Execution, execute
from dapple_tf.simulator.memory import memory_over_time, peak_bytes, usable_bytes
from dapple_tf.simulator.named_orders import named_order
from profiler.cluster import Cluster
from profiler.profile import Profile


@dataclass(frozen=True, eq=False)
class Timeline:
    """A simulated step. ``one_device_seconds``: one device running the whole batch; ``device_memory``: bytes."""

    plan: Plan
    execution: Execution
    one_device_seconds: float
    device_memory: float

    @property
    def costs(self) -> tuple[StageCosts, ...]:
        """Of each stage."""
        return self.execution.costs

    @property
    def step_seconds(self) -> float:
        """Until the last event ends."""
        return self.execution.step_seconds

    @property
    def speedup(self) -> float:
        """Against one device running the whole batch in the same micro-batches; 1 where nothing takes any time."""
        return self.one_device_seconds / self.step_seconds if self.step_seconds else 1.0

    @cached_property
    def utilisation(self) -> tuple[float, ...]:
        """The fraction of the step that the devices of each stage compute; transfers and AllReduce do not count."""
        if not self.step_seconds:
            return (1.0,) * len(self.costs)
        m = self.plan.micro_batches
        # Not more than 1, which adding up the same seconds in another order may exceed by a rounding.
        return tuple(
            min(1.0, m * (cost.forward_seconds + cost.backward_seconds) / self.step_seconds) for cost in self.costs
        )

    @property
    def bubble(self) -> float:
        """The idle fraction of device time."""
        replicas = self.plan.replicas
        return 1.0 - sum(r * busy for r, busy in zip(replicas, self.utilisation, strict=True)) / sum(replicas)

    @property
    def acr(self) -> float:
        """See ``activation_communication_ratio``."""
        return activation_communication_ratio(self.costs)

    @cached_property
    def peak_memory_bytes(self) -> tuple[float, ...]:
        """The most that one device of each stage holds."""
        return peak_bytes(self.execution)

    @property
    def fits(self) -> tuple[bool, ...]:
        """Whether each stage's peak is within the device's memory."""
        return tuple(peak <= usable_bytes(self.device_memory) for peak in self.peak_memory_bytes)

    def memory(self, stage: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Times (seconds), and the bytes that one device of ``stage`` holds from each on."""
        times, held = memory_over_time(self.execution, stage)
        return tuple(times.tolist()), tuple(held.tolist())

    @cached_property
    def critical_path(self) -> tuple[Event, ...]:
        """The events, one starting as the other ends, that make the step as long as it is."""
        return critical_path(self.execution)

    @property
    def critical_stage(self) -> int:
        """The stage whose compute fills most of the critical path."""
        return critical_stage(self.critical_path)

    def actions(self, stage: int) -> str:
        """What the stage runs: ``0F0 0F1 0B0 ...``."""
        order, m = self.execution.order[stage].tolist(), self.execution.micro_batches
        return " ".join(str(decode(action, stage, m)) for action in order)

    def to_json(self) -> dict[str, Any]:
        """What ``dapple simulate --json`` prints; seconds and bytes. An infinite ``acr`` is null."""
        return {
            "step_seconds": self.step_seconds,
            "speedup": self.speedup,
            "bubble": self.bubble,
            "peak_memory_bytes": list(self.peak_memory_bytes),
            "acr": self.acr if math.isfinite(self.acr) else None,
            "utilisation": list(self.utilisation),
            "fits": list(self.fits),
            "critical_stage": self.critical_stage,
            "critical_path": [str(event) for event in self.critical_path],
            "stages": [
                {
                    "forward_seconds": cost.forward_seconds,
                    "backward_seconds": cost.backward_seconds,
                    **({"weights_seconds": cost.weights_seconds} if self.execution.splits else {}),
                    "allreduce_seconds": cost.allreduce_seconds,
                    "actions": self.actions(stage),
                }
                for stage, cost in enumerate(self.costs)
            ],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save a picture (.png), a web page (.html) or a trace for Perfetto (.json), all or nothing.

        Raises UsageError for another suffix or a path that cannot be written.
        """
        from dapple_tf.drawing.save import check_path, save_chart
        from dapple_tf.simulator.picture import make_chart
        from dapple_tf.timeline.recording import simulated_recording
        from dapple_tf.timeline.trace_file import recording_data

        save_chart(make_chart(self), check_path(path), recording_data(simulated_recording(self)))

    @property
    def summary(self) -> str:
        """Step time, bubble and speed-up in one line."""
        return f"{_seconds(self.step_seconds)}, bubble {self.bubble:.1%}, speed-up {self.speedup:.2f}"

    def __str__(self) -> str:
        parts = ("F", "B", "W") if self.execution.splits else ("F", "B")
        head = ("stage", "devices", "layers", *parts, "AllReduce", "busy", "peak memory")
        rows = [head, *(self._row(stage) for stage in range(len(self.costs)))]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = [f"{self.summary}, ACR {self.acr:.3f}, critical stage {self.critical_stage}"]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        short = [stage for stage, fits in enumerate(self.fits) if not fits]
        for stage in short:
            over = self.peak_memory_bytes[stage] - self.device_memory
            lines.append(
                f"stage {stage} does not fit: it lacks {_bytes(over)} of the device's {_bytes(self.device_memory)}"
            )
        return "\n".join(lines)

    def _row(self, stage: int) -> tuple[str, ...]:
        planned, cost = self.plan.stages[stage], self.costs[stage]
        return (
            str(stage),
            list_ranges(planned.devices),
            f"{planned.first_layer}-{planned.last_layer}",
            _seconds(cost.forward_seconds),
            *self._row_of_backward(cost),
            _seconds(cost.allreduce_seconds),
            f"{self.utilisation[stage]:.0%}",
            _bytes(self.peak_memory_bytes[stage]),
        )

    def _row_of_backward(self, cost: StageCosts) -> tuple[str, ...]:
        if not self.execution.splits:
            return (_seconds(cost.backward_seconds),)
        return _seconds(cost.backward_seconds - cost.weights_seconds), _seconds(cost.weights_seconds)


def simulate(plan: Plan, profile: Profile, cluster: Cluster, *, optimizer_slots: int = 2) -> Timeline:
    """Execute one step of ``plan`` under the design's cost model.

    ``optimizer_slots``: values that the optimizer keeps of each weight. Raises PlanError for a plan that the profile
    or the cluster cannot carry, and ScheduleError for a schedule that does not exist. A plan that needs more memory
    than the devices have is simulated all the same: ``Timeline.fits`` says so.
    """
    if optimizer_slots < 0:
        raise PlanError(f"optimizer_slots is {optimizer_slots}; it must be at least 0")
    check_plan(plan, profile, cluster)
    order = named_order(plan.schedule, len(plan.stages), plan.micro_batches).order
    costs = stage_costs(plan, profile, cluster, optimizer_slots=optimizer_slots)
    b = plan.micro_batch_size
    alone = float(profile.forward_seconds(b).sum() + profile.backward_seconds(b).sum())
    return Timeline(plan, execute(order, costs), plan.micro_batches * alone, cluster.device_memory)


def list_ranges(numbers: tuple[int, ...]) -> str:
    """Numbers with runs joined: ``0-3,8``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def _seconds(seconds: float) -> str:
    scale, unit = scale_time(seconds)
    return f"{seconds * scale:.4g} {unit}"


def _bytes(count: float) -> str:
    size, unit = scale_bytes(count)
    return f"{count / size:.4g} {unit}"
