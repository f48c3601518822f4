"""Train with a plan that rank 0 makes from a profile: the plan, losses, and the values of all variables."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import dapple_tf as dapple
from tests.equality.small_models import chain, data, sgd, values, weights

LAYERS, SAMPLES, STEPS = 4, 16, 3


def run(trace_seconds: float) -> dict[str, Any]:
    """Train and record a few steps of a model that takes ``trace_seconds`` longer to trace.

    Rank 0 traces once more to profile, while the other ranks wait for its plan.
    """
    matrices = weights(LAYERS)
    loss_fn = chain(matrices)

    def slow_to_trace(x: Any, y: Any) -> Any:
        time.sleep(trace_seconds)
        return loss_fn(x, y)

    step = dapple.pipeline(slow_to_trace, optimizer=sgd(), micro_batches=4)
    losses = [float(step.record(*data(SAMPLES))) for _ in range(STEPS)]
    predicted = step.recording.predicted
    assert predicted is not None
    step.gather()
    return {
        "plan": [list(stage.devices) for stage in step.plan.stages],
        "planner": step.plan.planner,
        "losses": losses,
        "predicted": [predicted.source, predicted.timeline.step_seconds],
        "planned": step.plan.predicted["step_seconds"] if step.plan.predicted else None,
        "values": np.stack(values(matrices)).tolist(),
    }
