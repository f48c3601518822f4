"""Train compiled Keras models over a pipeline: one call between ``compile`` and ``fit``, which are used as always.

model.compile(optimizer, loss, metrics=[...])
dapple.keras.pipeline(model, stages=2, micro_batches=8)
model.fit(x, y, epochs=3)
"""

from __future__ import annotations

from dapple_tf.keras.install import pipeline, restore
from dapple_tf.keras.resume import SaveAndResume

__all__ = ["SaveAndResume", "pipeline", "restore"]
