"""Run as two ranks by test_release: what a rank holds of a large model, and two steps that share a model."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import dapple_tf as dapple

dapple.init()

import tensorflow as tf  # after the job is joined  # noqa: E402

from dapple_tf.distributed.membership import current  # noqa: E402
from tests.dapple_tf.distributed.programs.release_model import LARGE, X, loss_of, make_dense, make_large, optimizers  # noqa: E402


def main() -> None:
    """Print, as one JSON object, what this rank saw."""
    job = current()
    assert job is not None
    seen = {"resident": hold_a_large_model(), **share_a_model(Path(sys.argv[1]), job.rank)}
    print(json.dumps(seen))
    job.gather(None)  # all have finished


def hold_a_large_model() -> dict[str, int]:
    """Bytes that came to the resident set since before the model was made."""
    x = tf.ones((2, LARGE))
    before = resident()
    loss, optimizer = make_large()
    # A schedule is given: to choose one compiles code, which takes memory of its own.
    options = {"stages": ["layer3"], "micro_batches": 1, "schedule": "dapple-a"}
    step = dapple.pipeline(loss, optimizer=optimizer, **options, example_batch=(x,))
    found = {"built": resident() - before}
    step(x)
    step(x)
    found["trained"] = resident() - before
    step.gather()
    found["gathered"] = resident() - before
    step(x)
    found["again"] = resident() - before
    return found


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def share_a_model(folder: Path, rank: int) -> dict[str, Any]:
    """Losses of two steps in turn, which layers a rank could read after each, and what it says of the others."""
    model = make_dense()
    if rank == 0:
        model.save(folder / "drawn.keras")  # the values that all ranks start from
    first, second = optimizers()
    one = dapple.pipeline(loss_of(model), optimizer=first, stages=["dense_1"], micro_batches=2)
    losses = [float(one(X)), float(one(X))]
    readable = [layers_here(model)]
    other = dapple.pipeline(loss_of(model), optimizer=second, stages=["dense_3"], micro_batches=2, example_batch=(X,))
    readable.append(layers_here(model))
    for step in (other, other, one, other, one):
        losses.append(float(step(X)))
        readable.append(layers_here(model))
    for layer in model.layers:  # all of them, as load_weights does: elsewhere than where it lives it is soon stale
        if not layer.kernel.value.is_initialized():
            layer.kernel.assign(tf.zeros(layer.kernel.shape, layer.kernel.dtype))
    losses.append(float(one(X)))
    readable.append(layers_here(model))
    try:
        model.save(folder / "early.keras")
        why = "nothing"
    except tf.errors.FailedPreconditionError as error:
        why = str(error)
    one.gather()
    model.save(folder / f"{rank}.keras")
    readable.append(layers_here(model))
    return {"losses": losses, "readable": readable, "why": why}


def layers_here(model: Any) -> list[int]:
    """Numbers of the layers whose weights this rank can read."""
    return [i for i, layer in enumerate(model.layers) if layer.kernel.value.is_initialized()]


main()
