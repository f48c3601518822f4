"""Write scalars of a training run for TensorBoard; only viewing them needs TensorBoard installed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import tensorflow as tf

from dapple_tf.timeline.critical_path import sum_by_kind

if TYPE_CHECKING:
    from dapple_tf.timeline.timeline import Timeline

# Marks a tensor as a point of a curve.
_SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars"), data_class="DATA_CLASS_SCALAR"
)


class Scalars:
    """Writes scalars by step into ``folder``; they reach the file at ``close``, or at a ``write`` two minutes later."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._writer = tf.summary.create_file_writer(os.fspath(folder))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point at ``step`` to each named curve, all in one event."""
        summary = tf.compat.v1.Summary(
            value=[
                tf.compat.v1.Summary.Value(tag=name, tensor=tf.make_tensor_proto(value, tf.float32), metadata=_SCALAR)
                for name, value in values.items()
            ]
        )
        with self._writer.as_default():
            tf.summary.experimental.write_raw_pb(summary.SerializeToString(), step=step)

    def write_text(self, step: int, name: str, text: str) -> None:
        """Add a text at ``step``; it reaches the file at once."""
        with self._writer.as_default():
            tf.summary.text(name, text, step=step)
        self._writer.flush()

    def close(self) -> None:
        """Write the points that are not in the file yet, and close it."""
        self._writer.close()


def recorded_scalars(timeline: Timeline) -> dict[str, float]:
    """Return the further curves of a recorded step: its bubble, utilisations (fractions), and seconds of its parts."""
    busy = {f"utilisation/stage_{stage}": share for stage, share in enumerate(timeline.stage_utilisation)}
    path = {f"critical_path_seconds/{kind}": seconds for kind, seconds in sum_by_kind(timeline.critical_path).items()}
    return {"bubble": timeline.bubble, "step_seconds": timeline.seconds, **busy, **path}
