"""Pipelined training for TensorFlow 2: hand over an unmodified loss, get a step that runs as a pipeline.

    import dapple_tf as dapple
    dapple.init()
    step = dapple.pipeline(loss_fn, optimizer=optimizer, stages=2, micro_batches=8)
    loss = step(x, y)

Names are loaded when first used, so that the command line answers before TensorFlow has started. Importing dapple_tf
raises ImportError if TensorFlow is missing or older than dapple_tf needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dapple_tf.frontend.tensorflow_version import require_tensorflow

if TYPE_CHECKING:
    from dapple_tf import errors, keras
    from dapple_tf.checkpoint.checkpoints import Checkpoints
    from dapple_tf.commands.workload import Workload
    from dapple_tf.devices import init, rank, scope, size
    from dapple_tf.planner.api import plan
    from dapple_tf.planner.compare import compare
    from dapple_tf.plans import Plan
    from dapple_tf.profiler.cluster import Cluster
    from dapple_tf.profiler.profile import Profile
    from dapple_tf.profiling.analytic import analytic_profile
    from dapple_tf.profiling.measured import profile
    from dapple_tf.runtime.shard import shard
    from dapple_tf.runtime.step import PipelinedStep, pipeline, train_step
    from dapple_tf.simulator.simulate import simulate
    from dapple_tf.timeline.timeline import Timeline
    from dapple_tf.verification import Report, verify


require_tensorflow()

__version__ = "0.1.0"  # setup.py reads it here

__all__ = [
    "Checkpoints",
    "Cluster",
    "PipelinedStep",
    "Plan",
    "Profile",
    "Report",
    "Timeline",
    "Workload",
    "analytic_profile",
    "compare",
    "errors",
    "init",
    "keras",
    "pipeline",
    "plan",
    "profile",
    "rank",
    "scope",
    "shard",
    "simulate",
    "size",
    "train_step",
    "verify",
]

_HOMES = {
    "Checkpoints": "dapple_tf.checkpoint.checkpoints",
    "Cluster": "dapple_tf.profiler.cluster",
    "PipelinedStep": "dapple_tf.runtime.step",
    "Plan": "dapple_tf.plans",
    "Profile": "dapple_tf.profiler.profile",
    "Report": "dapple_tf.verification",
    "Timeline": "dapple_tf.timeline.timeline",
    "Workload": "dapple_tf.commands.workload",
    "analytic_profile": "dapple_tf.profiling.analytic",
    "compare": "dapple_tf.planner.compare",
    "init": "dapple_tf.devices",
    "pipeline": "dapple_tf.runtime.step",
    "plan": "dapple_tf.planner.api",
    "profile": "dapple_tf.profiling.measured",
    "rank": "dapple_tf.devices",
    "scope": "dapple_tf.devices",
    "shard": "dapple_tf.runtime.shard",
    "simulate": "dapple_tf.simulator.simulate",
    "size": "dapple_tf.devices",
    "train_step": "dapple_tf.runtime.step",
    "verify": "dapple_tf.verification",
}

_MODULES = ("errors", "keras")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"dapple_tf.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
