"""Which layers a user wants to be re-computed in backward: all, none, those of some stages, or some by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dapple_tf.errors import PlanError
from dapple_tf.plan import StagePlan
from graph_passes.analysis.layers import Layers


@dataclass(frozen=True)
class StageNumbers:
    """The stages with these numbers, however many there are."""

    numbers: tuple[int, ...]


Recompute = bool | Sequence[bool] | Sequence[str] | StageNumbers
"""All layers or none; one truth for each stage; names of layers; numbers of stages."""


def check_recompute(wanted: object) -> None:
    """PlanError unless ``wanted`` is a Recompute."""
    if isinstance(wanted, bool | StageNumbers):
        return
    items = wanted if isinstance(wanted, Sequence) and not isinstance(wanted, str) else [None]
    if not any(all(isinstance(item, kind) for item in items) for kind in (bool, str)):
        raise PlanError(
            f"recompute={wanted!r}: give True or False, one of these for each stage, such as [True, False], or layer "
            "names, such as ['block_2']"
        )


def choose_recompute(wanted: Recompute, layers: Layers, stages: Sequence[StagePlan]) -> bool | tuple[int, ...]:
    """What a plan of these ``stages`` says of it.

    Raises PlanError for stages that there are not, and PartitionError for names that are unknown or ambiguous.
    """
    if isinstance(wanted, bool):
        return wanted
    if isinstance(wanted, StageNumbers):
        for number in wanted.numbers:
            if number >= len(stages):
                raise PlanError(f"recompute names stage {number}, but the stages are 0 to {len(stages) - 1}")
        return _of_stages([number in wanted.numbers for number in range(len(stages))], stages)
    names = [item for item in wanted if isinstance(item, str)]
    if names:
        return tuple(sorted({layer for name in names for layer in layers.find_all(name)}))
    flags = [bool(item) for item in wanted]
    if len(flags) != len(stages) and flags:
        raise PlanError(f"recompute={flags} is for {len(flags)} stages, but there are {len(stages)}")
    return _of_stages(flags, stages)


def _of_stages(flags: Sequence[bool], stages: Sequence[StagePlan]) -> bool | tuple[int, ...]:
    if len(set(flags)) < 2:
        return any(flags)
    chosen = [stage for flag, stage in zip(flags, stages, strict=True) if flag]
    return tuple(layer for stage in chosen for layer in range(stage.first_layer, stage.last_layer + 1))
