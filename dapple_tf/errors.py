"""What dapple raises: ValueErrors for what was asked, RuntimeErrors for what happened.

Every message says what was wrong, where (stage, layer, variable, micro-batch, file and field), and what to do.
"""

from __future__ import annotations

from graph_passes.errors import GraphError, PartitionError, ScheduleError, TextError
from profiler.errors import ClusterError, ProfileError

__all__ = [
    "BatchError",
    "CaptureError",
    "CheckpointError",
    "ClusterError",
    "DappleWarning",
    "DeviceError",
    "GraphError",
    "JobError",
    "LossError",
    "ModelError",
    "PartitionError",
    "PlanError",
    "ProfileError",
    "ScheduleError",
    "StepError",
    "TextError",
    "TraceError",
    "UsageError",
]


class CaptureError(ValueError):
    """A function that cannot be traced, or whose trace cannot be pipelined."""


class LossError(ValueError):
    """A loss that is not a scalar mean over the batch."""


class BatchError(ValueError):
    """Arguments that are not one batch, or too small a one."""


class PlanError(ValueError):
    """A plan, or the wish for one, that cannot be carried out."""


class DeviceError(ValueError):
    """Devices that do not exist or are too few."""


class ModelError(ValueError):
    """A MODEL on the command line that cannot be loaded."""


class TraceError(ValueError):
    """A saved trace that cannot be read: not one of ours, or damaged."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read, or loaded into this model."""


class UsageError(RuntimeError):
    """Calls in an order that cannot work."""


class JobError(RuntimeError):
    """Ranks of a job that do not fit together, or one that failed."""


class StepError(RuntimeError):
    """A training step that failed; says whether variables changed."""


class DappleWarning(UserWarning):
    """Something that runs, but probably not as meant."""
