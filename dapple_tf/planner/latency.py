"""The pipeline latency of DAPPLE, section IV: formulas 1 to 3, over compute stages and the networks between them.

Arrays hold, in pipeline order, compute stages at even places and the network stages between them at odd ones:
seconds of forward F, backward B and AllReduce (0 for networks) of one micro-batch.
"""

from __future__ import annotations

from dapple_tf.simulator.compiled import Floats, compiled


@compiled
def pivot_stage(forward: Floats, backward: Floats, micro_batches: int) -> int:
    """Q, the stage with the fewest bubbles, by formula 3: from the last stage to the first.

    A stage takes over where its steady phase, (M - 1)(F + B), is longer than the pivot's and what lies between, by
    more than sums round: of equal stages the last stays pivot, in whatever order their layers were added up.
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
    """L = Tw + Ts + Te, seconds of one step (formulas 1 and 2).

    As printed, formula 2 takes the backward of the pivot off its own AllReduce (its case s >= Q holds s = Q too).
    With one stage that would lose the last backward, so here s = Q belongs to the other case, as in Fig. 4.
    """
    pivot = pivot_stage(forward, backward, micro_batches)
    warm_up = 0.0
    for stage in range(pivot + 1):
        warm_up += forward[stage]
    steady = (micro_batches - 1) * (forward[pivot] + backward[pivot])
    ending, chain = 0.0, 0.0
    for stage in range(pivot, -1, -1):
        chain += backward[stage]
        ending = max(ending, allreduce[stage] + chain)
    chain = backward[pivot]
    for stage in range(pivot + 1, len(forward)):
        chain += backward[stage]
        ending = max(ending, allreduce[stage] - chain)
    return float(warm_up + steady + ending)
