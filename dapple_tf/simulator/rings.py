"""The AllReduces of the stages of a plan, as rings of whole stages or of single layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dapple_tf.simulator.arrays import Floats, Integers
from dapple_tf.timeline.stage_costs import StageCosts


class Rings(NamedTuple):
    """The rings of each stage, one after the other: for stage s ``first[s]`` to ``first[s + 1]``, at least one.

    ``before``: seconds between a ring's gradients and the end of the stage's last gradients, 0 without overlap.
    ``seconds``: of a ring alone, latency included. ``exposed`` [S]: as in ``StageCosts``.
    """

    first: Integers
    before: Floats
    seconds: Floats
    exposed: Floats


def make_rings(costs: Sequence[StageCosts]) -> Rings:
    """Return the rings of stages with these costs: with overlap one for each layer, else one for each stage."""
    rings = [cost.rings or ((0.0, cost.exposed_seconds),) for cost in costs]
    before, seconds = np.array([pair for of_stage in rings for pair in of_stage], np.float64).T.copy()
    first = np.cumsum([0, *map(len, rings)])
    return Rings(first, before, seconds, np.array([cost.exposed_seconds for cost in costs], np.float64))


def whole_rings(exposed: Floats) -> Rings:
    """Return one ring for each stage, which starts after the last gradients."""
    return Rings(np.arange(len(exposed) + 1), np.zeros(len(exposed)), exposed, exposed)
