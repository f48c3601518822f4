"""The pipeline latency of DAPPLE, section IV: formulas 1 to 3.

Arrays of forward F, backward B and AllReduce seconds of one micro-batch have an entry for each stage in pipeline order:
compute stages at even indices, and between them network stages at odd indices, whose AllReduce is 0 (section IV.A).
"""

from __future__ import annotations

from dapple_tf.simulator.arrays import Floats
from dapple_tf.simulator.compiled import compiled


@compiled
def pivot_stage(forward: Floats, backward: Floats, micro_batches: int) -> int:
    """Return Q, the stage with the fewest bubbles, by formula 3: from the last stage to the first.

    A stage takes over from Q if its steady phase, (M - 1)(F + B), is longer than that of Q and the F + B between them.
    The comparison has a tolerance for rounding errors, so of stages with equal F + B the last one is Q: their sums over
    layers may differ in the last digits.
    """
    last = len(forward) - 1
    pivot, steady, between = last, (micro_batches - 1) * (forward[last] + backward[last]), 0.0
    for stage in range(last - 1, -1, -1):
        both = forward[stage] + backward[stage]
        if (micro_batches - 1) * both > (steady + between) * (1 + 1e-12):
            pivot, steady, between = stage, (micro_batches - 1) * both, 0.0
        else:
            between += both
    return pivot


@compiled
def pipeline_latency(forward: Floats, backward: Floats, allreduce: Floats, micro_batches: int) -> float:
    """Return L = Tw + Ts + Te, the seconds of one step (formulas 1 and 2).

    As printed, formula 2 subtracts the backward of the pivot stage from its own AllReduce (its case s >= Q includes
    s = Q). With one stage that would lose the last backward, so here s = Q belongs to the other case, as in Fig. 4.
    """
    pivot = pivot_stage(forward, backward, micro_batches)
    warm_up = 0.0
    for stage in range(pivot + 1):
        warm_up += forward[stage]
    steady = (micro_batches - 1) * (forward[pivot] + backward[pivot])
    ending, backwards = 0.0, 0.0
    for stage in range(pivot, -1, -1):
        backwards += backward[stage]
        ending = max(ending, allreduce[stage] + backwards)
    backwards = backward[pivot]
    for stage in range(pivot + 1, len(forward)):
        backwards += backward[stage]
        ending = max(ending, allreduce[stage] - backwards)
    return float(warm_up + steady + ending)
