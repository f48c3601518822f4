"""Run as three ranks by test_record: record a step of a hybrid plan, and say what was found.

``python -m tests.dapple_tf.distributed.programs.record_ranks FILE``: rank 0 saves the picture there.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import numpy as np

import dapple_tf as dapple

dapple.init()  # before the imports that need a started TensorFlow

from dapple_tf.distributed.clocks import Clocks  # noqa: E402
from dapple_tf.distributed.membership import current  # noqa: E402
from tests.dapple_tf.distributed.programs.tied_model import X, make_model  # noqa: E402


def main() -> None:
    """Print, as one JSON object, what this rank saw."""
    job = current()
    assert job is not None
    losses, timeline = [], None
    for record in (False, True):
        loss, optimizer, _ = make_model()
        step = dapple.pipeline(loss, optimizer=optimizer, stages=["layer2"], replicas=[1, 2], micro_batches=2)
        losses.append([float(step.record(X) if record else step(X)) for _ in range(2)])
        timeline = step.timeline if record else None
    assert timeline is not None
    if job.rank == 0:
        timeline.save(sys.argv[1])
    clocks = Clocks(job)
    print(
        json.dumps(
            {
                "losses": losses,
                "events": [[str(e.action), e.replica, e.device, e.start, e.end] for e in timeline.events],
                "transfers": [dataclasses.astuple(t) for t in timeline.transfers],
                "stages": [[s.kind, s.stage, s.device, s.start, s.end] for s in timeline.stage_events],
                "offsets": clocks.offsets(),
                "gathered": [times.tolist() for times in clocks.gather(np.full(2, float(job.rank)))],
            }
        )
    )
    job.gather(None)  # all have finished


if __name__ == "__main__":
    main()
