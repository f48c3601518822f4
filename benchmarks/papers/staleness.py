"""Statistical efficiency of asynchronous windows: the loss at equal samples (the shape of PipeDream's Fig. 11).

A small GPT and a small VGG train on the same minibatches in the same order: synchronously (every minibatch a step of
its own, without staleness), and in windows with each kind of weights. No sample comes twice. After each window the loss
of held-out samples is computed with the weights of that moment.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Row, available_cores, run_on_cores
from benchmarks.figures import say_origin
from benchmarks.papers.figure import Exhibit, Figure, claim

STAGES, MINIBATCHES, SAMPLES, HELD_OUT = 4, 64, 16, 512  # samples of a minibatch, and of the held-out ones
GPT_WINDOWS, VGG_WINDOWS, CLASSES = 192, 48, 10
PICTURE = Path("docs/figures/staleness.png")
KINDS: Mapping[str, Mapping[str, Any]] = {
    "synchronous": {"mode": "sync", "micro_batches": 4},
    "stash": {"mode": "async", "weights": "stash"},
    "vertical-sync": {"mode": "async", "weights": "vertical-sync"},
    "2bw": {"mode": "async", "weights": "2bw", "micro_batches": 4},
    "latest": {"mode": "async", "weights": "latest"},
}


@dataclass(frozen=True)
class Trained:
    """A model to train: ``make(batch_size)`` returns its workload.

    ``label``: of the model and its optimizer. ``windows``: how many are trained on.
    """

    label: str
    make: Callable[[int], Any]
    windows: int


def models() -> Mapping[str, Trained]:
    """Return the models by name."""
    import keras

    import dapple_tf as dapple
    from dapple_tf.examples.gpt import gpt
    from dapple_tf.examples.images import labelled_images
    from dapple_tf.examples.vgg import vgg

    def small_gpt(batch_size: int) -> Any:
        workload = gpt(layers=4, width=64, context=32, batch_size=batch_size)
        rate = keras.optimizers.schedules.CosineDecay(1e-3, GPT_WINDOWS * MINIBATCHES)
        return dapple.Workload(workload.loss_fn, keras.optimizers.Adam(rate), workload.dataset)

    def small_vgg(batch_size: int) -> Any:
        workload = vgg(width=8, hidden=64, batch_size=batch_size)
        images = labelled_images(classes=CLASSES, image_size=32, batch_size=batch_size, noise=4.0)
        rate = keras.optimizers.schedules.CosineDecay(5e-4, VGG_WINDOWS * MINIBATCHES)
        return dapple.Workload(workload.loss_fn, keras.optimizers.SGD(rate, momentum=0.9), change_labels(images))

    return {
        "gpt": Trained("GPT, 4 layers of width 64, Adam(1e-3 to 0)", small_gpt, GPT_WINDOWS),
        "vgg": Trained("VGG-11, width 8, SGD(5e-4 to 0, momentum 0.9)", small_vgg, VGG_WINDOWS),
    }


def change_labels(images: Any) -> Any:
    """Return the data set with a random label for one image in five, so that no model can reach a loss of 0."""
    import tensorflow as tf

    def change(number: Any, batch: Any) -> Any:
        x, y = batch
        stream = tf.stack([tf.constant(1, tf.int64), number])
        others = tf.random.stateless_uniform(tf.shape(y), stream, maxval=CLASSES, dtype=y.dtype)
        changed = tf.random.stateless_uniform(tf.shape(y), stream + 1) < 0.2
        return x, tf.where(changed, others, y)

    return images.enumerate().map(change)


def train(trained: Trained, kind: str) -> list[float]:
    """Return the loss of the held-out samples before training and after each window."""
    import dapple_tf as dapple

    workload = trained.make(MINIBATCHES * SAMPLES)
    batches = iter(workload.dataset)
    held_out = tuple(part[:HELD_OUT] for part in next(batches))
    options = dict(KINDS[kind])
    if options["mode"] == "async":
        options["minibatches"] = MINIBATCHES
    step = dapple.pipeline(workload.loss_fn, optimizer=workload.optimizer, stages=STAGES, **options)
    losses = [float(workload.loss_fn(*held_out))]
    for _ in range(trained.windows):
        window = next(batches)
        if options["mode"] == "async":
            step(*window)
        else:
            for m in range(MINIBATCHES):
                step(*(part[m * SAMPLES : (m + 1) * SAMPLES] for part in window))
        losses.append(float(step.forward(*held_out)))
    return losses


def train_all() -> dict[str, dict[str, list[float]]]:
    """Return the losses of each model and kind of weights, after each window, and draw them."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in models():
        found[name] = {}
        for kind in KINDS:
            found[name][kind] = run_on_cores(
                "benchmarks.papers.staleness", available_cores(), "--model", name, "--kind", kind, timeout=3600
            )
            print(f"{name} {kind}: {found[name][kind][-1]:.4f}", file=sys.stderr)
    draw(found)
    return found


