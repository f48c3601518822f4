"""The AllReduces of the stages of a plan, as rings of whole stages or of single layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dapple_tf.simulator.compiled import Floats, Integers, compiled_part
from dapple_tf.simulator.transfer import ring_seconds
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


@compiled_part
def whole_rings(exposed: Floats) -> Rings:
    """Return one ring for each stage, which starts after the last gradients."""
    return Rings(np.arange(len(exposed) + 1), np.zeros(len(exposed)), exposed, exposed)


@compiled_part
def layer_rings(
    gradients: Floats, parameters: Floats, bounds: Integers, latency: Floats, per_byte: Floats, exposed: Floats
) -> Rings:
    """Return a ring for each layer with parameters, in the order in which backward reaches them.

    ``gradients``: seconds of each layer's [S, L], of which stage s has the layers ``bounds[s]`` to ``bounds[s + 1]``.
    ``latency``, ``per_byte``: of each stage's ring (``allreduce_cost``).
    """
    stages = len(exposed)
    first, entry = np.zeros(stages + 1, np.int64), 0
    before, seconds = np.zeros(gradients.shape[1] + stages), np.zeros(gradients.shape[1] + stages)
    for s in range(stages):
        earlier = gradients[s, bounds[s] : bounds[s + 1]].sum()
        for layer in range(bounds[s + 1] - 1, bounds[s] - 1, -1):
            earlier -= gradients[s, layer]
            taken = ring_seconds(latency[s], per_byte[s], parameters[layer])
            if taken > 0:
                before[entry], seconds[entry] = max(0.0, earlier), taken
                entry += 1
        if entry == first[s]:
            entry += 1  # of no seconds
        first[s + 1] = entry
    return Rings(first, before[:entry].copy(), seconds[:entry].copy(), exposed)
