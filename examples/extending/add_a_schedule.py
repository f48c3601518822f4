"""Add a schedule: a pure function that lists the actions of every stage.

Run it with ``python examples/extending/add_a_schedule.py``. It prints the schedule, compares it with ``dapple-a`` in
the simulator, and checks with ``dapple.verify`` that a step under it equals a step on one device.

The schedule is 1F1B in pairs: a stage runs two backwards, then two forwards. Stage i holds up to K_i = 2 (S - i)
micro-batches.
"""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.graph_passes.schedules.schedule import Action, Schedule, check
from dapple_tf.profiler.cluster import Cluster, Link, Server
from dapple_tf.profiler.profile import LayerCost, Profile


# --8<-- [start:schedule]
def pairs(stages: int, micro_batches: int) -> Schedule:
    """K_i = min(2 (S - i), M) forwards, then two backwards and two forwards alternately, then what is left.

    Raises ScheduleError for what cannot run.
    """
    rows = []
    for stage in range(stages):
        warm_up = min(2 * (stages - stage), micro_batches)
        actions = [Action(stage, "F", m) for m in range(warm_up)]
        for m in range(0, micro_batches, 2):
            actions += [Action(stage, "B", n) for n in range(m, min(m + 2, micro_batches))]
            first = warm_up + m
            actions += [Action(stage, "F", n) for n in range(first, min(first + 2, micro_batches))]
        rows.append(tuple(actions))
    schedule = Schedule(tuple(rows))
    check(schedule)  # each action once, and no deadlock; the error prints the blocked actions
    return schedule


# --8<-- [end:schedule]


# --8<-- [start:simulate]
def compare(stages: int, micro_batches: int) -> None:
    """Simulate both schedules on equal stages whose transfers take a quarter of a forward."""
    layer = LayerCost("", 0.010, 0.020, activation_bytes=2.5e6, stash_bytes=5e6, parameter_bytes=1e6)
    layers = tuple(dataclasses.replace(layer, name=f"layer_{i}") for i in range(stages))
    profile = Profile("equal stages", batch_size=1, device="an example", layers=layers)
    servers = tuple(Server(f"server_{i}", 1) for i in range(stages))
    link = Link(bandwidth=1e9, latency=0.0)
    cluster = Cluster(servers, device_memory=16e9, intra_server=link, inter_server=link)
    plan = dapple.plan(
        profile, cluster, global_batch_size=micro_batches, micro_batch_size=1, planner="gpipe", schedule="dapple-a"
    )
    for name, schedule in [("dapple-a", "dapple-a"), ("pairs", str(pairs(stages, micro_batches)))]:
        timeline = dapple.simulate(dataclasses.replace(plan, schedule=schedule), profile, cluster)
        print(f"{name}: {timeline.summary}, peak memory of stage 0 {timeline.peak_memory_bytes[0] / 1e6:.0f} MB")


# --8<-- [end:simulate]


# --8<-- [start:train]
def verify(schedule: Schedule) -> None:
    """Compare one step under ``schedule``, given as text, with one device."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([8]), *(keras.layers.Dense(8, "tanh", name=f"dense_{i}") for i in range(4))])

    def loss_fn(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(model(x, training=True) - y))

    numbers = np.random.default_rng(0)
    x, y = (numbers.normal(size=(16, 8)).astype("float32") for _ in range(2))
    report = dapple.verify(
        loss_fn,
        optimizer=keras.optimizers.Adam(),
        batch=(x, y),
        stages=["dense_2"],
        micro_batches=schedule.micro_batches,
        schedule=str(schedule),
    )
    print(report)


# --8<-- [end:train]


def main() -> None:
    """Print, simulate and run the schedule."""
    dapple.init()
    print(pairs(stages=2, micro_batches=4))
    compare(stages=4, micro_batches=8)
    verify(pairs(stages=2, micro_batches=4))


if __name__ == "__main__":
    main()
