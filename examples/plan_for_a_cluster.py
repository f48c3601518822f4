"""Plan a model for 16 V100s on a machine that has none, and simulate one step of the plan.

Run it with ``python examples/plan_for_a_cluster.py [FOLDER]`` (by default FOLDER is ``out``).

The profile is computed from the operations of the model and the data sheet of the device, so nothing runs on a GPU.
It prints the predicted step of three planners, then the stages of the fastest plan, and writes to FOLDER the profile
(``profile.json``), that plan (``plan.json``) and its simulated step as a web page (``step.html``).
``dapple train MODEL --plan plan.json`` would train under this plan on the real cluster.
"""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import tensorflow as tf

import dapple_tf as dapple


def main(folder: Path = Path("out")) -> None:
    """Compare three planners on a stack of dense layers with large weights."""
    dapple.init()
    keras.utils.set_random_seed(0)
    with dapple.scope():  # the weights are never made
        widths = [2048] * 8 + [512] * 8
        layers = [keras.layers.Dense(width, "relu", name=f"dense_{i}") for i, width in enumerate(widths)]
        model = keras.Sequential([keras.Input([2048]), *layers])

    def loss_fn(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(model(x, training=True) - y))

    batch = (tf.TensorSpec([32, 2048]), tf.TensorSpec([32, 512]))  # shapes are enough: nothing is computed
    profile = dapple.analytic_profile(loss_fn, batch, "V100", model="dense")
    cluster = dapple.Cluster.load(Path(__file__).with_name("cluster.yaml"))

    plans = {
        planner: dapple.plan(profile, cluster, global_batch_size=8192, planner=planner)
        for planner in ("best", "dp", "gpipe")
    }
    for planner, plan in plans.items():
        timeline = dapple.simulate(plan, profile, cluster)
        print(f"{planner}: {len(plan.stages)} stages, schedule {plan.schedule}, {timeline.summary}")

    best = plans["best"]
    timeline = dapple.simulate(best, profile, cluster)
    print(timeline)  # a table with one row per stage
    folder.mkdir(parents=True, exist_ok=True)
    profile.save(folder / "profile.json")
    best.save(folder / "plan.json")
    timeline.save(folder / "step.html")
    print(f"written to {folder}: profile.json, plan.json, step.html")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
