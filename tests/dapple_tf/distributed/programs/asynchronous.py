"""Train asynchronous windows as ranks of a job, each compared with PipeDream's formulas in eager TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras

import dapple_tf as dapple
from dapple_tf.distributed.membership import current
from tests.asynchronous.networks import Network, dense, dropouts, embedding, moving_average
from tests.asynchronous.reference import Reference, as_tf, copies
from tests.equality.one_device import relative_error

MINIBATCHES = 6
CASES: Mapping[str, tuple[Callable[[], Network], dict[str, Any]]] = {
    "1:1": (lambda: dense([2, 2]), {}),
    "1:1, 2bw": (lambda: dense([1, 2]), {"weights": "2bw", "micro_batches": 2}),
    "dropout": (dropouts, {}),
    "vertical sync": (lambda: dense([1, 1]), {"weights": "vertical-sync"}),
    "2:1": (lambda: dense([2, 1]), {"replicas": [2, 1]}),
    "2:1, embedding": (embedding, {"replicas": [2, 1]}),
    "1:1:1, latest": (lambda: dense([1, 1, 1]), {"weights": "latest"}),
    "2:1, dropout": (dropouts, {"replicas": [2, 1]}),
    "2:1, average": (lambda: moving_average(0), {"replicas": [2, 1]}),
    "1:1, average": (lambda: moving_average(1), {}),
    "2:1, 2bw": (lambda: dense([1, 1]), {"replicas": [2, 1], "weights": "2bw", "micro_batches": 2}),
}


def run(*names: str) -> dict[str, Any]:
    """Return by case what this rank found."""
    return {name: run_case(*CASES[name]) for name in names}


def run_case(make: Callable[[], Network], options: dict[str, Any]) -> dict[str, Any]:
    """Train two windows by the reference, then as ranks; return the errors and the events of a third one."""
    job = current()
    assert not job.is_alone
    network = make()
    before = copies(network.variables)
    weights, replicas = options.get("weights", "stash"), options.get("replicas")
    reference = Reference(network.model(weights), lambda: keras.optimizers.Adam(0.01))
    batches = [network.batch(size, seed) for size, seed in ((36, 1), (30, 2))]
    shared = None if weights == "2bw" else replicas  # there replicas share each micro-batch, which changes no value
    wanted = [reference.window(batch, MINIBATCHES, weights, replicas=shared, depth=None).losses for batch in batches]
    expected = copies(network.variables)
    for variable, value in zip(network.variables, before, strict=True):
        variable.assign(value + job.rank if value.dtype.kind == "f" else value)  # rank 0's must reach all
    step = dapple.pipeline(
        network.loss_fn,
        optimizer=keras.optimizers.Adam(0.01),
        stages=list(network.starts),
        mode="async",
        minibatches=MINIBATCHES,
        **options,
    )
    errors = {}
    for i, (batch, losses) in enumerate(zip(batches, wanted, strict=True)):
        loss = step(*batch)
        errors[f"losses of window {i}"] = relative_error(step.losses.numpy(), losses)
        errors[f"loss of window {i}"] = relative_error(loss.numpy(), sum(losses) / len(losses))
    step.gather()
    for number, (variable, value) in enumerate(zip(network.variables, expected, strict=True)):
        errors[f"variable {number}"] = relative_error(as_tf(variable).numpy(), value)
    step.record(*batches[0])
    events = [[str(event.action), event.device] for event in step.timeline.events]
    return {"errors": errors, "iterations": int(step._optimizer.iterations.numpy()), "events": events}
