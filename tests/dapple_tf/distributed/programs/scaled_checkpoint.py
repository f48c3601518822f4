"""Save a run whose optimizer scales the loss, accumulates gradients and averages weights, and go on from there."""

from __future__ import annotations

from typing import Any

import numpy as np

import dapple_tf as dapple
from dapple_tf.distributed.membership import current
from tests.dapple_tf.distributed.programs.cases import Chain, all_conditions, overflowing
from tests.equality.one_device import as_tf, named_variables, relative_error, train_on_one_device

SAVED = 3  # after a step that overflowed, and in the middle of an accumulation


def run(folder: str) -> dict[str, Any]:
    """Return the errors against one device: of losses after the checkpoint, and of all variables at the end."""
    job = current()
    assert not job.is_alone
    made, problem = overflowing(), Chain(make_optimizer=all_conditions)()
    before = {name: variable.numpy() for name, variable in problem.variables.items()}
    expected = train_on_one_device(problem, made)

    def pipeline(starts: list[str]) -> tuple[Any, Any]:
        for name, variable in problem.variables.items():
            as_tf(variable).assign(before[name])
        optimizer = all_conditions()
        options = {"stages": starts, "micro_batches": 2, "example_batch": made[0]}
        return dapple.pipeline(problem.loss_fn, optimizer=optimizer, **options), optimizer

    step, _ = pipeline(["layer2"])
    for batch in made[:SAVED]:
        step(*batch)
    checkpoints = dapple.Checkpoints(folder, step)
    checkpoints.save(SAVED)
    step.gather()
    del checkpoints, step  # which unlocks the folder
    step, optimizer = pipeline(["layer1"])
    position = dapple.Checkpoints(folder, step).restore()
    losses = [float(step(*batch)) for batch in made[SAVED:]]
    step.gather()
    named = named_variables(problem, optimizer)
    errors = {name: relative_error(named[name].numpy(), value) for name, value in expected.values.items()}
    wanted = np.array(expected.losses[SAVED:])
    return {"steps": position.steps, "loss": float(np.abs(losses - wanted).max()), "errors": errors}
