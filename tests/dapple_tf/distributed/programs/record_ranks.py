"""Record a step of a hybrid plan on three ranks, and say what was found."""

from __future__ import annotations

from typing import Any

import numpy as np

import dapple_tf as dapple
from dapple_tf.distributed.membership import current
from dapple_tf.runtime.recorder import Clocks
from tests.dapple_tf.distributed.programs.tied_model import X, make_model


def record_together() -> dapple.Timeline:
    """Record a step in which the results of two micro-batches travel together, in both directions."""
    loss, optimizer, _ = make_model()
    schedule = "0F0+ 0F1 0B0 0B1; 1F0 1F1 1B0+ 1B1"
    options = {"stages": ["layer2"], "replicas": [1, 2], "micro_batches": 2, "schedule": schedule}
    step = dapple.pipeline(loss, optimizer=optimizer, **options)
    step.record(X)
    return step.timeline


def run(picture: str) -> dict[str, Any]:
    """Return what this rank saw. Rank 0 saves the picture of a step in this file."""
    job = current()
    assert not job.is_alone
    losses, timeline = [], None
    for record in (False, True):
        loss, optimizer, _ = make_model()
        step = dapple.pipeline(loss, optimizer=optimizer, stages=["layer2"], replicas=[1, 2], micro_batches=2)
        losses.append([float(step.record(X) if record else step(X)) for _ in range(2)])
        timeline = step.timeline if record else None
    assert timeline is not None
    together = record_together()
    if job.rank == 0:
        timeline.save(picture)
    clocks = Clocks(job)
    return {
        "losses": losses,
        "events": [[str(e.action), e.replica, e.device, e.start, e.end] for e in timeline.events],
        "transfers": [[t.source, t.target, t.micro_batch, t.start, t.end] for t in timeline.transfers],
        "together": {
            "events": [[str(e.action), e.device, e.start, e.end] for e in together.events],
            "transfers": [[str(t), t.start, t.end] for t in together.transfers],
        },
        "stages": [[s.kind, s.stage, s.device, s.start, s.end] for s in timeline.stage_events],
        "offsets": clocks.offsets(),
        "gathered": [times.tolist() for times in clocks.gather(np.full(2, float(job.rank)))],
    }
