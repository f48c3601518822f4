"""``dapple verify``: compare a pipelined training step with the same step on one device."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import click

from dapple_tf.autoplan.options import WINDOW_NOT_VERIFIED
from dapple_tf.commands.command import command, result_options
from dapple_tf.commands.model_loading import check_model_exists, load_model
from dapple_tf.commands.options import MODEL_ARGUMENT, MODEL_OPTIONS, PLAN_OPTIONS, read_options, window_options
from dapple_tf.commands.ranks import Ranks
from dapple_tf.commands.startup import start_tensorflow
from dapple_tf.commands.workload import Workload
from dapple_tf.distributed import membership


@command(short_help="Compare a step with one device.")
@MODEL_ARGUMENT
@MODEL_OPTIONS
@PLAN_OPTIONS
@window_options(hidden=True)
@result_options()
def verify(**options: Any) -> None:
    """Compare one training step of MODEL over a pipeline with one on one device; exit 1 where they differ.

    Under mpirun or horovodrun every process runs its stages; the first one also trains on one device, and prints.
    """
    given = {name: options[name] for name in ("minibatches", "weights", "depth") if options[name] is not None}
    words = ["--async"] * options["asynchronous"] + [f"--{name} {value}" for name, value in given.items()]
    if words:
        raise click.UsageError(f"{words[0]}: {WINDOW_NOT_VERIFIED}")
    check_model_exists(options["model"])
    chosen = read_options(options)
    start_tensorflow(options["devices"])
    from dapple_tf.verification import verify as compare

    ranks = Ranks(membership.current())
    workload, batch = ranks.job.run_on_all(lambda: _load_workload(options))
    report = compare(workload.loss_fn, optimizer=workload.optimizer, batch=batch, **chosen)
    ranks.print_result(str(report))
    if options["as_json"]:
        ranks.print_result(json.dumps(report.to_json()))
    ranks.job.check_call_history()
    if not report.ok:
        sys.exit(1)


def _load_workload(options: Mapping[str, Any]) -> tuple[Workload, tuple[Any, ...]]:
    """Return the model that ``options`` name, and its first batch."""
    from dapple_tf.commands.training_loop import repeat_batches

    workload = load_model(**options)
    return workload, next(repeat_batches(workload.dataset))
