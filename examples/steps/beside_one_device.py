"""Train beside one device: call a training step three times as it is, and over a pipeline, and compare.

The files beside this one each hold a training step as it is written for one device. ``make`` makes everything anew,
from the same seeds: it returns the step and the objects that hold the variables it changes. ``batches`` returns the
batches. Run it with ``python examples/steps/NAME.py``, where NAME is one of these files: it prints by how much results
and variables differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple

Make = Callable[[], tuple[Callable[..., Any], list[Any]]]


def compare(make: Make, batches: Sequence[tuple[Any, ...]], **options: Any) -> None:
    """Train on ``batches`` in float64, and print by how much results and variables differ."""
    dapple.init()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    (plain, wanted), (function, found) = make(), make()
    whole = plain if isinstance(plain, tf.types.experimental.GenericFunction) else tf.function(plain)
    step = dapple.train_step(function, **({"stages": 2, "micro_batches": 3} | options))
    largest = 0.0
    for batch in batches:
        pairs = zip(tf.nest.flatten(step(*batch)), tf.nest.flatten(whole(*batch)), strict=True)
        largest = max([largest, *(difference(ours, theirs) for ours, theirs in pairs if theirs is not None)])
    pairs = zip(variables_of(found), variables_of(wanted), strict=True)
    largest = max([largest, *(difference(ours, theirs) for ours, theirs in pairs)])
    print(f"{len(batches)} steps in {len(step.phases)} phases differ from one device by at most {largest:.0e}")


def difference(ours: Any, theirs: Any) -> float:
    """Return the largest difference of two tensors."""
    return float(np.max(np.abs(np.asarray(ours, "float64") - np.asarray(theirs, "float64")), initial=0.0))


def variables_of(objects: Sequence[Any]) -> list[Any]:
    """Return the values of the variables of models, optimizers and metrics, and of variables themselves."""
    found = [variable for item in objects for variable in getattr(item, "variables", [item])]
    return [variable.numpy() for variable in found]
