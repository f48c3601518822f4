"""The result of ``dapple.verify``, in words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapple_tf.exactness import Exactness
from dapple_tf.plans import Plan
from dapple_tf.verification.comparison import Comparison, Difference
from dapple_tf.wording import format_count

IN_TURN = "the same micro-batches one after the other"
NORMALISED_IN_TURN = "plain training whose batch norm alone takes the same micro-batches one after the other"


@dataclass(frozen=True)
class Report:
    """The result of ``verify``; its text names the first tensor that diverges.

    ``plain``: the comparison with a plain training step on one device. ``exactness``: the known reasons why it differs.
    ``in_turn``: where one of these is documented, the comparison with one device that runs the same micro-batches in
    turn, as ``in_turn_as`` says; else None.
    """

    plan: Plan
    plain: Comparison
    exactness: Exactness = field(default_factory=Exactness)
    in_turn: Comparison | None = None
    in_turn_as: str = IN_TURN

    @property
    def ok(self) -> bool:
        """Whether the pipeline equals plain training or, with a documented exception, the micro-batches in turn."""
        return self.deciding.ok

    @property
    def deciding(self) -> Comparison:
        """The comparison that decides ``ok``: the plain one, unless an exception makes it fail."""
        return self.plain if self.plain.ok or self.in_turn is None else self.in_turn

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The differences of the comparison that decides."""
        return self.deciding.differences

    @property
    def max_loss_error(self) -> float:
        """Relative error of the loss, in the comparison that decides."""
        return self.deciding.largest("loss")

    @property
    def max_gradient_error(self) -> float:
        """Largest relative error of a gradient, in the comparison that decides."""
        return self.deciding.largest("gradient")

    @property
    def max_variable_error(self) -> float:
        """Largest relative error of a variable (weights, state, slots) after the step, in that comparison."""
        return self.deciding.largest("variable")

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object; ``max_errors`` are those of ``deciding``, and null where infinite."""
        return {
            "ok": self.ok,
            "max_errors": _finite(self.deciding.errors),
            "plain": _comparison_to_json(self.plain),
            "in_turn": None if self.in_turn is None else _comparison_to_json(self.in_turn),
            "exactness": self.exactness.to_json(),
            "plan": dataclasses.asdict(self.plan),
        }

    def __str__(self) -> str:
        plan = self.plan
        cut = plan.describe_micro_batches() if plan.sizes else format_count(plan.micro_batches, "micro-batch")
        head = f"{format_count(len(plan.stages), 'stage')}, replicas {list(plan.replicas)}, {cut}"
        lines = [f"{head}, {plan.short_schedule}: {self._outcome}"]
        because = [] if self.plain.ok else [f"because of {reason}" for reason in self.exactness.reasons]
        if self.in_turn is None or self.plain.ok:
            return "\n".join([*lines, *_describe(self.plain), *because])
        described = [*_describe(self.plain), *because]
        lines += ["compared with plain training, the whole batch at once:", *_indent(described)]
        lines += [f"compared with {self.in_turn_as}:", *_indent(_describe(self.in_turn))]
        return "\n".join(lines)

    @property
    def _outcome(self) -> str:
        if self.plain.ok:
            return "equal to one device"
        if self.ok:
            return f"NOT equal to plain training, but equal to {self.in_turn_as}"
        return "DIFFERS from one device"


def _comparison_to_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "ok": comparison.ok,
        "max_errors": _finite(comparison.errors),
        "first_to_diverge": None if comparison.first_bad is None else str(comparison.first_bad),
    }


def _finite(errors: Mapping[str, float]) -> dict[str, float | None]:
    """Return the errors, with None for those that are infinite or NaN, which JSON does not have."""
    return {kind: error if math.isfinite(error) else None for kind, error in errors.items()}


def _describe(comparison: Comparison) -> list[str]:
    """Return the lines of one comparison: errors, the first tensor that diverges, differences that are excused."""
    lines = [str(comparison)]
    if comparison.first_bad is not None:
        lines.append(f"first to diverge: {comparison.first_bad}")
    if comparison.excused:
        lines.append(
            "with the same gradients all updates are equal: "
            "the optimizer enlarges the rounding errors of tiny gradients"
        )
    if comparison.nonfinite:
        first, more = comparison.nonfinite[0], len(comparison.nonfinite) - 1
        where = f"{first.kind} {first.name!r}" + (f", and in {format_count(more, 'more tensor')}" if more else "")
        lines.append(f"NaN or infinite in {where}: one device has it too, in the same entries")
    return lines


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]
