"""One stage of a timeline in figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dapple_tf.graph_passes.schedules.schedule import Action


@dataclass(frozen=True)
class StageSummary:
    """Figures of one stage; seconds are of one micro-batch: the cost model's, or medians of a recorded step.

    Of micro-batches of different sizes, the cost model's are those of the largest.

    ``devices``: names. ``utilisation``: the fraction of the step in which they compute. ``backward_seconds``: the whole
    backward; ``weights_seconds``: its weight gradients, where they are actions of their own (W), else None.
    ``allreduce_seconds``: the AllReduce of the stage's gradients. ``order``: the actions in the order in which they
    ran; ``other_replicas``: those of replicas 1, 2 ..., where replicas take minibatches in turn.
    ``peak_memory_bytes``: of one device; None for a recorded step (see ``step.report``).
    """

    stage: int
    devices: tuple[str, ...]
    utilisation: float
    forward_seconds: float
    backward_seconds: float
    weights_seconds: float | None
    allreduce_seconds: float
    order: tuple[Action, ...]
    peak_memory_bytes: float | None = None
    other_replicas: tuple[tuple[Action, ...], ...] = ()

    @property
    def actions(self) -> str:
        """The actions as text: ``0F0 0F1 0B0 ...``."""
        return " ".join(map(str, self.order))

    def to_json(self) -> dict[str, Any]:
        """Return the stage's entry in the JSON of a timeline."""
        return {
            "forward_seconds": self.forward_seconds,
            "backward_seconds": self.backward_seconds,
            **({} if self.weights_seconds is None else {"weights_seconds": self.weights_seconds}),
            "allreduce_seconds": self.allreduce_seconds,
            "actions": self.actions,
            **({"other_replicas": [" ".join(map(str, o)) for o in self.other_replicas]} if self.other_replicas else {}),
        }


def format_ranges(numbers: Sequence[int]) -> str:
    """Return the numbers with consecutive ones joined: ``0-3,8``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
