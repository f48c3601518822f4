"""keras.applications, unmodified, through ``compile`` and ``fit``: the pipeline's history and variables are Keras's.

Batch norm is frozen, as in fine-tuning: in training mode it is a documented exception.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from tests.dapple_tf.keras.plain import assert_equal_to_plain

NAMES = ["MobileNetV2", "VGG16", "ResNet50", "DenseNet121", "EfficientNetB0", "ConvNeXtTiny"]
CLASSES, SAMPLES, SIZE = 5, 8, 32


def images() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    return random.normal(size=(SAMPLES, SIZE, SIZE, 3)), random.integers(0, CLASSES, SAMPLES)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", NAMES)
def test_fit_of_an_application_equals_plain_keras(name: str) -> None:
    def make() -> keras.Model:
        model = getattr(keras.applications, name)(
            weights=None, classes=CLASSES, input_shape=(SIZE, SIZE, 3), classifier_activation=None
        )
        for layer in model.layers:
            if isinstance(layer, keras.layers.BatchNormalization):
                layer.trainable = False
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, metrics=["accuracy"])
        return model

    def use(model: keras.Model) -> Any:
        x, y = images()
        history = model.fit(x, y, batch_size=4, epochs=2, verbose=0).history
        return history, model.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)

    assert_equal_to_plain(make, use, stages=2, micro_batches=2)
