"""``recompute=...``: the layers whose activations backward computes again instead of keeping them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dapple_tf.errors import PlanError
from dapple_tf.graph_passes.analysis.layers import Layers
from dapple_tf.plans import RecomputeLevel, StagePlan
from dapple_tf.wording import format_count


@dataclass(frozen=True)
class StageNumbers:
    """The stages to re-compute, by number from 0 (``--recompute stages:0,1``)."""

    numbers: tuple[int, ...]


Recompute = RecomputeLevel | Sequence[bool] | Sequence[str] | StageNumbers
"""All layers or none; one flag for each stage; names of layers; or numbers of stages."""


def is_recompute(wanted: object) -> bool:
    """Return whether ``wanted`` is a Recompute."""
    if isinstance(wanted, bool | StageNumbers):
        return True
    items = wanted if isinstance(wanted, Sequence) and not isinstance(wanted, str) else [None]
    return any(all(isinstance(item, kind) for item in items) for kind in (bool, str))


def choose_recompute(wanted: Recompute, layers: Layers, stages: Sequence[StagePlan]) -> bool | tuple[int, ...]:
    """Return ``Plan.recompute`` for these ``stages``: True, False, or the numbers of the layers.

    Raises PlanError for a stage that does not exist, and PartitionError for an unknown or ambiguous layer name.
    """
    if isinstance(wanted, bool):
        return wanted
    if isinstance(wanted, StageNumbers):
        for number in wanted.numbers:
            if number >= len(stages):
                raise PlanError(f"recompute names stage {number}, but the stages are 0 to {len(stages) - 1}")
        return _layers_of_stages([number in wanted.numbers for number in range(len(stages))], stages)
    names = [item for item in wanted if isinstance(item, str)]
    if names:
        return tuple(sorted({layer for name in names for layer in layers.find_all(name)}))
    flags = [bool(item) for item in wanted]
    if len(flags) != len(stages) and flags:
        raise PlanError(f"recompute={flags} is for {format_count(len(flags), 'stage')}, but there are {len(stages)}")
    return _layers_of_stages(flags, stages)


def _layers_of_stages(flags: Sequence[bool], stages: Sequence[StagePlan]) -> bool | tuple[int, ...]:
    if len(set(flags)) < 2:
        return any(flags)
    chosen = [stage for flag, stage in zip(flags, stages, strict=True) if flag]
    return tuple(layer for stage in chosen for layer in range(stage.first_layer, stage.last_layer + 1))
