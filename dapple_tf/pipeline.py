"""``dapple.pipeline``: wrap an unmodified loss into a pipelined training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dapple_tf.autoplan.recompute_option import Recompute
from dapple_tf.autoplan.request import Request
from dapple_tf.errors import PlanError
from dapple_tf.plan import Plan
from dapple_tf.runtime.step import PipelinedStep
from profiler.cluster import Cluster


def pipeline(
    loss_fn: Callable[..., Any] | None = None,
    *,
    optimizer: Any,
    plan: Plan | None = None,
    stages: int | Sequence[str] | str = "auto",
    replicas: Sequence[int] | None = None,
    micro_batches: int | str = 8,
    schedule: str = "auto",
    recompute: Recompute = False,
    devices: Sequence[str | int] | None = None,
    cluster: Cluster | None = None,
    example_batch: Sequence[Any] | None = None,
) -> Any:
    """A training step over a pipeline of ``stages``, equal to one device's.

    ``loss_fn``: a tf.function or callable of the batch's tensors (each batched on axis 0) that returns their
    mean loss, or (loss, aux). ``optimizer``: a keras optimizer. ``plan``: what a planner decided; or say
    ``stages`` (a number, the names of the layers that start a stage, or "auto": the model is profiled, and planned for
    ``cluster`` or the devices at hand), ``replicas`` of each stage, ``micro_batches`` (or "auto") and ``schedule``
    ("gpipe", "dapple-a", "dapple-b", "zb-h1", with ":D=n" where memory holds n micro-batches; "K=3,2,1"; the actions of
    every stage, "0F0 0F1 0B0 0B1; 1F0 1B0 1F1 1B1"; or "auto"). With stages and a
    ``cluster`` the simulator chooses what is "auto" from a profile taken now: ``step.choice`` says why. ``recompute``:
    backward makes activations again instead of keeping them: True (of all layers), one truth for each stage, or the
    names of layers. ``devices``: names or indices. Without ``loss_fn`` it is a decorator.

    Raises subclasses of ValueError that say what cannot be done and what can.
    """
    if optimizer is None:
        raise PlanError("optimizer is None: give a keras.optimizers.Optimizer")
    if cluster is not None and not isinstance(cluster, Cluster):
        raise PlanError(f"cluster is a {type(cluster).__name__}: read a file with dapple.Cluster.load(path)")
    request = Request(stages, replicas, micro_batches, schedule, recompute)

    def wrap(function: Callable[..., Any]) -> PipelinedStep:
        return PipelinedStep(function, optimizer, request, plan, devices, cluster, example_batch)

    return wrap if loss_fn is None else wrap(loss_fn)
