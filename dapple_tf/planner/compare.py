"""``dapple.compare``: the plans of all planners for one profile and cluster, and why each is slower."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapple_tf.drawing.bars import Bar, BarChart, draw_bars, make_bars_page
from dapple_tf.drawing.plan import PlanDrawing
from dapple_tf.drawing.save import check_path
from dapple_tf.drawing.table import format_table
from dapple_tf.errors import ClusterError, PlanError, ProfileError, ScheduleError
from dapple_tf.planner.api import make_problem, predict_plan
from dapple_tf.planner.explain import describe_loss, describe_task, step_parts
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.planner.refusal import describe_other_reason, lacks_memory
from dapple_tf.planner.registry import PLANNERS, check_planner, find_result, may_fit
from dapple_tf.plans import Plan, RecomputeLevel
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.files import atomic_replacement, write_atomically
from dapple_tf.profiler.profile import Profile
from dapple_tf.profiler.units import format_bytes, format_samples, format_seconds_fixed
from dapple_tf.timeline.plan_drawing import describe_plan_drawing
from dapple_tf.timeline.timeline import Timeline

FORMAT = "dapple-comparison/1"

_HEADER = ("plan", "micro-batches", "schedule", "step", "bubble", "ACR", "memory", "planned in")
_REFUSALS = (PlanError, ScheduleError, ClusterError, ProfileError)


@dataclass(frozen=True)
class ComparedPlan:
    """The plan that one planner chose; None where it has no plan, and ``reason`` says why.

    ``planner_seconds``: the seconds that the planner took. ``notation``: see ``explain.notation``. ``acr``: the
    activation communication ratio. ``parts``: seconds of the step, "compute", "allreduce" and "wait" (see
    ``step_parts``). ``reason``: why the plan is slower than the fastest. The prediction of the simulator is in the
    plan.
    """

    planner: str
    planner_seconds: float
    reason: str
    plan: Plan | None = None
    notation: str = ""
    acr: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        """The predicted seconds of a step; infinite where there is no plan."""
        return float(self._predicted["step_seconds"]) if self.plan else float("inf")

    @property
    def bubble(self) -> float | None:
        """The idle fraction of device time; None where there is no plan."""
        return float(self._predicted["bubble"]) if self.plan else None

    @property
    def peak_memory_bytes(self) -> float | None:
        """The most bytes that any device holds; None where there is no plan."""
        return float(max(self._predicted["peak_memory_bytes"])) if self.plan else None

    @property
    def _predicted(self) -> Mapping[str, Any]:
        return (self.plan.predicted if self.plan else None) or {}

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON values; where there is no plan, the fields that need one are null."""
        return {
            "planner": self.planner,
            "planner_seconds": self.planner_seconds,
            "notation": self.notation or None,
            "step_seconds": self.step_seconds if self.plan else None,
            "speedup": self._predicted.get("speedup"),
            "bubble": self.bubble,
            "acr": self.acr if self.plan and math.isfinite(self.acr) else None,
            "peak_memory_bytes": self.peak_memory_bytes,
            "parts": dict(self.parts) or None,
            "reason": self.reason,
            "plan": self.plan.to_json() if self.plan else None,
        }

    def cells(self) -> dict[str, str]:
        """Return the cells of a table by their header; without a plan only the planning time."""
        if self.plan is None:
            return {"planned in": format_seconds_fixed(self.planner_seconds)}
        values = (
            self.notation,
            _micro_batches(self.plan),
            self.plan.short_schedule + self.plan.describe_recompute(),
            format_seconds_fixed(self.step_seconds),
            f"{self.bubble:.1%}",
            f"{self.acr:.3f}",
            format_bytes(self.peak_memory_bytes or 0.0),
            format_seconds_fixed(self.planner_seconds),
        )
        return dict(zip(_HEADER, values, strict=True))


@dataclass(frozen=True)
class Comparison:
    """The plans of several planners, the fastest first, then those without a plan; ``str`` is a table.

    ``devices``: how many the cluster has. ``device_memory``: bytes of a device, of the smallest if they differ.
    ``profile``, ``cluster``: what was planned for; a web page shows them.
    """

    model: str
    devices: int
    device_memory: float
    global_batch_size: int
    rows: tuple[ComparedPlan, ...]
    profile: Profile | None = field(default=None, repr=False)
    cluster: Cluster | None = field(default=None, repr=False)

    @property
    def fastest(self) -> ComparedPlan | None:
        """The row of the fastest plan; None if no planner has one."""
        return self.rows[0] if self.rows and self.rows[0].plan else None

    @property
    def title(self) -> str:
        """The model, the devices and the batch."""
        return describe_task(self.model, self.devices, self.global_batch_size)

    def __str__(self) -> str:
        cells = [row.cells() for row in self.rows]
        table = [
            [row.planner, *(found.get(h, "") for h in _HEADER)] for row, found in zip(self.rows, cells, strict=True)
        ]
        lines = [self.title, *format_table(("planner", *_HEADER), table, left=4)]
        return "\n".join([*lines, *(f"{row.planner}: {row.reason}" for row in self.rows)])

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values: seconds, bytes, and fractions of the step."""
        return {
            "format": FORMAT,
            "model": self.model,
            "devices": self.devices,
            "device_memory": self.device_memory,
            "global_batch_size": self.global_batch_size,
            "fastest": self.fastest.planner if self.fastest else None,
            "rows": [row.to_json() for row in self.rows],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save a picture (.png), a web page (.html), or the figures (.json); an existing file is replaced.

        Raises OutputError for another suffix or a path that cannot be written.
        """
        target = check_path(path, "a comparison")
        match target.suffix.lower():
            case ".json":
                write_atomically(target, json.dumps(self.to_json(), indent=2) + "\n")
            case ".html":
                cells = [row.cells() for row in self.rows]
                write_atomically(target, make_bars_page(self._chart(), _HEADER, cells, self._drawings()))
            case _:
                with atomic_replacement(target) as part:
                    draw_bars(self._chart(), part)

    def _drawings(self) -> list[tuple[str, PlanDrawing]]:
        """Return the drawings of the cluster and of each distinct plan, with their headings."""
        found = [] if self.cluster is None else [("The cluster", describe_plan_drawing(None, self.cluster))]
        planners: dict[PlanDrawing, list[str]] = {}
        for row in self.rows:
            if row.plan is not None:
                drawing = describe_plan_drawing(row.plan, self.cluster, self.profile)
                planners.setdefault(drawing, []).append(row.planner)
        notations = {row.planner: row.notation for row in self.rows}
        return [*found, *((f"{', '.join(names)}: {notations[names[0]]}", drawn) for drawn, names in planners.items())]

    def _chart(self) -> BarChart:
        return BarChart(self.title, tuple(map(_bar, self.rows)), self.device_memory)


