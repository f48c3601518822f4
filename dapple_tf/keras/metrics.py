"""Update a compiled model's metrics once a step, from the whole batch: they equal those of one device."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from dapple_tf import internals


class MetricsUpdate:
    """Updates the metrics of ``model`` by one batch and returns the results by name, as a step of Keras does."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._update = tf.function(self._update_metrics, reduce_retracing=True, autograph=False)

    def __call__(self, batch: tuple[Any, Any, Any], loss: Any, aux: dict[str, Any], samples: int | None) -> Any:
        """Update the metrics by ``batch`` (x, y, sample_weight), its ``loss``, and the aux outputs of its step.

        ``samples``: of a batch where the data set fixes it, else None. Keras weighs the losses of several outputs by
        it, and by 1 where it is not fixed.
        """
        return self._update(*batch, loss, aux, samples)

    def _update_metrics(
        self, x: Any, y: Any, sample_weight: Any, loss: Any, aux: dict[str, Any], samples: int | None
    ) -> Any:
        first = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)
        internals.loss_tracker(self._model).update_state(loss, sample_weight=tf.shape(first)[0])
        for metric, value in zip(internals.loss_metrics(self._model), aux["losses"], strict=True):
            metric.update_state(value, sample_weight=samples)
        outputs = aux.get("outputs")
        for i, mask in aux.get("masks", {}).items():
            internals.set_keras_mask(keras.tree.flatten(outputs)[int(i)], mask)
        return self._model.compute_metrics(x, y, outputs, sample_weight=sample_weight)
