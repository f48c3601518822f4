"""``dapple verify``: compare a pipelined training step with the same step on one device."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import click

from dapple_tf.commands.cluster_option import load_optional_cluster
from dapple_tf.commands.model_loading import check_model_exists, load_model
from dapple_tf.commands.options import MODEL_OPTIONS, PLAN_OPTIONS, add_options, load_plan, parse_request
from dapple_tf.commands.ranks import Ranks
from dapple_tf.commands.startup import start_tensorflow
from dapple_tf.commands.window_options import window_options
from dapple_tf.commands.workload import Workload
from dapple_tf.distributed import membership
from profiler.cluster import Cluster


@click.command()
@add_options(MODEL_OPTIONS, PLAN_OPTIONS, window_options(hidden=True))
def verify(**options: Any) -> None:
    """Compare one training step of MODEL over a pipeline with one on one device; exit 1 where they differ.

    Under mpirun or horovodrun every process runs its stages; the first one also trains on one device, and prints.
    """
    _refuse_windows(options)
    check_model_exists(options["model"])
    start_tensorflow(options["devices"])
    from dapple_tf.verification import verify as compare

    ranks = Ranks(membership.current())
    plan = ranks.run_on_all(lambda: load_plan(**options))
    request = ranks.run_on_all(lambda: parse_request(plan=plan, **options))
    workload, batch, cluster = ranks.run_on_all(lambda: _load_workload(options))
    report = compare(
        workload.loss_fn,
        optimizer=workload.optimizer,
        batch=batch,
        plan=plan,
        stages=request.stages,
        replicas=request.replicas,
        micro_batches=request.micro_batches,
        schedule=request.schedule,
        recompute=request.recompute,
        batch_norm=request.batch_norm,
        jit_compile=request.jit_compile,
        slice=request.slice,
        cluster=cluster,
    )
    ranks.print_result(str(report))
    if options["as_json"]:
        ranks.print_result(json.dumps(report.to_json()))
    ranks.wait_for_all()
    if not report.ok:
        sys.exit(1)


def _refuse_windows(options: Mapping[str, Any]) -> None:
    """Raise UsageError for asynchronous windows."""
    given = ["--async"] if options["asynchronous"] else []
    given += [f"--{name} {options[name]}" for name in ("minibatches", "weights", "depth") if options[name] is not None]
    if given:
        raise click.UsageError(
            f"{given[0]}: an asynchronous window uses weights that are some updates old, so no step on one device "
            "equals it. Verify the same stages in a step, without this option: a window runs the same functions, and "
            "its order and the weights that it uses are proved before it runs"
        )


def _load_workload(options: Mapping[str, Any]) -> tuple[Workload, tuple[Any, ...], Cluster | None]:
    """Return the model that ``options`` name, its first batch, and the cluster."""
    from dapple_tf.commands.training_loop import repeat_batches

    workload = load_model(**options)
    return workload, next(repeat_batches(workload.dataset)), load_optional_cluster(**options)
