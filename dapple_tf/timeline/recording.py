"""A recorded step beside its prediction."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dapple_tf.errors import UsageError
from dapple_tf.plans import Plan
from dapple_tf.profiler.units import format_difference, format_seconds
from dapple_tf.timeline.describe import SlowAction, describe_path, explain_slow, find_slowest, timeline_json
from dapple_tf.timeline.figures import StepFigures

BY_PROFILE = "simulated with the plan's profile"
BY_TIMES = "simulated with the measured times of each action"


@dataclass(frozen=True)
class Prediction:
    """A simulated step; ``source``: the origin of its costs, in words."""

    timeline: StepFigures
    source: str


@dataclass(frozen=True)
class Recording:
    """A ``measured`` step, its prediction, or both; ``title`` names the model and the schedule.

    ``planned_seconds``: the step's seconds in the plan's own prediction. Raises UsageError if there is neither a
    measured nor a predicted step.
    """

    title: str = ""
    measured: StepFigures | None = None
    predicted: Prediction | None = None
    planned_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.measured is None and self.predicted is None:
            raise UsageError("a recording needs a measured step, or a predicted one")

    @property
    def shown(self) -> StepFigures:
        """The measured step, or the predicted one if none was measured."""
        if self.measured is not None:
            return self.measured
        assert self.predicted is not None
        return self.predicted.timeline

    @property
    def prediction_error(self) -> float | None:
        """The predicted step's seconds divided by the measured ones, minus 1; None if one of them is missing."""
        return self._error(None if self.predicted is None else self.predicted.timeline.step_seconds)

    @property
    def planner_error(self) -> float | None:
        """``planned_seconds`` divided by the measured step's seconds, minus 1; None if one of them is missing."""
        return self._error(self.planned_seconds)

    def _error(self, seconds: float | None) -> float | None:
        if seconds is None or self.measured is None:
            return None
        return seconds / self.measured.step_seconds - 1

    @property
    def headline(self) -> str:
        """One line: the title, step time and bubble, and the error of the prediction."""
        words = [self.title, self.shown.summary]
        if self.measured is not None and self.planned_seconds is not None:
            words.append(f"planner said {format_seconds(self.planned_seconds)} ({self.planner_error:+.1%})")
        elif self.measured is not None and self.predicted is not None:
            seconds = format_seconds(self.predicted.timeline.step_seconds)
            words.append(f"simulated {seconds} ({self.prediction_error:+.1%})")
        return " · ".join(filter(None, words))

    def __str__(self) -> str:
        lines = []
        if self.measured is not None:
            lines.append(f"measured: {describe_path(self.measured)}")
        if self.predicted is not None:
            lines.append(f"predicted ({self.predicted.source}): {describe_path(self.predicted.timeline)}")
        if self.measured is not None:
            lines += self._describe_errors()
        return "\n".join(lines)

    def _describe_errors(self) -> list[str]:
        lines = []
        if self.prediction_error is not None:
            lines.append(f"the simulated step is {describe_error(self.prediction_error)}")
        same = self.predicted is not None and self.predicted.timeline.step_seconds == self.planned_seconds
        if self.planned_seconds is not None and self.planner_error is not None and not same:
            seconds = format_seconds(self.planned_seconds)
            lines.append(f"the planner predicted {seconds}, {describe_error(self.planner_error)}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the recording as JSON values; seconds, and fractions of the step."""
        data: dict[str, Any] = {}
        if self.measured is not None:
            data |= timeline_json(self.measured)
            data["slowest"] = [_slow_json(self.measured, slow) for slow in find_slowest(self.measured)]
        if self.predicted is not None:
            error = {} if self.prediction_error is None else {"error": self.prediction_error}
            data["predicted"] = {"source": self.predicted.source, **timeline_json(self.predicted.timeline), **error}
        if self.planned_seconds is not None:
            data["planned_step_seconds"] = self.planned_seconds
            if self.planner_error is not None:
                data["planner_error"] = self.planner_error
        return data


def _slow_json(measured: StepFigures, slow: SlowAction) -> dict[str, Any]:
    data = {"action": str(slow.event), "device": slow.event.device, "seconds": slow.seconds, "times": slow.times}
    ops = [asdict(op) for op in explain_slow(measured, slow)]
    return {**data, "ops": ops} if ops else data


def plan_title(plan: Plan) -> str:
    """Return the title of a step of ``plan``: model, schedule and micro-batches, or minibatches of a window."""
    return f"{plan.model}: {plan.training.describe_step(plan.short_schedule, plan.whole_micro_batches)}"


def planned_seconds(plan: Plan) -> float | None:
    """Return the step's seconds in the plan's own prediction; None if there is no positive number."""
    known = (plan.predicted or {}).get("step_seconds")
    return float(known) if isinstance(known, int | float) and known > 0 else None


def describe_error(error: float) -> str:
    """Return a relative error in words: ``12.0% more than measured``."""
    return f"{format_difference(error)} {'more' if error > 0 else 'less'} than measured"
