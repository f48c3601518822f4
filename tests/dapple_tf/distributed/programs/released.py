"""Train on the ranks of a job, release the step, train again, and release it again."""

from __future__ import annotations

from typing import Any

import dapple_tf as dapple
from tests.dapple_tf.distributed.programs.gathered_variables import readable_values
from tests.dapple_tf.distributed.programs.tied_model import X, make_model


def run() -> dict[str, Any]:
    """Return the losses, and the values of all variables that this rank can read after each action."""
    loss, optimizer, _ = make_model()
    step = dapple.pipeline(loss, optimizer=optimizer, stages=["layer2"], micro_batches=2)
    seen: dict[str, Any] = {"losses": [float(step(X)), float(step(X))]}
    seen["trained"] = sorted(readable_values(step))
    step.release()
    seen["released"] = readable_values(step)
    seen["losses"].append(float(step(X)))
    seen["trained again"] = sorted(readable_values(step))
    step.release()
    step.release()  # nothing has moved since
    seen["released again"] = readable_values(step)
    return seen
