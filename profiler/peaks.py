"""Peak figures of devices, from their makers' data sheets, for analytic profiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dapple_tf.errors import ProfileError
from dapple_tf.graph_passes.analysis.op_costs import OpClass


@dataclass(frozen=True)
class Peak:
    """A device's limits: FLOP per second of float32 training, bytes per second of its memory, and bytes of memory.

    ``attainable``: the fraction of both rates that large kernels reach in practice, which is not a maker's figure.
    ``by_class``: the fraction for each class of ops that has one of its own. ``launch_seconds``: the least seconds of a
    kernel, since the host launches one after the other.
    """

    name: str
    flops_per_second: float
    bytes_per_second: float
    memory: float
    attainable: float
    by_class: Mapping[OpClass, float] = field(default_factory=dict, hash=False)
    launch_seconds: float = 0.0

    def seconds(self, flops: float, moved: float, kind: OpClass = "other") -> float:
        """Return the seconds of a kernel by the roofline: the longer of those of its ``flops`` and its ``moved`` bytes.

        A kernel that is launched takes ``launch_seconds`` at least.
        """
        arithmetic, memory = flops / self.flops_per_second, moved / self.bytes_per_second
        seconds = max(arithmetic, memory) / self.by_class.get(kind, self.attainable)
        return max(seconds, self.launch_seconds) if is_launched(moved, kind) else seconds


_HOST_BYTES = 64.0  # an op that moves no more computes a length or a single number


def is_launched(moved: float, kind: OpClass) -> bool:
    """Return whether an op is a kernel of its own.

    The host computes lengths and single numbers, and libraries fuse the ops of a recurrent loop.
    """
    return moved > _HOST_BYTES and kind != "loop"


# The launch of a kernel from TensorFlow or PyTorch takes about this time in public measurements; no maker's figure.
_LAUNCH_SECONDS = 5e-6

PEAKS = (
    # NVIDIA V100 data sheet (2020), SXM2 with 16 GB: 15.7 TFLOP/s FP32, 900 GB/s. What is attained was fitted to
    # published profiles (benchmarks/papers/analytic.py); convolutions exceed 1, since cuDNN's take fewer products.
    Peak("V100", 15.7e12, 900e9, 16e9, 0.81, {"convolution": 2.05, "loop": 0.99}, _LAUNCH_SECONDS),
    # NVIDIA A100 data sheet (2021), SXM with 40 GB: 156 TFLOP/s TF32 (dense), TensorFlow's default for float32
    # products; 1555 GB/s.
    Peak("A100", 156e12, 1555e9, 40e9, 0.5, {}, _LAUNCH_SECONDS),
    # NVIDIA H100 data sheet (2023), SXM with 80 GB: 989 TFLOP/s TF32 with sparsity, half of it dense; 3.35 TB/s.
    Peak("H100", 494.5e12, 3350e9, 80e9, 0.5, {}, _LAUNCH_SECONDS),
)

# One core of a server CPU, for estimates; only the ratio between ops or layers matters.
CPU_CORE = Peak("one core", 5e10, 5e9, 0.0, 1.0)


def find_peak(name: str) -> Peak:
    """Return the device called ``name``, in upper or lower case; ProfileError names the known ones."""
    for peak in PEAKS:
        if peak.name.lower() == name.lower():
            return peak
    raise ProfileError(
        f"no peak figures are known for device {name!r}: use {', '.join(peak.name for peak in PEAKS)}, or give a Peak"
    )