def exhibit() -> Exhibit:
    """Return PipeDream's Fig. 11: the loss with weight stashing, and without, over that of synchronous training."""
    return make_exhibit({name: {kind: each[-1] for kind, each in kinds.items()} for name, kinds in train_all().items()})


def make_exhibit(last: Mapping[str, Mapping[str, float]]) -> Exhibit:
    """Return the exhibit of the last losses of each model and kind of weights."""
    figures = [
        Figure(name.upper(), "with stashing", 1.0, each["stash"] / each["synchronous"], "x synchronous loss")
        for name, each in last.items()
    ]
    worse = [each["latest"] > 1.02 * each["synchronous"] for each in last.values()]
    over = (f"{name.upper()} {each['latest'] / each['synchronous']:.3f}" for name, each in last.items())
    figures.append(claim("without stashing the loss is more than 2% higher", worse, f"{', '.join(over)} of it"))
    return Exhibit(
        "PipeDream, Fig. 11",
        f"Loss of held-out samples at equal samples, measured: a small GPT ({GPT_WINDOWS} windows of {MINIBATCHES} "
        f"minibatches) and a small VGG ({VGG_WINDOWS} windows) on four stages, trained on the same minibatches as "
        "synchronously. See `benchmarks/README.md`, section staleness. The paper shows that PipeDream needs as many "
        "epochs as data parallelism.",
        tuple(figures),
        "python -m benchmarks.papers pipedream-figure-11",
    )


def run() -> Iterator[Row]:
    """Yield the loss of each kind of weights at equal samples, over that of synchronous training."""
    found = train_all()
    for name, trained in models().items():
        wanted = found[name]["synchronous"]
        for kind, losses in found[name].items():
            over = losses[-1] / wanted[-1]
            target, ok = _judge(kind, over)
            text = f"{over:.3f} ({losses[-1]:.4f} of {wanted[-1]:.4f}; {losses[0]:.4f} before)"
            yield Row(f"{trained.label}, {trained.windows} windows, {kind}: loss over synchronous", target, text, ok)


def _judge(kind: str, over: float) -> tuple[str, bool]:
    """Return what is wanted of a loss relative to the synchronous one, and whether it is so."""
    if kind == "stash":
        return "within 2%", abs(over - 1) <= 0.02
    if kind == "latest":
        return "visibly worse", not math.isfinite(over) or over > 1.02
    return "-", True


def draw(found: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Save the curves as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = models()
    figure, axes = pyplot.subplots(1, len(found), figsize=(11, 4.2), constrained_layout=True)
    for axis, (name, curves) in zip(axes, found.items(), strict=True):
        for kind, losses in curves.items():
            axis.plot(range(len(losses)), losses, label=kind, linewidth=2 if kind == "synchronous" else 1.2)
        axis.set_title(labels[name].label, fontsize=10)
        axis.set_xlabel(f"windows of {MINIBATCHES} minibatches of {SAMPLES} samples")
        axis.set_ylabel("loss of held-out samples")
        worst = max(max(losses[:1]) for losses in curves.values())
        axis.set_ylim(0, 1.15 * worst)
        axis.legend(fontsize=9)
        axis.grid(alpha=0.3)
    figure.suptitle(f"Weights of asynchronous windows, {STAGES} stages")
    say_origin(figure, "measured")
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--kind", required=True)
    options = parser.parse_args()
    import dapple_tf as dapple

    dapple.init(STAGES)
    print(json.dumps(train(models()[options.model], options.kind)))
