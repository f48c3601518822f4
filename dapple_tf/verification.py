"""``dapple.verify``: check that a pipelined step computes what one device computes.

The loss, every gradient and every updated variable are compared. The error of a tensor is the largest absolute
difference, divided by the largest absolute value of the one device's tensor. A difference below the rounding error of
the model's largest gradient is divided by that gradient instead: some gradients (of a bias before a normalization) are
zero apart from rounding.

Optimizers such as Adam divide a gradient by its own size, so where a gradient is nearly zero, its rounding error
becomes a whole update. Updates are therefore also compared for the *same* gradients (the pipeline's): a variable that
is equal only then does not fail, and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf.autoplan.recompute_option import Recompute
from dapple_tf.autoplan.request import Request
from dapple_tf.backend.saved_variables import unchanged_variables
from dapple_tf.compiler import StagedModel
from dapple_tf.frontend.batch import batch_signature, batch_size
from dapple_tf.plan import Plan
from dapple_tf.runtime.step import PipelinedStep
from graph_passes.analysis.variable_use import find_variables
from graph_passes.schedules.policies import abbreviate_schedule
from profiler.cluster import Cluster

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-1, "float16": 1e-2}


@dataclass(frozen=True)
class Difference:
    """The error of one tensor of the pipeline against one device.

    ``kind``: loss, gradient, variable (after the step), or update (the variable after a step with the same gradients).
    """

    kind: str
    name: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the error is within the tolerance (NaN is not)."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Report:
    """The result of ``verify``; its text names the first tensor that diverges."""

    plan: Plan
    differences: tuple[Difference, ...]
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether every tensor is within its tolerance (variables at least for the same gradients)."""
        return self._first_bad() is None

    def _first_bad(self) -> Difference | None:
        updates = {d.name: d for d in self.differences if d.kind == "update"}
        for difference in self.differences:
            excused = difference.kind == "variable" and updates[difference.name].ok
            if not difference.ok and not excused:
                return difference
        return None

    def _largest(self, kind: str) -> float:
        return max((d.error for d in self.differences if d.kind == kind), default=0.0)

    @property
    def max_loss_error(self) -> float:
        """Relative error of the loss."""
        return self._largest("loss")

    @property
    def max_gradient_error(self) -> float:
        """Largest relative error of a gradient."""
        return self._largest("gradient")

    @property
    def max_variable_error(self) -> float:
        """Largest relative error of a variable after the step (weights, state and slots)."""
        return self._largest("variable")

    def __str__(self) -> str:
        plan = self.plan
        head = f"{len(plan.stages)} stages, replicas {list(plan.replicas)}, {plan.micro_batches} micro-batches"
        outcome = "equal to one device" if self.ok else "DIFFERS from one device"
        lines = [f"{head}, {abbreviate_schedule(plan.schedule)}: {outcome}"]
        lines.append(
            f"largest relative errors: loss {self.max_loss_error:.1e}, gradients {self.max_gradient_error:.1e}, "
            f"variables after the step {self.max_variable_error:.1e}"
        )
        bad = self._first_bad()
        if bad is None and self.max_variable_error > max(d.tolerance for d in self.differences):
            lines.append(
                "with the same gradients all updates are equal: "
                "the optimizer enlarges the rounding errors of tiny gradients"
            )
        if bad is not None:
            lines.append(
                f"first to diverge: {bad.kind} {bad.name!r}, error {bad.error:.1e} (allowed {bad.tolerance:.0e})"
            )
        return "\n".join([*lines, self.note] if self.note else lines)


def verify(
    loss_fn: Callable[..., Any],
    *,
    optimizer: Any,
    batch: Sequence[Any],
    plan: Plan | None = None,
    stages: int | Sequence[str] | str = "auto",
    replicas: Sequence[int] | None = None,
    micro_batches: int | str = 8,
    schedule: str = "auto",
    recompute: Recompute = False,
    sparse_gradients: str = "exact",
    devices: Sequence[str | int] | None = None,
    cluster: Cluster | None = None,
) -> Report:
    """Run one step over the pipeline and one plain training step from the same variables, and compare them.

    Arguments are those of ``pipeline``; ``batch`` is the tuple of the step's arguments. All variables (weights, state,
    optimizer slots) have their old values afterwards. Where forward draws random numbers or writes variables (dropout,
    batch norm), the result on one device depends on how the batch is divided: the plain step then runs the same
    micro-batches one after the other, and the report says so.
    """
    request = Request(stages, replicas, micro_batches, schedule, recompute, sparse_gradients)
    step = PipelinedStep(loss_fn, optimizer, request, plan, devices, cluster)
    step.build(*batch)
    model = step.model(batch)
    variables = model.variables
    stateful = model.stateful
    state = find_variables(model.graph).state
    parts = micro_batch_slices(batch_size(batch), step.plan.micro_batches) if stateful else [slice(None)]
    with unchanged_variables(variables.values()):
        loss, gradients = _run_one_device(loss_fn, batch, parts, {n: variables[n] for n in model.trained})
        _apply(optimizer, gradients, model.trained_objects, list(gradients))
        wanted = {"loss": loss, "gradient": gradients, "variable": _values(variables)}
    with unchanged_variables(variables.values()):
        loss, gradients = step.run_exposed(*batch)
        found = {"loss": loss, "gradient": gradients, "variable": _values(variables)}
    with unchanged_variables(variables.values()):
        _apply(optimizer, gradients, model.trained_objects, list(wanted["gradient"]))
        wanted["update"], found["update"] = _values(variables), found["variable"]
    for name in state:  # written by forward, not by the optimizer
        wanted["update"][name] = wanted["variable"][name]
    coarsest = _coarsest_tolerance(model)
    largest = max((float(np.max(np.abs(g), initial=0.0)) for g in wanted["gradient"].values()), default=0.0)
    differences = [_compare_tensor("loss", "loss", found["loss"], wanted["loss"], coarsest)]
    for kind in ("gradient", "update", "variable"):
        floor = largest if kind == "gradient" else 0.0
        differences += [
            _compare_tensor(kind, n, found[kind].get(n), wanted[kind][n], coarsest, floor) for n in wanted[kind]
        ]
    return Report(step.plan, tuple(differences), _note(stateful, step.plan))


