"""Run a step over the pipeline and on one device, from the same variables, and compare them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import Unpack

from dapple_tf import variable_values
from dapple_tf.autoplan.option_help import document_options, make_options
from dapple_tf.autoplan.options import WINDOW_NOT_VERIFIED, OptionTypes
from dapple_tf.backend.saved_variables import unchanged_variables
from dapple_tf.compiler import PlannedModel
from dapple_tf.devices import list_devices
from dapple_tf.distributed import membership
from dapple_tf.errors import PlanError
from dapple_tf.exactness import Exactness
from dapple_tf.frontend.captured import TrainingStep
from dapple_tf.graph_passes.analysis.variable_use import find_variables
from dapple_tf.runtime.step import PipelinedStep
from dapple_tf.staged_model import StagedModel
from dapple_tf.verification.comparison import TOLERANCE, compare
from dapple_tf.verification.divided_batch_norm import SizesOf
from dapple_tf.verification.reference import OneDevice, Outcome, StepOnOneDevice, arrays_of, cut_samples, values_of
from dapple_tf.verification.report import NORMALISED_IN_TURN, Report


@document_options("mode", "minibatches", "weights", "depth")
def verify(
    loss_fn: Callable[..., Any], *, optimizer: Any = None, batch: Sequence[Any], **options: Unpack[OptionTypes]
) -> Report:
    """Run one step over the pipeline and one plain training step from the same variables, and compare them.

    All variables (weights, state, optimizer slots) have their old values afterwards. The plain step is what a Keras
    user would write: one GradientTape over the whole batch, one call of the loss, ``optimizer.apply_gradients``, on
    the first device, which must hold the whole model.

    Without an optimizer ``loss_fn`` is a training step, as for ``dapple.train_step``. It is compared with a call of the
    function itself: what it returns, and all variables after it. The report has no gradients then.

    Where the model has a documented exception, the step is also compared with one device that runs the same
    micro-batches one after the other, and the report shows both. With ``batch_loss`` it is not: no micro-batch has a
    loss of its own then. With ``batch_norm="deferred"`` only batch norm takes the micro-batches one after the other,
    and writes its moving statistics once.

    In a job every rank must call it. Rank 0 trains on one device, and every rank gets the same report. Variables that
    no step has trained yet have rank 0's values on every rank afterwards.

    Args:
        loss_fn: As for ``dapple.pipeline``; or a training step.
        optimizer: As for ``dapple.pipeline``; None for a training step.
        batch: The tuple of the step's arguments.
        {options}

    Raises:
        PlanError: The options ask for asynchronous windows, which equal no step on one device.
        ValueError: Other subclasses in ``dapple_tf.errors``, as from ``dapple.pipeline``.
    """
    made = make_options("dapple.verify", options)
    if made.window is not None:
        raise PlanError(f"mode='async': {WINDOW_NOT_VERIFIED}")
    device = list_devices(made.devices)[0]
    one: OneDevice | StepOnOneDevice
    if optimizer is None:
        step = PipelinedStep(TrainingStep(loss_fn), None, made)
        step.build(*batch)
        variables: Mapping[str, tf.Variable] = step.variables
        returned, values = _run(step, variables, lambda: step(*batch))
        found = Outcome(None, arrays_of(tf.nest.flatten(returned)), {}, values)
        one = StepOnOneDevice(loss_fn, variables, device)
    else:
        step = PipelinedStep(loss_fn, optimizer, made)
        model = step.build_exposed(*batch).model
        variables = model.variables
        outputs, values = _run(step, variables, lambda: step.expose(*batch))
        found = Outcome(outputs.loss, outputs.aux, outputs.gradients, values)
        one = OneDevice(
            loss_fn, step.optimizer, dict(zip(model.trained, model.trained_objects, strict=True)), variables, device
        )
    report = functools.partial(_compare, one, [phase.planned for phase in step.phases], batch, found)
    job = membership.current()
    result = job.run_on_rank_0(report)
    if job.is_alone:
        step.release()
    return result


def _run(
    step: PipelinedStep, variables: Mapping[str, tf.Variable], run: Callable[[], Any]
) -> tuple[Any, dict[str, Any]]:
    """Return what ``run`` returns, and the values of ``variables`` after it; they have their old values afterwards."""
    step.gather()
    with unchanged_variables(variables.values()):
        outputs = run()
        step.gather()
        return outputs, dict(values_of(variables))


def _compare(
    one: OneDevice | StepOnOneDevice, phases: Sequence[PlannedModel], batch: Sequence[Any], found: Outcome
) -> Report:
    """Train on one device and compare ``found``; all variables have their old values afterwards.

    ``phases``: the planned models of the step's phases; a loss has one.
    """
    planned, *_ = phases
    model, plan = planned.model, planned.plan

    def undone(work: Callable[[], Any]) -> Any:
        with unchanged_variables(one.variables.values()):
            variable_values.move_variables([(variable, one.device) for variable in one.variables.values()])
            return work()

    def apply(gradients: Mapping[str, Any]) -> Mapping[str, Any]:
        assert isinstance(one, OneDevice), "only there gradients are known"
        one.apply([gradients[name] for name in one.trained])
        return values_of(one.variables)

    def compare_with(wanted: Outcome) -> Any:
        state = frozenset().union(*(find_variables(phase.model.graph).state for phase in phases))
        update = (lambda g: undone(lambda: apply(g))) if isinstance(one, OneDevice) else None
        return compare(found, wanted, update, state, max(_coarsest_tolerance(phase.model) for phase in phases))

    plain = compare_with(undone(lambda: one.train(batch)))
    exactness = Exactness(tuple(reason for phase in phases for reason in phase.exactness.reasons))
    has_loss_head = any(phase.model.pass_facts.head_inputs for phase in phases)  # parts of the batch have no loss then
    if has_loss_head or len(exactness.reasons) == len(exactness.undocumented):
        return Report(plan, plain, exactness)
    if model.pass_facts.statistics or isinstance(one, StepOnOneDevice):
        deferred = model.pass_facts.statistics
        divided = compare_with(undone(lambda: one.train_divided(batch, _find_pieces(phases), deferred=deferred)))
        return Report(plan, plain, exactness, divided, NORMALISED_IN_TURN)
    parts = cut_samples(planned.batch_size, plan.micro_batches, plan.sizes)
    in_turn = compare_with(undone(lambda: one.train_in_turn(batch, parts)))
    if not in_turn.ok:  # dropout and counts are the whole batch's in the pipeline: divide only batch norm's batch
        divided = compare_with(undone(lambda: one.train_divided(batch, _find_pieces(phases))))
        if divided.ok:
            return Report(plan, plain, exactness, divided, NORMALISED_IN_TURN)
    return Report(plan, plain, exactness, in_turn)


def _find_pieces(phases: Sequence[PlannedModel]) -> SizesOf:
    """Return a function that returns how a batch norm layer's stage cuts the batch: see ``divide_batch_norm``."""
    planned, *_ = phases
    model, plan = planned.model, planned.plan
    owners = {
        id(phase.model.variables[name]): stages[0]
        for phase in phases
        for name, stages in find_variables(phase.model.graph).users
    }

    def sizes_of(layer: Any) -> list[list[int]]:
        owner = owners.get(id(layer.moving_mean.value))
        replicas = 1 if owner is None or model.joins else plan.replicas[owner]
        parts = cut_samples(planned.batch_size, plan.micro_batches, plan.sizes)
        return [[piece.stop - piece.start for piece in cut_samples(part.stop - part.start, replicas)] for part in parts]

    return sizes_of


def _coarsest_tolerance(model: StagedModel) -> float:
    """Return the tolerance of the least precise reduced-precision type in the stages; 0 where there is none."""
    types = {
        kind.dtype.name for f in model.graph.functions for node in f.graph.nodes for kind in node.outputs
    } & TOLERANCE.keys()
    return max((TOLERANCE[name] for name in types if name not in ("float32", "float64")), default=0.0)
