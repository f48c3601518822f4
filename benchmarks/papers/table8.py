"""Table VIII of the paper: the largest BERT-L that straight pipelines of 1, 2, 4, 8 V100s hold with re-computation.

Assumptions: 16 bytes per parameter (Adam, as the table says); 16 GB per device, with NVLink (Config A); micro-batches
of 2 samples (Tables II and VI) and a global batch of 64 (Table V), that is M = 32, for the "reasonable input size",
which the paper does not state; policy A; stages of whole encoder layers, cut by compute and memory. Costs are those of
``benchmarks.papers.bert``: what TensorFlow's backward keeps of a layer, and the roofline's seconds. Nothing is fitted
to the table. Utilisation is the simulator's: the compute of M micro-batches, with re-computation, over the step. One
device has no bubble, so it is 100% here; the paper's 93% must be the utilisation of the GPU itself.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.papers.bert import repeat_layer
from dapple_tf.planner.api import make_problem
from dapple_tf.planner.search.fit_cuts import fit_cuts
from dapple_tf.profiler.cluster import config
from dapple_tf.profiler.profile import Profile
from dapple_tf.timeline.timeline import Timeline

DEVICES = (1, 2, 4, 8)
LAYERS = (48, 106, 215, 428)
UTILISATION = (0.93, 0.89, 0.89, 0.87)
MEMORY = 16e9  # of a V100, as everywhere here; it has 16 GiB, of which CUDA and TensorFlow use a part
GLOBAL_BATCH, MICRO_BATCH = 64, 2


def find_largest(profile: Profile, devices: int, micro_batch: int, memory: float = MEMORY) -> tuple[int, Timeline]:
    """Return the most encoder layers whose straight pipeline fits ``memory`` bytes, and its simulated step."""
    fitting, best = 0, None
    above = 128 * devices
    while above - fitting > 1:
        layers = (fitting + above) // 2
        timeline = simulate_straight(repeat_layer(profile, layers), devices, micro_batch, memory)
        if timeline is None:
            above = layers
        else:
            fitting, best = layers, timeline
    if best is None:
        raise RuntimeError(f"not one encoder layer fits {devices} devices")
    return fitting, best


def simulate_straight(profile: Profile, devices: int, micro_batch: int, memory: float = MEMORY) -> Timeline | None:
    """Return the simulated step of one stage per device, cut as the planners cut; None where a stage does not fit."""
    cluster = replace(config("a", devices), device_memory=memory)
    problem = make_problem(
        profile,
        cluster,
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=micro_batch,
        schedule="dapple-a",
        recompute=True,
        contention=False,
    )
    stages = fit_cuts(problem, [(device,) for device in range(devices)], micro_batch)
    if stages is None:
        return None
    timeline = problem.simulate(problem.make_plan(stages, micro_batch, "dapple-a", "straight"))
    return timeline if all(timeline.fits) else None
