#!/usr/bin/env python3
"""Print import, first step and later steps of checkouts of this project in turn, as a Markdown table.

    python scripts/step_times.py TREE [TREE ...]

In every turn each tree trains two models in two stages of one process, pinned to one core: eight dense layers, and a
transformer of four blocks. The table has medians of the CPU seconds (user and system) of five turns. An import counts
that of TensorFlow and Keras too, and a first step all that ``dapple.pipeline`` does before it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

TURNS = 5
PROGRAM = """
import json, sys, time
begin = time.process_time()
import keras, tensorflow as tf
import dapple_tf as dapple
dapple.init(2)
dapple.pipeline
found = {"import": time.process_time() - begin}

def dense():
    weights = [tf.Variable(tf.random.stateless_normal((256, 256), (i, 1)) / 16) for i in range(8)]

    def loss(x, y):
        for i, weight in enumerate(weights):
            with tf.name_scope(f"layer{i}"):
                x = tf.tanh(x @ weight)
        return tf.reduce_mean(tf.square(x - y))

    return loss, (tf.ones((32, 256)), tf.zeros((32, 256)))

def transformer():
    ids = keras.Input((32,), dtype="int32")
    x = keras.layers.Embedding(256, 64)(ids)
    for _ in range(4):
        x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(2, 32)(x, x))
        x = keras.layers.LayerNormalization()(x + keras.layers.Dense(64)(keras.layers.Dense(256, "gelu")(x)))
    model = keras.Model(ids, keras.layers.Dense(256)(x))

    def loss(x, y):
        return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True))

    return loss, (tf.ones((32, 32), tf.int32), tf.zeros((32, 32), tf.int32))

for name, make in (("dense", dense), ("transformer", transformer)):
    loss, batch = make()
    begin = time.process_time()
    step = dapple.pipeline(loss, optimizer=keras.optimizers.Adam(), stages=2, micro_batches=8)
    step(*batch)
    found[f"{name}: first step"] = time.process_time() - begin
    step(*batch)
    begin = time.process_time()
    for _ in range(20):
        step(*batch)
    found[f"{name}: later step"] = (time.process_time() - begin) / 20
print(json.dumps(found))
"""


def main() -> int:
    """Measure the trees in turn, and print the table."""
    trees = [Path(word).resolve() for word in sys.argv[1:]]
    if not trees:
        print(__doc__, file=sys.stderr)
        return 2
    seconds: defaultdict[str, defaultdict[Path, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(TURNS):
        for tree in trees:
            for figure, value in measure(tree).items():
                seconds[figure][tree].append(value)
    print("| CPU seconds | " + " | ".join(tree.name for tree in trees) + " |")
    print("|---" * (len(trees) + 1) + "|")
    for figure, of_trees in seconds.items():
        print(f"| {figure} | " + " | ".join(f"{median(of_trees[tree]):.3f}" for tree in trees) + " |")
    return 0


def measure(tree: Path) -> dict[str, float]:
    """Return the figures of one process that uses the packages of ``tree``."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = ["taskset", "-c", "0", sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
