"""``dapple verify``: compare a step over a pipeline with one on one device."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import click

from dapple_tf.commands.common import (
    MODEL,
    PLAN,
    add_options,
    load_model,
    load_named_cluster,
    load_plan,
    make_request,
    say,
    start,
)


@click.command()
@add_options(MODEL, PLAN)
def verify(**options: Any) -> None:
    """Compare one step of MODEL over a pipeline with one on one device; exit 1 where they differ."""
    start(options["devices"])
    from dapple_tf.commands.training_loop import batches
    from dapple_tf.verification import verify as compare

    plan, request = load_plan(options["plan_path"]), make_request(**options)
    workload = load_model(**options)
    batch = next(iter(batches(workload.dataset, 1)))
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
        cluster=load_named_cluster(**options),
    )
    say(str(report))
    if options["as_json"]:
        errors = {k: getattr(report, f"max_{k}_error") for k in ("loss", "gradient", "variable")}
        click.echo(json.dumps({"ok": report.ok, "max_errors": errors, "plan": dataclasses.asdict(report.plan)}))
    if not report.ok:
        sys.exit(1)
