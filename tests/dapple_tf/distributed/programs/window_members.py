"""Use the other members of a step in asynchronous windows, as ranks of a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from tests.asynchronous.networks import dense
from tests.asynchronous.reference import Reference, copies
from tests.equality.one_device import relative_error

MINIBATCHES = 4


def sgd() -> Any:
    """An optimizer whose updates do not read the step counter."""
    return keras.optimizers.SGD(0.1)


def run() -> dict[str, Any]:
    """Train windows, given whole and as local rows, forward runs and a synchronous step; return what differs."""
    network = dense([1, 1])
    before, (x, y) = copies(network.variables), network.batch(16)
    reference = Reference(network.model("stash"), sgd)
    wanted = [
        reference.window((x[:8], y[:8]), MINIBATCHES).losses,
        reference.window((x[8:], y[8:]), MINIBATCHES).losses,
    ]
    forward = network.loss_fn(x[:3], y[:3])
    synchronous = reference.synchronous_step((x[:8], y[:8]))
    last = reference.window((x[8:13], y[8:13]), MINIBATCHES).losses
    expected = copies(network.variables)
    for variable, value in zip(network.variables, before, strict=True):
        variable.assign(value)

    cut: dict[str, Any] = {"optimizer": sgd(), "stages": list(network.starts)}
    step = dapple.pipeline(network.loss_fn, **cut, mode="async", minibatches=MINIBATCHES, example_batch=(x[:8], y[:8]))
    whole = dapple.pipeline(network.loss_fn, **cut, micro_batches=2)
    errors: dict[str, float] = {}
    rows = {name: list(map(list, found)) for name, found in step.needs.rows().items()}
    shards = list(dapple.shard(tf.data.Dataset.from_tensor_slices((x, y)), step))
    for number, (batch, losses) in enumerate(zip(shards, wanted, strict=True)):
        step(*batch, local=True)
        errors[f"losses of window {number}"] = relative_error(step.losses.numpy(), losses)
    errors["forward"] = relative_error(step.forward(x[:3], y[:3]).numpy(), forward.numpy())
    errors["synchronous"] = relative_error(whole(x[:8], y[:8]).numpy(), synchronous)
    step(x[8:13], y[8:13])
    errors["losses after a synchronous step"] = relative_error(step.losses.numpy(), last)
    refused = {
        "gradients": _message(lambda: step.run_exposed(x, y)),
        "small": _message(lambda: step(x[:3], y[:3])),
        "small, local": _message(lambda: step(x[:3], y[:3], local=True)),
    }
    step.check_numerics = True
    refused["numbers"] = _message(lambda: step(x * np.nan, y))
    step.release()
    for number, (variable, value) in enumerate(zip(network.variables, expected, strict=True)):
        errors[f"variable {number}"] = relative_error(variable.numpy(), value)
    return {"errors": errors, "rows": rows, "refused": refused, "iterations": int(cut["optimizer"].iterations.numpy())}


def _message(work: Callable[[], Any]) -> str:
    try:
        work()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
