"""``dapple.verify``: compare a pipelined step with the training step that a Keras user would write for one device."""

from __future__ import annotations

from dapple_tf.verification.comparison import TOLERANCE, Comparison, Difference
from dapple_tf.verification.report import Report
from dapple_tf.verification.run import verify

__all__ = ["TOLERANCE", "Comparison", "Difference", "Report", "verify"]
