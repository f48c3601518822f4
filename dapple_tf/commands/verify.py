"""``dapple verify``: compare a pipelined training step with the same step on one device."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import click

from dapple_tf.commands.cluster_option import load_optional_cluster
from dapple_tf.commands.model_loading import load_model
from dapple_tf.commands.options import MODEL_OPTIONS, PLAN_OPTIONS, add_options, load_plan, parse_request
from dapple_tf.commands.output import print_result
from dapple_tf.commands.startup import start_tensorflow


@click.command()
@add_options(MODEL_OPTIONS, PLAN_OPTIONS)
def verify(**options: Any) -> None:
    """Compare one training step of MODEL over a pipeline with one on one device; exit 1 where they differ."""
    start_tensorflow(options["devices"])
    from dapple_tf.commands.training_loop import repeat_batches
    from dapple_tf.verification import verify as compare

    plan, request = load_plan(**options), parse_request(**options)
    workload = load_model(**options)
    report = compare(
        workload.loss_fn,
        optimizer=workload.optimizer,
        batch=next(repeat_batches(workload.dataset)),
        plan=plan,
        stages=request.stages,
        replicas=request.replicas,
        micro_batches=request.micro_batches,
        schedule=request.schedule,
        recompute=request.recompute,
        cluster=load_optional_cluster(**options),
    )
    print_result(str(report))
    if options["as_json"]:
        errors = {k: getattr(report, f"max_{k}_error") for k in ("loss", "gradient", "variable")}
        print_result(json.dumps({"ok": report.ok, "max_errors": errors, "plan": dataclasses.asdict(report.plan)}))
    if not report.ok:
        sys.exit(1)
