"""Run the same Keras script with and without the line ``dapple.keras.pipeline``, and compare all that is left."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import dapple_tf as dapple

TOLERANCE = 1e-9


def assert_equal_to_plain(make: Callable[[], keras.Model], use: Callable[[keras.Model], Any], **options: Any) -> Any:
    """Compare what ``use`` returns, and all variables afterwards; return what plain Keras gave.

    ``make`` returns a compiled model; ``options`` are those of the pipeline.
    """
    results, models = [], []
    for pipelined in (False, True):
        keras.backend.clear_session()  # so that both have the same names
        keras.utils.set_random_seed(1)
        model = make()
        if pipelined:
            dapple.keras.pipeline(model, **{"stages": 2, "micro_batches": 3, **options})
        keras.utils.set_random_seed(2)
        results.append(use(model))
        models.append(model)
    assert_close(results[1], results[0], "result")
    assert_same_variables(models[1], models[0])
    return results[0]


def assert_same_variables(found: keras.Model, expected: keras.Model) -> None:
    """Compare all variables: weights, state, and the optimizer's."""
    for what in ("variables", "optimizer.variables", "metrics_variables"):
        for a, b in zip(*(operator.attrgetter(what)(model) for model in (found, expected)), strict=True):
            assert a.path == b.path, what
            assert_close(a.numpy(), b.numpy(), f"{what}: {b.path}")


def assert_close(found: Any, expected: Any, what: str) -> None:
    """Compare nested results: histories, outputs, logs of callbacks."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), what
        for key in expected:
            assert_close(found[key], expected[key], f"{what}: {key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), what
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_close(a, b, f"{what}[{i}]")
    elif isinstance(expected, str | type(None)):
        assert found == expected, what
    else:
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE, err_msg=what)
