"""What every rank of a job prints that leaves its plan to rank 0: the plan, losses, and values of its own variables."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

import dapple_tf as dapple
from tests.equality.small_models import chain, data, sgd, values, weights

LAYERS, SAMPLES, STEPS = 4, 16, 3


def main() -> None:
    dapple.init()
    matrices = weights(LAYERS)
    loss_fn = chain(matrices)

    def slow_to_trace(x: Any, y: Any) -> Any:
        time.sleep(1.5)  # rank 0 traces once more to profile, while the others wait for its plan
        return loss_fn(x, y)

    step = dapple.pipeline(slow_to_trace, optimizer=sgd(), micro_batches=4)
    losses = [float(step.record(*data(SAMPLES))) for _ in range(STEPS)]
    predicted = step.recording.predicted
    assert predicted is not None
    step.gather()
    plan = [list(stage.devices) for stage in step.plan.stages]
    found = {
        "plan": plan,
        "planner": step.plan.planner,
        "losses": losses,
        "predicted": [predicted.source, predicted.timeline.seconds],
        "planned": step.plan.predicted["step_seconds"] if step.plan.predicted else None,
        "values": np.stack(values(matrices)).tolist(),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
