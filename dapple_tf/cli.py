"""The command line: ``dapple train`` and ``dapple verify``.

Progress and logs go to stderr, results to stdout; with ``--json`` the last line is one JSON object. Exit codes:
0 done, 1 failed, 2 wrong usage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from dapple_tf.errors import ModelError

_MODEL = [
    click.argument("model"),
    click.option("--batch-size", default=None, type=int, help="Samples of a batch (the model's batch_size option)."),
    click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="An option of the model's callable."),
    click.option("--seed", default=None, type=int, help="Seed of the model and of the data (its seed option)."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line of stdout."),
]
_PLAN = [
    click.option("--stages", default="auto", help="Number of stages, layer names (a,b,c), or auto."),
    click.option("--replicas", default=None, help="Devices of each stage, such as 2,1."),
    click.option("--micro-batches", default=8, show_default=True, help="M, micro-batches of a step."),
    click.option("--schedule", default="auto", show_default=True, help="gpipe, dapple-a, dapple-b, or auto; :D=n."),
    click.option("--plan", "plan_path", default=None, help="A plan file, in place of the options above."),
    click.option("--devices", default=None, type=int, help="Logical devices to make on a machine without GPUs."),
]


def _options(*lists: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed([option for options in lists for option in options]):
            function = option(function)
        return function

    return decorate


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dapple_tf")
def cli() -> None:
    """Pipelined training of unmodified TensorFlow 2 models."""


@cli.command()
@_options(_MODEL, _PLAN)
@click.option("--steps", default=100, show_default=True, help="Training steps.")
@click.option("--trace", default=None, help="Save the timeline of the last step as .png or .json.")
@click.option("--checkpoint-dir", default=None, help="Save checkpoints here, and resume from the last.")
@click.option("--compare", default=0, help="First time this many steps of the model un-pipelined, for comparison.")
def train(steps: int, trace: str | None, checkpoint_dir: str | None, compare: int, **options: Any) -> None:
    """Train MODEL (path.py:callable or package.module:callable) over a pipeline."""
    if steps < 1:
        raise click.UsageError("--steps must be at least 1")
    _start(options["devices"])
    from dapple_tf.runtime.picture import check_path, save_timeline
    from dapple_tf.runtime.step import PipelinedStep
    from dapple_tf.training import batches, run_steps

    if trace:
        check_path(trace)
    plan, request = _plan(options["plan_path"]), _request(**options)
    plain_speed = _time_plain(compare, **options) if compare else None
    workload = _load(**options)
    step = PipelinedStep(workload.loss_fn, workload.optimizer, request, plan)
    first = next(iter(batches(workload.dataset, 1)))
    step.build(*first)
    _say(describe(step.plan, step.layer_names))
    done, saved = 0, None
    if checkpoint_dir:
        from dapple_tf.checkpoint import Checkpoints

        saved = Checkpoints(checkpoint_dir, step, first, workload.optimizer)
        done = saved.restore()
        if done:
            _say(f"resumed after step {done} from {checkpoint_dir}")
    if done >= steps:
        raise click.ClickException(f"{checkpoint_dir} has {done} steps already: ask for more with --steps")
    every = max(1, steps // 10)
    keep = saved

    def after(number: int) -> None:
        if keep is not None and (number % every == 0 or number == steps):
            keep.save(number)

    numbers = itertools.count(done + 1)

    def one(*batch: Any) -> Any:
        # The last two steps take times: the first of them also builds, the second is the one to look at.
        return (step.record if trace and next(numbers) > steps - 2 else step)(*batch)

    run = run_steps(one, workload, steps - done, "training", done, after)
    result = {
        "steps": steps,
        "first_loss": run.losses[0],
        "last_loss": run.losses[-1],
        "samples_per_second": run.samples_per_second,
        "plan": dataclasses.asdict(step.plan),
    }
    _say(f"loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f} in {len(run.losses)} steps")
    speed = f"{run.samples_per_second:.1f} samples/s"
    if plain_speed is not None:
        result["plain_samples_per_second"] = plain_speed
        ratio = run.samples_per_second / plain_speed
        speed += f"; the same model un-pipelined on the same cores: {plain_speed:.1f} samples/s ({ratio:.2f}x)"
    _say(speed)
    if trace:
        name = options["model"].rpartition(":")[2]
        save_timeline(step.timeline, trace, f"{name}: {step.plan.schedule}, M = {step.plan.micro_batches}")
        result["trace"] = trace
        _say(f"timeline of one step: {trace}")
    if options["as_json"]:
        click.echo(json.dumps(result))


@cli.command(hidden=True)
@_options(_MODEL)
@click.option("--steps", default=10, help="Steps to time.")
def plain(steps: int, **options: Any) -> None:
    """Time MODEL as an ordinary tf.function on one device; what ``train --compare`` runs beside the pipeline."""
    with quiet_start():
        from dapple_tf.devices import home_device

        home_device()
    from dapple_tf.training import plain_step, run_steps

    workload = _load(**options)
    run = run_steps(plain_step(workload), workload, steps + 1, "un-pipelined")
    click.echo(json.dumps({"samples_per_second": run.samples_per_second}))


def _time_plain(
    steps: int, model: str, settings: Sequence[str], batch_size: int | None, seed: int | None, **_: Any
) -> float:
    """Samples a second of the model un-pipelined, in a process of its own with TensorFlow as it comes."""
    command = [sys.executable, "-m", "dapple_tf", "plain", model, "--steps", str(steps)]
    for setting in settings:
        command += ["--set", setting]
    for option, value in (("--batch-size", batch_size), ("--seed", seed)):
        command += [] if value is None else [option, str(value)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"the un-pipelined {model} failed (see above): leave --compare out")
    return float(json.loads(done.stdout.splitlines()[-1])["samples_per_second"])


@cli.command()
@_options(_MODEL, _PLAN)
def verify(**options: Any) -> None:
    """Compare one step of MODEL over a pipeline with one on one device; exit 1 where they differ."""
    _start(options["devices"])
    from dapple_tf.training import batches
    from dapple_tf.verification import verify as compare

    plan, request = _plan(options["plan_path"]), _request(**options)
    workload = _load(**options)
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
    )
    _say(str(report))
    if options["as_json"]:
        errors = {k: getattr(report, f"max_{k}_error") for k in ("loss", "gradient", "variable")}
        click.echo(json.dumps({"ok": report.ok, "max_errors": errors, "plan": dataclasses.asdict(report.plan)}))
    if not report.ok:
        sys.exit(1)


def _say(text: str) -> None:
    click.echo(text)


def describe(plan: Any, layers: Sequence[str]) -> str:
    """A plan in a few lines, with the names of its layers."""
    lines = [
        f"{len(plan.stages)} stages, {plan.micro_batches} micro-batches of {plan.micro_batch_size} samples, "
        f"schedule {plan.schedule}"
    ]
    for i, stage in enumerate(plan.stages):
        devices = ", ".join(map(str, stage.devices))
        first, last = layers[stage.first_layer], layers[stage.last_layer]
        lines.append(f"  stage {i}, device {devices}: {first} .. {last}")
    return "\n".join(lines)


def _request(
    stages: str,
    replicas: str | None,
    micro_batches: int,
    schedule: str,
    plan_path: str | None = None,
    **_: Any,
) -> Any:
    from dapple_tf.planner.requested import Request

    wanted: Any = stages
    if stages.isdigit():
        wanted = int(stages)
    elif stages != "auto":
        wanted = stages.split(",")
    counts = None
    if replicas is not None:
        if not all(part.strip().isdigit() for part in replicas.split(",")):
            raise click.UsageError(f"--replicas {replicas}: give one whole number a stage, such as 2,1")
        counts = tuple(int(part) for part in replicas.split(","))
    return Request(wanted, counts, micro_batches, schedule)


def _plan(path: str | None) -> Any:
    from dapple_tf.planner.plan import Plan

    return Plan.load(path) if path else None


def _load(model: str, settings: tuple[str, ...], batch_size: int | None, seed: int | None, **_: Any) -> Any:
    from dapple_tf.model_file import accepts, load_workload, parse_options

    chosen = parse_options(settings)
    for key, value in (("batch_size", batch_size), ("seed", seed)):
        if value is not None:
            if not accepts(model, key):
                raise ModelError(f"{model} takes no {key}, so --{key.replace('_', '-')} cannot be given")
            chosen[key] = value
    return load_workload(model, chosen)


def _start(devices: int | None) -> None:
    """Import TensorFlow and make the devices."""
    with quiet_start():
        from dapple_tf.devices import home_device, init

        init(devices)
        home_device()


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Hold back what TensorFlow's libraries print about the processor while they start; shown if they fail."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(kept, 2)
            held.seek(0)
            os.write(2, held.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def main() -> None:
    """Run the command line; errors of ours are one line on stderr, not a traceback."""
    try:
        cli(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(2 if isinstance(error, click.UsageError) else 1)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.Abort:
        click.echo("stopped", err=True)
        sys.exit(1)
    except (ValueError, RuntimeError, OSError) as error:
        if not type(error).__module__.startswith(("dapple_tf", "graph_passes")) and not isinstance(
            error, OSError | ValueError
        ):
            raise
        click.echo(f"error: {error}", err=True)
        sys.exit(2 if isinstance(error, ModelError) else 1)  # a wrong MODEL or option is wrong usage