def _micro_batches(plan: Plan) -> str:
    """Return the micro-batches for a cell: ``16 of 4 samples``, or ``16 of 4 samples, 2 in halves`` if sliced."""
    halves = f", {plan.sliced} in halves" if plan.sliced else ""
    return f"{plan.whole_micro_batches} of {format_samples(plan.micro_batch_size)}{halves}"


def _bar(row: ComparedPlan) -> Bar:
    if row.plan is None:
        return Bar(row.planner, "", row.reason)
    label = f"{format_seconds_fixed(row.step_seconds)}   {row.notation}, {row.plan.short_schedule}"
    return Bar(row.planner, label, row.reason, row.parts, row.peak_memory_bytes or 0.0)


def compare(
    profile: Profile,
    cluster: Cluster,
    *,
    global_batch_size: int,
    micro_batch_size: int | None = None,
    planners: Sequence[str] | None = None,
    schedule: str = "auto",
    recompute: RecomputeLevel = False,
    overlap: bool = False,
    shard_optimizer: bool = False,
    optimizer_slots: int = 2,
    contention: bool = True,
    whole_rows: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Return the plans of all planners, or of ``planners``, for ``profile`` on ``cluster``, the fastest first.

    The other arguments are those of ``dapple.plan``. Each plan is simulated; where a planner refuses the
    input or finds nothing that fits the memory, its row says why. ``progress`` is called with each planner's name
    before it runs. Raises PlanError for invalid arguments, and for a planner that does not exist.
    """
    if isinstance(planners, str):
        raise PlanError(f"planners is the string {planners!r}: give a list of names, such as ['best', 'dapple']")
    names = list(PLANNERS) if planners is None else list(dict.fromkeys(planners))
    for name in names:
        check_planner(name)
    if not names:
        raise PlanError("planners is empty: name at least one")
    problem = make_problem(
        profile,
        cluster,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        schedule=schedule,
        recompute=recompute,
        overlap=overlap,
        shard_optimizer=shard_optimizer,
        optimizer_slots=optimizer_slots,
        contention=contention,
        whole_rows=whole_rows,
    )
    found, failed = list[tuple[str, float, Plan, Timeline]](), list[ComparedPlan]()
    for name in names:
        if progress is not None:
            progress(name)
        row = _run(problem, name)
        if isinstance(row, ComparedPlan):
            failed.append(row)
        else:
            found.append(row)
    found.sort(key=lambda row: float(f"{row[3].step_seconds:.9g}"))  # of equally fast plans, ``names`` decide
    rows = [_row(row, found[0]) for row in found]
    return Comparison(
        profile.model,
        cluster.devices,
        cluster.least_memory,
        global_batch_size,
        (*rows, *failed),
        profile,
        cluster,
    )


def _run(problem: PlanningProblem, name: str) -> tuple[str, float, Plan, Timeline] | ComparedPlan:
    """Return the planner's name, seconds, plan and simulated step; if it has no plan, a row that says why."""
    begin = time.perf_counter()
    try:
        result = find_result(problem, name)
        seconds = time.perf_counter() - begin
        if result is None:
            return ComparedPlan(name, seconds, _why_none(problem, name))
        return (name, seconds, *predict_plan(problem, result.chosen, name, pipedream=result.pipedream))
    except _REFUSALS as error:
        return ComparedPlan(name, time.perf_counter() - begin, str(error))


def _why_none(problem: PlanningProblem, name: str) -> str:
    """Return why a planner found no plan."""
    if not may_fit(problem) or lacks_memory(problem, name):
        return "no plan that it may choose fits the devices' memory"
    return describe_other_reason(problem)


def _row(found: tuple[str, float, Plan, Timeline], fastest: tuple[str, float, Plan, Timeline]) -> ComparedPlan:
    name, seconds, plan, timeline = found
    reason = "fastest" if found is fastest else describe_loss(fastest[2:], (plan, timeline))
    return ComparedPlan(name, seconds, reason, plan, plan.notation, timeline.acr, step_parts(plan, timeline))
