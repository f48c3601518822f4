"""Train with two stages on each of two ranks: all that a step does, compared with one device."""

from __future__ import annotations

from typing import Any

import dapple_tf as dapple
from dapple_tf.distributed.membership import current
from dapple_tf.timeline.picture import make_chart
from tests.equality.one_device import Problem, relative_error, train_on_one_device
from tests.equality.small_models import chain, data, sgd, values, weights

STARTS = ["layer1", "layer2", "layer3"]
MICRO_BATCHES = 4
SCHEDULE = "interleaved-1f1b:v=2"


def problem() -> Problem:
    matrices = weights(4)
    return Problem(chain(matrices), {f"w{i}": matrix for i, matrix in enumerate(matrices)}, sgd)


def run() -> dict[str, Any]:
    """Return this rank's recording and reports, and errors of what it computed."""
    job = current()
    assert not job.is_alone
    batches = [data(8, seed) for seed in range(4)]
    expected = train_on_one_device(problem(), batches)
    made = problem()
    step = dapple.pipeline(made.loss_fn, optimizer=sgd(), stages=STARTS, micro_batches=MICRO_BATCHES, schedule=SCHEDULE)
    errors = {"forward": relative_error(step.forward(*batches[0]).numpy(), expected.losses[0])}
    loss, gradients = step.run_exposed(*batches[0])
    for name, gradient in expected.gradients.items():
        errors[f"gradient of {name}"] = relative_error(gradients[name], gradient)
    losses = [loss, *(step.record(*batch).numpy() for batch in batches[1:3])]
    needs = step.needs.rows()
    (x, y) = batches[3]
    losses.append(step(*((x, None), (None, y))[job.rank], local=True).numpy())
    errors |= {f"loss of step {i}": relative_error(loss, expected.losses[i]) for i, loss in enumerate(losses)}
    step.gather()
    for name, value in zip(made.variables, values(list(made.variables.values())), strict=True):
        errors[f"value of {name}"] = relative_error(value, expected.values[name])
    timeline = step.timeline
    return {
        "errors": errors,
        "needs": {name: bool(rows) for name, rows in needs.items()},
        "events": [[str(event.action), event.device, event.start, event.end] for event in timeline.events],
        "transfers": [[t.source, t.target, t.micro_batch, t.start, t.end] for t in timeline.transfers],
        "rows": [row.name for row in make_chart(timeline).rows if not row.network],
        "predicted": step.recording.predicted is not None,
        "report": {"text": str(step.report), **step.report.to_json()},
        "stages": list(job.progress.stages),
    }