def _coarsest_tolerance(model: StagedModel) -> float:
    """Return the tolerance of the least precise reduced-precision type in the stages; 0 where there is none."""
    types = {
        kind.dtype.name for f in model.graph.functions for node in f.graph.nodes for kind in node.outputs
    } & TOLERANCE.keys()
    return max((TOLERANCE[name] for name in types if name not in ("float32", "float64")), default=0.0)


def _note(stateful: bool, plan: Plan) -> str:
    if not stateful:
        return ""
    note = "forward draws random numbers or writes variables, so the one device ran the same micro-batches one by one"
    if max(plan.replicas) > 1:
        note += "; each replica has its own copy of that state, so differences are expected with replicas"
    return note


def micro_batch_slices(size: int, micro_batches: int) -> list[slice]:
    """Return the samples of each micro-batch: of N samples, micro-batch m of M holds [N m / M, N (m+1) / M)."""
    return [slice(size * m // micro_batches, size * (m + 1) // micro_batches) for m in range(micro_batches)]


def _run_one_device(
    loss_fn: Callable[..., Any],
    batch: Sequence[Any],
    parts: Sequence[slice],
    trained: Mapping[str, tf.Variable],
) -> tuple[Any, dict[str, Any]]:
    """Return mean loss and gradients of the whole batch from a GradientTape: the weighted sum over ``parts``."""
    leaves = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(tuple(batch))]

    def compute(*flat: Any) -> Any:
        arguments = tf.nest.pack_sequence_as(tuple(batch), list(flat))
        with tf.GradientTape() as tape:
            result = loss_fn(*arguments)
            loss = result[0] if isinstance(result, tuple) else result
        return loss, [tf.convert_to_tensor(g) for g in tape.gradient(loss, list(trained.values()))]

    function = tf.function(compute, input_signature=list(batch_signature(batch)))
    total: Any = None
    sums: list[Any] = []
    for part in parts:
        flat = [leaf[part] for leaf in leaves]
        weight = flat[0].shape[0] / leaves[0].shape[0]
        loss, gradients = function(*flat)
        total = loss * weight if total is None else total + loss * weight
        scaled = [g * tf.cast(weight, g.dtype) for g in gradients]
        sums = [a + b for a, b in zip(sums, scaled, strict=True)] if sums else scaled
    return total.numpy(), {name: g.numpy() for name, g in zip(trained, sums, strict=True)}


def _apply(optimizer: Any, gradients: Mapping[str, Any], trained: Sequence[Any], order: Sequence[str]) -> None:
    tensors = [tf.constant(gradients[name]) for name in order]
    tf.function(lambda *g: optimizer.apply(list(g), list(trained)), autograph=False)(*tensors)


def _values(variables: Mapping[str, tf.Variable]) -> dict[str, Any]:
    return {name: variable.numpy() for name, variable in variables.items()}


def _compare_tensor(
    kind: str, name: str, found: Any, wanted: Any, coarsest: float = 0.0, largest: float = 0.0
) -> Difference:
    """Compare a tensor; see the top of this file.

    ``coarsest``: the tolerance of the least precise type used. ``largest``: the largest entry of any gradient.
    """
    wanted = np.asarray(wanted)
    tolerance = max(TOLERANCE.get(wanted.dtype.name, 0.0), coarsest)
    if found is None or np.shape(found) != wanted.shape:
        return Difference(kind, name, float("inf"), tolerance)
    if wanted.size == 0:
        return Difference(kind, name, 0.0, tolerance)
    if wanted.dtype.kind not in "fc" and wanted.dtype.name not in TOLERANCE:
        return Difference(kind, name, float(np.any(found != wanted)), tolerance)
    error = float(np.max(np.abs(np.asarray(found) - wanted)))
    scale = float(np.max(np.abs(wanted)))
    rounding = 8 * float(np.finfo(wanted.dtype).eps) * largest if wanted.dtype.kind in "fc" else 0.0
    if error <= rounding:
        scale = max(scale, largest)
    return Difference(kind, name, error / scale if scale else error, tolerance)
