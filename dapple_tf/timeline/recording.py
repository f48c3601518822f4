"""A recorded step with what was said of it before: measured and predicted side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dapple_tf.errors import UsageError
from dapple_tf.timeline.describe import describe_timeline, find_slowest, timeline_json, write_seconds
from dapple_tf.timeline.prediction import BY_PROFILE, Prediction, predict_from_times, unroll
from dapple_tf.timeline.timeline import Timeline
from graph_passes.schedules.policies import abbreviate_schedule, build_schedule

if TYPE_CHECKING:
    from dapple_tf.plan import Plan
    from dapple_tf.simulator.simulate import Timeline as Simulated


@dataclass(frozen=True)
class Recording:
    """A ``measured`` step, or a ``predicted`` one, or both; ``title`` says of what.

    ``planned_seconds``: the step as the planner of a plan file predicted it. Raises UsageError where there is neither.
    """

    title: str = ""
    measured: Timeline | None = None
    predicted: Prediction | None = None
    planned_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.measured is None and self.predicted is None:
            raise UsageError("a recording needs a measured step, or a predicted one")

    @property
    def shown(self) -> Timeline:
        """The measured step, where there is one."""
        if self.measured is not None:
            return self.measured
        assert self.predicted is not None
        return self.predicted.timeline

    @property
    def prediction_error(self) -> float | None:
        """By which fraction of the measured seconds the simulated step is longer (below 0: shorter)."""
        return self._error(None if self.predicted is None else self.predicted.timeline.seconds)

    @property
    def planner_error(self) -> float | None:
        """The same of ``planned_seconds``."""
        return self._error(self.planned_seconds)

    def _error(self, seconds: float | None) -> float | None:
        if seconds is None or self.measured is None:
            return None
        return seconds / self.measured.seconds - 1

    @property
    def headline(self) -> str:
        """The title, and in a few words the step's seconds, bubble, and by how much the prediction is off."""
        words = [self.title, f"{write_seconds(self.shown.seconds)}, {self.shown.bubble:.0%} idle"]
        if self.measured is not None and self.planned_seconds is not None:
            words.append(f"planner said {write_seconds(self.planned_seconds)} ({self.planner_error:+.1%})")
        elif self.measured is not None and self.predicted is not None:
            seconds = write_seconds(self.predicted.timeline.seconds)
            words.append(f"simulated {seconds} ({self.prediction_error:+.1%})")
        return " · ".join(filter(None, words))

    def __str__(self) -> str:
        lines = []
        if self.measured is not None:
            lines.append(f"measured: {describe_timeline(self.measured)}")
        if self.predicted is not None:
            lines.append(f"predicted ({self.predicted.source}): {describe_timeline(self.predicted.timeline)}")
        if self.measured is not None:
            lines += self._compare()
        return "\n".join(lines)

    def _compare(self) -> list[str]:
        lines = []
        if self.prediction_error is not None:
            lines.append(f"the simulated step is {tell_error(self.prediction_error)}")
        same = self.predicted is not None and self.predicted.timeline.seconds == self.planned_seconds
        if self.planned_seconds is not None and self.planner_error is not None and not same:
            seconds = write_seconds(self.planned_seconds)
            lines.append(f"the planner predicted {seconds}, {tell_error(self.planner_error)}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """What ``--json`` prints of it; seconds, and fractions of the step."""
        found: dict[str, Any] = {}
        if self.measured is not None:
            found |= timeline_json(self.measured)
            found["slowest"] = [
                {"action": str(slow.event), "device": slow.event.device, "seconds": slow.seconds, "times": slow.times}
                for slow in find_slowest(self.measured)
            ]
        if self.predicted is not None:
            error = {} if self.prediction_error is None else {"error": self.prediction_error}
            found["predicted"] = {"source": self.predicted.source, **timeline_json(self.predicted.timeline), **error}
        if self.planned_seconds is not None:
            found["planned_step_seconds"] = self.planned_seconds
            if self.planner_error is not None:
                found["planner_error"] = self.planner_error
        return found


def make_recording(model: str, measured: Timeline, plan: Plan, simulated: Simulated | None = None) -> Recording:
    """The step of ``model`` measured under ``plan``, beside the step ``simulated`` when that was made.

    Without that, the plan's schedule simulated with the measured times.
    """
    if simulated is not None:
        predicted = Prediction(unroll(simulated.execution, measured.places), BY_PROFILE)
    else:
        schedule = build_schedule(plan.schedule, len(plan.stages), plan.micro_batches)
        predicted = predict_from_times(measured, schedule)
    return Recording(_title(model, plan), measured, predicted, planned_seconds(plan))


def planned_seconds(plan: Plan) -> float | None:
    """The step as the plan's planner predicted it, in seconds; None where it did not, or said what is no time."""
    known = (plan.predicted or {}).get("step_seconds")
    return float(known) if isinstance(known, int | float) and known > 0 else None


def simulated_recording(simulated: Simulated) -> Recording:
    """The recording of a step that was only simulated."""
    plan = simulated.plan
    places = [
        (stage, replica, f"device:{device}")
        for stage, planned in enumerate(plan.stages)
        for replica, device in enumerate(planned.devices)
    ]
    return Recording(_title(plan.model, plan), predicted=Prediction(unroll(simulated.execution, places), BY_PROFILE))


def _title(model: str, plan: Plan) -> str:
    return f"{model}: {abbreviate_schedule(plan.schedule)}, M = {plan.micro_batches}"


def tell_error(error: float) -> str:
    """An error in words."""
    return f"{abs(error):.1%} {'more' if error > 0 else 'less'} than measured"
