"""Errors of dapple_tf, all of them DappleErrors: ValueErrors for wrong arguments, RuntimeErrors for runs that fail.

Every message says what was wrong, where (stage, layer, variable, rank, micro-batch, file and field), and what to do.
"""

from __future__ import annotations

import inspect
import warnings

__all__ = [
    "BatchError",
    "CaptureError",
    "CheckpointError",
    "ClusterError",
    "DappleError",
    "DappleWarning",
    "DeviceError",
    "ExactnessError",
    "GraphError",
    "JobError",
    "LossError",
    "ModelError",
    "NoFitError",
    "NotSimulatedError",
    "OutputError",
    "PartitionError",
    "PlanError",
    "ProfileError",
    "RunError",
    "ScheduleError",
    "StepError",
    "TextError",
    "TraceError",
    "UsageError",
]


class DappleError(Exception):
    """The base of all errors of dapple_tf.

    ``lasts``: another start of the same program fails in the same way, so ``dapple launch`` does not start it again.
    """

    lasts = True

    def __init__(self, *args: object, lasts: bool | None = None) -> None:
        super().__init__(*args)
        if lasts is not None:
            self.lasts = lasts


class GraphError(DappleError, ValueError):
    """A graph that breaks an invariant of the intermediate representation, or a pass its contract."""


class TextError(DappleError, ValueError):
    """A text that cannot be parsed as a graph; the message has the line number."""


class PartitionError(DappleError, ValueError):
    """A model that cannot be cut as asked; the message names the layer or the tensor that prevents it.

    ``node``: the name of the graph's node that prevents it, where it is a single one.
    """

    def __init__(self, message: str, node: str = "") -> None:
        super().__init__(message)
        self.node = node


class ScheduleError(DappleError, ValueError):
    """A schedule that is unknown, cannot be parsed or cannot run."""


class ProfileError(DappleError, ValueError):
    """A profile that cannot be read, measured or used."""


class RunError(DappleError, ValueError):
    """A record of a training run that is missing or cannot be read; the message names the line and the field."""


class ClusterError(DappleError, ValueError):
    """A description of a cluster that cannot be read or does not fit."""


class CaptureError(DappleError, ValueError):
    """A function that cannot be traced, or whose trace cannot be pipelined."""


class LossError(DappleError, ValueError):
    """A loss that is not a scalar."""


class ExactnessError(LossError):
    """A loss or model whose results from micro-batches would differ from those of one device and the whole batch."""


class BatchError(DappleError, ValueError):
    """Arguments that are not one batch, or a batch that is too small."""


class PlanError(DappleError, ValueError):
    """A plan, or a request for one, that cannot be carried out."""


class NoFitError(PlanError):
    """No plan or schedule that was asked for fits the memory of the devices; ``lasts``: see ``DappleError``."""


class DeviceError(DappleError, ValueError):
    """Devices that do not exist or are too few."""


class ModelError(DappleError, ValueError):
    """A MODEL on the command line that cannot be loaded."""


class TraceError(DappleError, ValueError):
    """A trace file that dapple_tf did not save, or that is damaged."""


class CheckpointError(DappleError, RuntimeError):
    """A checkpoint that cannot be written, read, or loaded into this model; ``lasts``: see ``DappleError``."""


class UsageError(DappleError, RuntimeError):
    """A call that is not possible in the present state, or in this environment."""


class OutputError(UsageError):
    """A path where a result cannot be saved: empty, of another format, a folder, or without permission to write."""


class NotSimulatedError(UsageError, AttributeError):
    """A recorded timeline was asked for an attribute that only simulated timelines have."""


class JobError(DappleError, RuntimeError):
    """Ranks of a job that disagree, or a rank that failed; ``lasts``: see ``DappleError``."""

    lasts = False


class StepError(DappleError, RuntimeError):
    """A training step that failed; the message says whether variables changed."""

    lasts = False


class DappleWarning(UserWarning):
    """Something that runs, but probably not as intended."""


_PACKAGES = ("dapple_tf", "keras", "tensorflow", "contextlib", "click")


def warn_user(message: str) -> None:
    """Give a DappleWarning at the line of the user's that led to it: outside of dapple_tf, Keras and TensorFlow."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] in _PACKAGES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, DappleWarning, stacklevel=level)
