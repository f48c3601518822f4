"""``dapple.pipeline``: wrap an unmodified loss into a pipelined training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dapple_tf.autoplan.recompute_option import Recompute
from dapple_tf.autoplan.request import MicroBatches, Request
from dapple_tf.autoplan.slice_option import Slice
from dapple_tf.autoplan.window_option import make_window
from dapple_tf.errors import PlanError
from dapple_tf.exactness import BatchLoss, BatchNorm, Inexact
from dapple_tf.frontend.optimizers import as_keras_optimizer
from dapple_tf.plan import Plan
from dapple_tf.runtime.step import PipelinedStep
from profiler.cluster import Cluster

_USUAL_MICRO_BATCHES = 8


def pipeline(
    loss_fn: Callable[..., Any] | None = None,
    *,
    optimizer: Any,
    plan: Plan | None = None,
    stages: int | Sequence[str] | str = "auto",
    replicas: Sequence[int] | None = None,
    micro_batches: MicroBatches | None = None,
    schedule: str = "auto",
    recompute: Recompute = False,
    sparse_gradients: str = "exact",
    inexact: Inexact = "error",
    batch_loss: BatchLoss = False,
    batch_norm: BatchNorm = "micro-batch",
    jit_compile: bool | None = None,
    slice: Slice = None,
    mode: str = "sync",
    minibatches: int | None = None,
    weights: str | None = None,
    depth: int | None = None,
    devices: Sequence[str | int] | None = None,
    cluster: Cluster | None = None,
    example_batch: Sequence[Any] | None = None,
) -> Any:
    """Return a training step over a pipeline that computes what the same step on one device computes.

    Without ``loss_fn`` it returns a decorator.

    Args:
        loss_fn: A tf.function or callable of the batch's tensors, each batched on axis 0. Returns the mean loss over
            the batch, or (loss, aux).
        optimizer: A Keras optimizer, or its name or configuration, as in ``model.compile``. One that scales the loss
            (LossScaleOptimizer, ``loss_scale_factor``) does so here: the gradients are those of
            ``optimizer.scale_loss(loss)``, and the loss that is returned is not scaled. So ``loss_fn`` must not scale
            it. One of Keras 2 (tf_keras) is replaced by one of Keras 3, if that has its configuration.
        plan: A plan that a planner made. Given instead of ``stages``, ``replicas`` and ``recompute``.
        stages: The number of stages, the names of the layers that start one, or "auto": the model is profiled, and
            planned for ``cluster`` or the devices at hand.
        replicas: The number of devices of each stage, such as [2, 1]; where devices run several stages, of each worker.
        micro_batches: M (by default 8), or "auto"; or for each micro-batch its samples, such as [2, 2, 4] of a first
            batch of 8, or its share of the samples, such as [0.25, 0.25, 0.5]. Batches of another size are cut in the
            same proportion, or into equal micro-batches where one would be too small. Needs ``stages`` (or
            ``replicas``).
            With ``mode="async"`` only for "2bw": how many a minibatch is cut into, by default the number of stages.
        schedule: "gpipe", "dapple-a", "dapple-b", "zb-h1", "zb-h2" (each with ":D=n": memory holds n micro-batches);
            "interleaved-1f1b", "interleaved-zb" and "looped-bfs", whose devices run two stages each (or n, with
            ":v=n"); "zb-v", "dualpipe-v" and "hanayo:w=n", whose stages go over the devices and back; "zb-auto",
            searched for; "K=3,2,1", the warm-up of each stage; the actions of every device, "0F0 0F1 0B0 0B1; 1F0 1B0
            1F1 1B1"; or "auto".
        recompute: Layers whose activations backward computes again instead of keeping them: True (all), one flag for
            each stage, or the names of layers.
        inexact: What to do where a step would differ from one device's: "error", "warn" (train on, with a warning that
            says why) or "allow". See ``step.exactness``.
        batch_loss: For losses that are no sum or mean over samples (contrastive, Dice, a correlation): True cuts the
            model after the last tensors that hold a row for each sample; what follows runs once a step on the rows of
            all micro-batches, and backward starts when it has. That needs the schedule "gpipe", and memory for the
            activations of all micro-batches. "auto": only where the loss does not add up, and the schedule allows it.
        batch_norm: Of which samples batch norm takes statistics in training mode. "micro-batch": each replica of a
            stage normalises its samples of a micro-batch by themselves; each micro-batch moves the moving statistics
            in turn, and replicas are averaged. "deferred": the same, but moving statistics move once a step, by mean
            and variance over the whole batch. "sync": replicas normalise all samples of a micro-batch together.
        jit_compile: Whether XLA compiles each stage function that it can compile: True, False, or None, which follows
            the loss, a tf.function with ``jit_compile=True``. A warning names the functions that run without it.
        slice: How many of the first micro-batches run their forwards in two halves, so that the last stage starts in
            half the time (AutoPipe's Slicer): a number, or "auto". For 1F1B ("dapple-a") with three stages or more.
        mode: "sync": weights change once a step, as on one device. "async": a call takes a *window* of minibatches,
            each of which updates the weights, and the pipeline is not flushed between them (PipeDream). Replicas of a
            stage take minibatches in turn. The call returns the mean of the minibatches' losses, which are in
            ``step.losses``.
        minibatches: W, the minibatches of a window (by default 64): minibatch m has the rows [N m / W, N (m + 1) / W)
            of N. A multiple of each stage's replicas.
        weights: What weights a backward uses in a window: "stash" (default), those of its forward, which are the newest
            ones then; "vertical-sync", on all stages the version that the first stage had when the minibatch entered;
            "2bw", two versions, where each minibatch is cut into micro-batches; "latest", the newest ones, which gives
            no valid gradient.
        depth: Minibatches in flight on the first stage of a window, for pipelines without replicas. By default as many
            as keep all stages busy.
        sparse_gradients: What the optimizer gets of a variable that is used by its rows, such as an embedding: "exact",
            the tf.IndexedSlices that it would get on one device; or "dense", a tensor of the variable's shape.
        devices: Names or indices of the devices to use.
        cluster: What to plan for. The simulator then chooses what is "auto" from a profile measured now, and
            ``step.choice`` says why.
        example_batch: A batch like those to come: the plan is made and the step built now, not at the first call.

    Raises:
        ValueError: One of its subclasses in ``dapple_tf.errors``; the message says what cannot be done and what can.
    """
    optimizer = as_keras_optimizer(optimizer)
    if cluster is not None and not isinstance(cluster, Cluster):
        raise PlanError(f"cluster is a {type(cluster).__name__}: read a file with dapple.Cluster.load(path)")
    window = make_window(mode, minibatches, weights, depth, micro_batches, plan)
    request = Request(
        stages,
        replicas,
        1 if window is not None else _USUAL_MICRO_BATCHES if micro_batches is None else micro_batches,
        schedule,
        recompute,
        sparse_gradients,
        inexact,
        batch_loss,
        batch_norm,
        jit_compile,
        slice,
        window,
    )

    def wrap(function: Callable[..., Any]) -> PipelinedStep:
        return PipelinedStep(function, optimizer, request, plan, devices, cluster, example_batch)

    return wrap if loss_fn is None else wrap(loss_fn)
