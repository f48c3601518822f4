"""The activation communication ratio of a plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dapple_tf.timeline.stage_costs import StageCosts


def activation_communication_ratio(costs: Sequence[StageCosts]) -> float:
    """Return the ACR: mean seconds of a boundary's transfers, both directions, over a stage's mean seconds of compute.

    Of one micro-batch (DAPPLE, Table V). 0 for one stage; infinite where only transfers take time.
    """
    sent = [cost.send_forward_seconds + cost.send_backward_seconds for cost in costs[:-1]]
    computed = [cost.forward_seconds + cost.backward_seconds for cost in costs]
    if not any(sent):
        return 0.0
    return float(np.mean(sent) / np.mean(computed)) if any(computed) else float("inf")
