#!/usr/bin/env python3
"""Measure import, planning, first step and later steps of several checkouts of this project; print a Markdown table.

    python scripts/compare_trees.py TREE [TREE ...]

TREE is the folder of a checkout. In every turn each tree plans the published profiles on 16 devices of each of the
papers' three clusters. It also trains two models in two stages of one process, pinned to one core: eight dense layers,
and a transformer of four blocks. The table has medians of the CPU seconds (user and system) of five turns. The import
includes that of TensorFlow and Keras, and the first step all that ``dapple.pipeline`` does before it. One profile is
planned before planning is measured, so that a compiler that runs at the first plan is not measured. Below the table is
the number of plans that each tree has in common with the first tree. Without the published profiles nothing is planned.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
TURNS = 5
# Writes the published profiles and the clusters to the folder in the first argument: profiles/SAMPLES-FILE.json and
# clusters/NAME.json. So old trees, which do not know the clusters by name, have them too.
WRITE_CASES = """
import sys
from pathlib import Path
import dapple_tf as dapple
from benchmarks.papers.published import BERT_LARGE, MODELS, find_missing_profiles, read_profile

profiles, clusters = (Path(sys.argv[1]) / name for name in ("profiles", "clusters"))
profiles.mkdir()
clusters.mkdir()
for model in () if find_missing_profiles() else (*MODELS, BERT_LARGE):
    read_profile(model).save(profiles / f"{model.global_batch}-{model.file}.json")
for letter in "abc":
    dapple.Cluster.load(f"config-{letter}").save(clusters / f"{letter}.json")
"""
PROGRAM = """
import json, sys, time
from pathlib import Path
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

plans = []

def plan_all(paths):
    begin = time.process_time()
    for path in paths:
        for file in sorted(Path(sys.argv[1], "clusters").glob("*.json")):
            profile, cluster = dapple.Profile.load(path), dapple.Cluster.load(file)
            plan = dapple.plan(profile, cluster, global_batch_size=int(path.name.partition("-")[0]))
            plans.append(str([plan.stages, plan.micro_batches, plan.schedule]))
    return time.process_time() - begin

paths = sorted(Path(sys.argv[1], "profiles").glob("*.json"))
if paths:
    plan_all(paths[:1])
    plans.clear()
    found[f"{3 * len(paths)} published cases: planning"] = plan_all(paths)

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
print(json.dumps([found, plans]))
"""


def main() -> int:
    """Measure the trees in turn, and print the table."""
    trees = [Path(word).resolve() for word in sys.argv[1:]]
    if not trees:
        print(__doc__, file=sys.stderr)
        return 2
    if absent := [str(tree) for tree in trees if not (tree / "dapple_tf" / "__init__.py").is_file()]:
        print(f"no checkout of this project: {', '.join(absent)}", file=sys.stderr)
        return 2
    seconds: defaultdict[str, defaultdict[Path, list[float]]] = defaultdict(lambda: defaultdict(list))
    plans: dict[Path, list[str]] = {}
    with tempfile.TemporaryDirectory() as cases:
        run_python(ROOT, WRITE_CASES, cases)
        for _ in range(TURNS):
            for tree in trees:
                taken, plans[tree] = json.loads(run_python(tree, PROGRAM, cases).splitlines()[-1])
                for figure, value in taken.items():
                    seconds[figure][tree].append(value)
    print("| CPU seconds | " + " | ".join(tree.name for tree in trees) + " |")
    print("|---" * (len(trees) + 1) + "|")
    for figure, of_trees in seconds.items():
        print(f"| {figure} | " + " | ".join(f"{median(of_trees[tree]):.3f}" for tree in trees) + " |")
    print()
    for tree in trees[1:] if plans[trees[0]] else ():
        same = sum(a == b for a, b in zip(plans[trees[0]], plans[tree], strict=True))
        print(f"{same} of {len(plans[tree])} plans of {tree.name} are those of {trees[0].name}")
    return 0


def run_python(tree: Path, program: str, cases: str) -> str:
    """Run ``program`` on one core with the packages of ``tree`` and the folder ``cases``; return what it prints.

    If it fails, this process ends with an error that names the tree.
    """
    environment = {**os.environ, "PYTHONPATH": str(tree), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = ["taskset", "-c", "0", sys.executable, "-c", program, cases]
    done = subprocess.run(command, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"a program of scripts/compare_trees.py failed in {tree}, see the error above")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
