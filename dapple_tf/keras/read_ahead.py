"""Prefetch batches of tf.data sets, so that they are read while steps run.

Keras reads arrays, generators and PyDatasets ahead itself, but takes a ``tf.data.Dataset`` as it is: its batches are
read between the steps unless the user has called ``prefetch``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

METHODS = ("fit", "evaluate", "predict")
"""The methods that are replaced."""

_BATCHES = 2  # with one, each step would wait whenever its batch takes a little longer than the step


def read_ahead(model: keras.Model, check: Callable[[], None]) -> None:
    """Replace ``fit``, ``evaluate`` and ``predict`` on this model: they prefetch from every data set they are given.

    ``check`` is called before each.
    """
    for name in METHODS:
        setattr(model, name, _reading_ahead(getattr(model, name), check))


def _reading_ahead(method: Callable[..., Any], check: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **options: Any) -> Any:
        check()
        return method(*map(_prefetched, args), **{name: _prefetched(value) for name, value in options.items()})

    return run


def _prefetched(value: Any) -> Any:
    return value.prefetch(_BATCHES) if isinstance(value, tf.data.Dataset) else value
