"""Table VIII of the paper: the largest BERT-L that straight pipelines of 1, 2, 4, 8 V100s hold with re-computation.

Assumptions: 16 bytes per parameter (Adam, as the table says); 16 GB per device, with NVLink (Config A); micro-batches
of 2 samples (Tables II and VI) and a global batch of 64 (Table V), that is M = 32, for the "reasonable input size",
which the paper does not state; policy A; stages of whole encoder layers, cut by compute and memory. Costs are those of
``benchmarks.papers.bert``: what TensorFlow's backward keeps of a layer, and the roofline's seconds. Nothing is fitted
to the table. Utilisation is the simulator's: the compute of M micro-batches, with re-computation, over the step. One
device has no bubble, so it is 100% here; the paper's 93% must be the utilisation of the GPU itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.common import Row
from benchmarks.papers.bert import profile_two_layers, repeat_layer
from dapple_tf.planner.api import make_problem
from dapple_tf.planner.search.fit_cuts import fit_cuts
from dapple_tf.profiler.cluster import config
from dapple_tf.profiler.profile import Profile
from dapple_tf.timeline.timeline import Timeline

DEVICES = (1, 2, 4, 8)
LAYERS = (48, 106, 215, 428)
UTILISATION = (0.93, 0.89, 0.89, 0.87)
MEMORY = 16e9  # of a V100, as everywhere here; it has 16 GiB, of which CUDA and TensorFlow use a part
PRINTED_BYTES = 88.2e9  # of the parameters on 8 devices
GLOBAL_BATCH, MICRO_BATCH = 64, 2
WANTED = 0.10
# Table VI, GPipe and DAPPLE with M = 2 on two devices: 12.1 and 10.6 GB on average, for 2 and (2 + 1) / 2 micro-batches
# in flight of a stage of 24 layers.
PUBLISHED_STASH = (12.1e9 - 10.6e9) / 0.5 / 24


def run() -> Iterator[Row]:
    """Yield the stash of a layer, the four sizes with utilisation, their growth, and the sizes for other inputs."""
    profile = profile_two_layers(MICRO_BATCH)
    stash = sum(layer.stash_bytes for layer in profile.layers if layer.name.startswith("layer_1/"))
    yield Row(
        f"an encoder layer's stash, {MICRO_BATCH} samples",
        f"within {WANTED:.0%} of Table VI's: {PUBLISHED_STASH / 1e6:.0f} MB",
        f"{stash / 1e6:.0f} MB ({stash / PUBLISHED_STASH - 1:+.0%})",
        abs(stash / PUBLISHED_STASH - 1) <= WANTED,
    )
    largest = [find_largest(profile, devices, MICRO_BATCH) for devices in DEVICES]
    for devices, wanted, busy, (layers, timeline) in zip(DEVICES, LAYERS, UTILISATION, largest, strict=True):
        yield compare(devices, wanted, busy, layers, timeline)
    yield from growth([layers for layers, _ in largest])
    yield from others()


def compare(devices: int, wanted: int, busy: float, layers: int, timeline: Timeline) -> Row:
    """Return a row of the table."""
    off = layers / wanted - 1
    found = float(np.mean(timeline.utilisation))
    parameters = sum(cost.fixed_bytes for cost in timeline.costs)
    return Row(
        f"largest L on {devices} x V100, re-computation, M = {timeline.plan.micro_batches}",
        f"within {WANTED:.0%} of the paper's {wanted} (utilisation {busy:.0%})",
        f"{layers} ({off:+.1%}), {parameters / 16e9:.2g}B parameters, {parameters / 1e9:.1f} GB of them and their "
        f"slots; utilisation {found:.0%}",
        abs(off) <= WANTED,
    )


def growth(layers: list[int]) -> Iterator[Row]:
    """Yield the layers that each further device adds: the same from 1 to 2 devices as from 4 to 8."""
    rates = [(b - a) / (n - m) for a, b, m, n in zip(layers, layers[1:], DEVICES, DEVICES[1:], strict=False)]
    theirs = [(b - a) / (n - m) for a, b, m, n in zip(LAYERS, LAYERS[1:], DEVICES, DEVICES[1:], strict=False)]
    yield Row(
        "linear: layers that each further device adds (1 to 2, 2 to 4, 4 to 8)",
        f"equal within {WANTED:.0%}; the paper's: {', '.join(f'{rate:.1f}' for rate in theirs)}",
        ", ".join(f"{rate:.1f}" for rate in rates),
        max(rates) <= (1 + WANTED) * min(rates),
    )


def others() -> Iterator[Row]:
    """Yield the sizes for other inputs and memory, and the stash per layer that the table leaves room for.

    That is less than Table VI's, so the table's input must be smaller.
    """
    cases = {
        "micro-batches of 1 (M = 64)": (1, MEMORY),
        "micro-batches of 4 (M = 16)": (4, MEMORY),
        "16 GiB a device": (MICRO_BATCH, 2.0**34),
    }
    for title, (size, memory) in cases.items():
        profile = profile_two_layers(size)
        found = [find_largest(profile, devices, size, memory)[0] for devices in DEVICES]
        off = ", ".join(f"{a / b - 1:+.0%}" for a, b in zip(found, LAYERS, strict=True))
        yield Row(f"the same with {title}", "-", f"{', '.join(map(str, found))} ({off})", True)
    left = [(m - PRINTED_BYTES / DEVICES[-1]) / (LAYERS[-1] / DEVICES[-1]) / 1e6 for m in (MEMORY, 2.0**34)]
    text = f"{left[0]:.0f} MB ({left[1]:.0f} MB of 16 GiB), where Table VI has {PUBLISHED_STASH / 1e6:.0f} MB"
    yield Row("what Table VIII leaves for an encoder layer's stash (8 x V100)", "-", text, True)


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
