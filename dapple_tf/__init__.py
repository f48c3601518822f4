"""Pipelined training for TensorFlow 2: hand over an unmodified loss, get a step that runs as a pipeline.

    import dapple_tf as dapple
    dapple.init()
    step = dapple.pipeline(loss_fn, optimizer=optimizer, stages=2, micro_batches=8)
    loss = step(x, y)
"""

from __future__ import annotations

from dapple_tf import errors
from dapple_tf.devices import init, scope
from dapple_tf.pipeline import pipeline
from dapple_tf.planner.plan import Plan
from dapple_tf.runtime.step import PipelinedStep
from dapple_tf.workload import Workload

__all__ = ["PipelinedStep", "Plan", "Workload", "errors", "init", "pipeline", "scope"]
