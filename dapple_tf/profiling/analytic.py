"""Profiles of models that are not run: FLOPs, bytes and a device's peak rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dapple_tf import variable_values
from dapple_tf.frontend.batch import as_arguments, batch_size
from dapple_tf.frontend.composite import as_rows
from dapple_tf.frontend.trace import trace_loss
from dapple_tf.profiler.measure import Floats
from dapple_tf.profiler.peaks import Peak, find_peak
from dapple_tf.profiler.profile import LayerCost, Profile
from dapple_tf.profiling.layer_facts import LayerFacts, examine_layers


def analytic_profile(
    loss_fn: Callable[..., Any], batch: Any, device: str | Peak = "V100", *, model: str | None = None
) -> Profile:
    """Return the profile of a loss on ``device`` (V100, A100, H100 or a Peak) by the roofline of every op.

    Nothing runs. ``batch`` is the tuple of the loss's arguments: arrays, or ``tf.TensorSpec`` with the batch size on
    axis 0. The profile has times for other batch sizes too (``timings``), from 1 sample to 4 times the batch or more,
    unless the model accepts its batch only. Each op counts as one kernel, which takes at least the seconds of a launch;
    ops that a compiler or a library fuses take less in fact. Raises ProfileError for an unknown device, BatchError for
    a batch without a known size, and what ``dapple.pipeline`` raises for the loss.
    """
    peak = find_peak(device) if isinstance(device, str) else device
    arguments = as_rows(as_arguments(batch))
    size = batch_size(arguments)
    with variable_values.without_values():
        facts = examine_layers(trace_loss(loss_fn, arguments, size, "allow"), size)
        timings = facts.timings(peak)
    return make_profile(
        facts,
        model or facts.captured.graph.name,
        f"{peak.name} (analytic)",
        facts.forward_seconds(peak),
        facts.backward_seconds(peak),
        timings=timings,
    )


def make_profile(facts: LayerFacts, model: str, device: str, forward: Floats, backward: Floats, **more: Any) -> Profile:
    """Return the profile of these facts, and seconds of each layer; ``more`` are further fields of Profile."""
    return Profile(
        model=model,
        batch_size=facts.batch_size,
        device=device,
        layers=tuple(
            LayerCost(*figures)
            for figures in zip(
                facts.names,
                map(float, forward),
                map(float, backward),
                facts.activation_bytes,
                facts.stash_bytes,
                facts.parameter_bytes,
                strict=True,
            )
        ),
        uncuttable=facts.uncuttable,
        unsplittable=facts.unsplittable,
        **more,
    )
