"""Pipelined training for TensorFlow 2: hand over an unmodified loss, get a step that runs as a pipeline.

    import dapple_tf as dapple
    dapple.init()
    step = dapple.pipeline(loss_fn, optimizer=optimizer, stages=2, micro_batches=8)
    loss = step(x, y)

Names are loaded when first used, so that the command line answers before TensorFlow has started. Importing dapple_tf
raises ImportError if TensorFlow is missing or older than dapple_tf needs, or if a file of the user's hides a package.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dapple_tf import errors, keras
    from dapple_tf.checkpoint.checkpoints import Checkpoints
    from dapple_tf.commands.workload import Workload
    from dapple_tf.devices import init, rank, scope, size
    from dapple_tf.planner.api import plan
    from dapple_tf.planner.compare import compare
    from dapple_tf.plans import Plan
    from dapple_tf.profiling.analytic import analytic_profile
    from dapple_tf.profiling.measured import profile
    from dapple_tf.runtime.shard import shard
    from dapple_tf.runtime.step import PipelinedStep, pipeline
    from dapple_tf.simulator.simulate import simulate
    from dapple_tf.timeline.timeline import Timeline
    from dapple_tf.verification import Report, verify
    from profiler.cluster import Cluster
    from profiler.profile import Profile


def _require_own_packages() -> None:
    """Raise ImportError where a file of the user's hides one of the packages that are installed beside dapple_tf."""
    for name in ("graph_passes", "profiler"):
        loaded = sys.modules.get(name)
        spec = importlib.util.find_spec(name) if loaded is None else getattr(loaded, "__spec__", None)
        origin = None if spec is None else spec.origin
        if origin is None or Path(origin).resolve().parent != Path(__file__).resolve().parents[1] / name:
            raise ImportError(
                f"dapple_tf needs its own package {name!r}, but Python finds {origin or 'another one'}: rename that "
                "file, or take its folder out of sys.path",
                name=name,
                path=origin,
            )


_require_own_packages()
# Not at the top: it imports from the packages that were examined here.
importlib.import_module("dapple_tf.frontend.tensorflow_version").require_tensorflow()

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
    "verify",
]

_HOMES = {
    "Checkpoints": "dapple_tf.checkpoint.checkpoints",
    "Cluster": "profiler.cluster",
    "PipelinedStep": "dapple_tf.runtime.step",
    "Plan": "dapple_tf.plans",
    "Profile": "profiler.profile",
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
