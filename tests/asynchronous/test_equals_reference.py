"""Windows of ``dapple.pipeline(..., mode="async")`` equal PipeDream's training in eager TensorFlow (float64, 1e-12)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dapple_tf as dapple
from tests.asynchronous.networks import (
    Network,
    batch_norms,
    dense,
    dropouts,
    embedding,
    keras_stack,
    skips,
    without_weights,
)
from tests.asynchronous.reference import Reference, copies, slots, warm_ups
from tests.equality.one_device import relative_error

TOLERANCE = 1e-12
optimizers = keras.optimizers

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.05, momentum=0.9),
    "nesterov": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.01),
    "adam, cosine": lambda: optimizers.Adam(optimizers.schedules.CosineDecay(0.05, 16)),
    "adam, exponential": lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.05, 1, 0.75)),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "clipnorm": lambda: optimizers.SGD(0.5, clipnorm=0.1),
    "clipvalue": lambda: optimizers.Adam(0.01, clipvalue=0.02),
    "average": lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5),
}


def compare(
    network: Network,
    make_optimizer: Callable[[], Any],
    minibatches: int,
    *batches: Any,
    synchronous: Sequence[int] = (),
    **options: Any,
) -> Any:
    """Train by the reference, then from the same values by ``dapple.pipeline``, a window a batch; return the step.

    ``synchronous``: the indices of the batches that are trained on at once, by a synchronous step of the same model and
    optimizer; ``options``: of the asynchronous pipeline.
    """
    before = copies(network.variables)
    weights = options.get("weights", "stash")
    reference = Reference(network.model(weights), make_optimizer)
    read = {name: options.get(name) for name in ("replicas", "depth")}
    wanted = [
        [reference.synchronous_step(batch)]
        if i in synchronous
        else reference.window(batch, minibatches, weights, **read).losses
        for i, batch in enumerate(batches)
    ]
    after, slots_after, iterations = copies(network.variables), reference.slots(), reference.iterations

    for variable, value in zip(network.variables, before, strict=True):
        variable.assign(value)
    optimizer = make_optimizer()
    cut = {"optimizer": optimizer, "stages": list(network.starts) or 1}
    step = dapple.pipeline(network.loss_fn, **cut, mode="async", minibatches=minibatches, **options)
    whole = dapple.pipeline(network.loss_fn, **cut, micro_batches=2) if synchronous else None
    for i, (batch, losses) in enumerate(zip(batches, wanted, strict=True)):
        if i in synchronous:
            assert whole is not None
            close(f"loss of synchronous step {i}", whole(*batch).numpy(), losses[0])
            continue
        loss = step(*batch)
        close(f"losses of window {i}", np.asarray(step.losses), np.array(losses))
        close(f"mean loss of window {i}", loss.numpy(), np.mean(losses))
    for variable, value in zip(network.variables, after, strict=True):
        close(variable.name, variable.numpy(), value)
    found = slots(optimizer)
    assert found.keys() == slots_after.keys()
    for name, value in slots_after.items():
        close(name, found[name], value)
    assert int(optimizer.iterations.numpy()) == iterations
    return step


def close(name: str, found: Any, wanted: Any) -> None:
    error = relative_error(found, np.asarray(wanted))
    assert error <= TOLERANCE, f"{name} differs by {error:.1e} (allowed {TOLERANCE:.0e}): {found}, not {wanted}"


# --- weight stashing


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_over_two_windows(optimizer: str) -> None:
    """Minibatches are not of equal sizes, and Adam's iterations go on from one window to the next."""
    network = dense([1, 2, 1])
    compare(network, OPTIMIZERS[optimizer], 5, network.batch(13), network.batch(11, 2))


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
def test_straight_pipelines(stages: int) -> None:
    network = dense([1] * stages)
    compare(network, OPTIMIZERS["adam"], 7, network.batch(14))


@pytest.mark.parametrize(
    ("replicas", "minibatches"),
    [
        ([2, 1], 6),
        ([1, 2], 6),
        ([3, 1], 9),
        ([2, 1, 1], 8),
        ([4, 2, 1], 12),
        ([2, 2], 6),
        ([1, 3, 2], 12),
        ([3], 6),
    ],
)
@pytest.mark.parametrize("optimizer", ["momentum", "adam, exponential"])
def test_replicas_take_minibatches_in_turn(replicas: list[int], minibatches: int, optimizer: str) -> None:
    network = dense([1, 2, 1][: len(replicas)])
    size = 2 * minibatches + 1
    compare(network, OPTIMIZERS[optimizer], minibatches, network.batch(size), network.batch(size, 2), replicas=replicas)


def test_gradients_of_a_group_are_averaged_before_they_are_clipped() -> None:
    network = dense([1, 1])
    for optimizer in ("clipnorm", "clipvalue"):
        compare(network, OPTIMIZERS[optimizer], 6, network.batch(12), replicas=[3, 1])


@pytest.mark.parametrize("depth", range(1, 8))
def test_depths(depth: int) -> None:
    network = dense([1] * 4)
    compare(network, OPTIMIZERS["momentum"], 9, network.batch(18), depth=depth)


@pytest.mark.parametrize("weights", ["vertical-sync", "latest"])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_depths_of_other_weights(weights: str, depth: int) -> None:
    network = dense([2, 1, 1])
    compare(network, OPTIMIZERS["adam"], 8, network.batch(16), depth=depth, weights=weights)


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("weights", ["stash", "vertical-sync", "latest"])
def test_windows_shorter_than_the_warm_up(minibatches: int, weights: str) -> None:
    network = dense([1] * 4)
    batches = [network.batch(5, seed) for seed in range(3)]
    compare(network, OPTIMIZERS["adam"], minibatches, *batches, weights=weights)


def test_a_window_of_one_group_of_replicas() -> None:
    network = dense([1, 1])
    compare(network, OPTIMIZERS["adam"], 2, network.batch(5), network.batch(4, 2), replicas=[2, 1])


def test_a_synchronous_step_between_windows_goes_on_with_the_same_model_and_optimizer() -> None:
    network = dense([1, 2])
    batches = [network.batch(9, seed) for seed in range(3)]
    compare(network, OPTIMIZERS["adam, cosine"], 4, *batches, synchronous=[1])


def test_synchronous_steps_before_and_after_windows_of_replicas() -> None:
    network = dense([1, 2])
    batches = [network.batch(9, seed) for seed in range(4)]
    compare(network, OPTIMIZERS["adam, cosine"], 4, *batches, synchronous=[0, 3], replicas=[2, 1])


def test_a_longer_window() -> None:
    network = dense([1, 1, 1])
    compare(network, OPTIMIZERS["adam"], 64, network.batch(128))


def test_the_default_is_a_window_of_64_minibatches_with_stashing() -> None:
    network = dense([1, 1])
    x, y = network.batch(64)
    wanted = Reference(network.model("stash"), OPTIMIZERS["sgd"])
    before = copies(network.variables)
    losses = wanted.window((x, y), 64).losses
    for variable, value in zip(network.variables, before, strict=True):
        variable.assign(value)
    step = dapple.pipeline(network.loss_fn, optimizer=OPTIMIZERS["sgd"](), stages=list(network.starts), mode="async")
    step(x, y)
    close("losses", np.asarray(step.losses), np.array(losses))


# --- other weights


@pytest.mark.parametrize(
    ("layers", "replicas"),
    [([1, 1, 1], None), ([2, 1, 1, 2], None), ([1, 2], [2, 2]), ([1], None)],
)
def test_vertical_sync(layers: list[int], replicas: list[int] | None) -> None:
    network = dense(layers)
    compare(
        network,
        OPTIMIZERS["adam, exponential"],
        8,
        network.batch(19),
        network.batch(16, 2),
        weights="vertical-sync",
        **({"replicas": replicas} if replicas else {}),
    )


@pytest.mark.parametrize(
    ("layers", "replicas"),
    [
        ([2, 1, 2], None),
        ([1, 1, 1, 1, 1], None),
        ([2, 2, 1], [2, 1, 2]),
    ],
)
def test_weights_that_are_not_stashed(layers: list[int], replicas: list[int] | None) -> None:
    network = dense(layers)
    compare(
        network,
        OPTIMIZERS["momentum"],
        8,
        network.batch(19),
        network.batch(16, 2),
        weights="latest",
        **({"replicas": replicas} if replicas else {}),
    )


@pytest.mark.parametrize(
    ("stages", "micro_batches"),
    [(1, 1), (2, 2), (3, 3), (3, 5), (4, 4)],
)
def test_two_buffered_weights(stages: int, micro_batches: int) -> None:
    network = dense([1] * stages)
    optimizer = OPTIMIZERS["adam, cosine"]
    size = 4 * micro_batches + 3  # micro-batches are not of equal sizes
    batches = [network.batch(size), network.batch(size, 2)]
    compare(network, optimizer, 4, *batches, weights="2bw", micro_batches=micro_batches)


@pytest.mark.parametrize("weights", ["vertical-sync", "latest", "2bw"])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_every_optimizer_with_other_weights(weights: str, optimizer: str) -> None:
    network = dense([1, 2, 1])
    options = {"micro_batches": 3} if weights == "2bw" else {}
    compare(network, OPTIMIZERS[optimizer], 6, network.batch(20), network.batch(18, 2), weights=weights, **options)


# --- Keras models


@pytest.mark.parametrize("optimizer", ["adam", "clipnorm"])
def test_a_keras_model(optimizer: str) -> None:
    network = keras_stack()
    compare(network, OPTIMIZERS[optimizer], 5, network.batch(12), network.batch(10, 2))


def test_a_keras_model_with_replicas() -> None:
    network = keras_stack()
    compare(network, OPTIMIZERS["adam"], 6, network.batch(12), network.batch(13, 2), replicas=[2, 3, 1])


@pytest.mark.parametrize("optimizer", ["adam", "momentum", "sgd"])
def test_an_embedding(optimizer: str) -> None:
    network = embedding()
    compare(network, OPTIMIZERS[optimizer], 5, network.batch(12), network.batch(10, 2))


@pytest.mark.parametrize("optimizer", ["adam", "clipnorm"])
def test_an_embedding_in_a_stage_of_two_replicas(optimizer: str) -> None:
    network = embedding()
    compare(network, OPTIMIZERS[optimizer], 6, network.batch(12), network.batch(13, 2), replicas=[2, 1])


@pytest.mark.parametrize("weights", ["stash", "vertical-sync"])
def test_moving_statistics_of_batch_norm_are_written_in_the_order_of_minibatches(weights: str) -> None:
    network = batch_norms()
    before = copies(network.state)
    compare(network, OPTIMIZERS["momentum"], 5, network.batch(20), network.batch(22, 2), weights=weights)
    for value, old in zip(copies(network.state), before, strict=True):
        assert np.abs(value - old).max() > 1e-3


@pytest.mark.parametrize("weights", ["stash", "vertical-sync"])
def test_dropouts_draw_once_a_minibatch_in_the_order_of_minibatches(weights: str) -> None:
    network = dropouts()
    before = copies(network.state)
    compare(network, OPTIMIZERS["sgd"], 5, network.batch(12), network.batch(11, 2), weights=weights)
    assert all(np.any(value != old) for value, old in zip(copies(network.state), before, strict=True))


# --- what crosses stages


@pytest.mark.parametrize("replicas", [None, [2, 1, 3]])
def test_tensors_that_skip_a_stage(replicas: list[int] | None) -> None:
    network = skips()
    options = {"replicas": replicas} if replicas else {}
    compare(network, OPTIMIZERS["adam"], 6, network.batch(13), network.batch(12, 2), **options)


def test_a_stage_without_weights() -> None:
    network = without_weights()
    for replicas in (None, [1, 2, 1]):
        compare(network, OPTIMIZERS["adam"], 6, network.batch(13), **({"replicas": replicas} if replicas else {}))


# --- random pipelines


@dataclass(frozen=True)
class Case:
    """``layers``: of each stage; ``widths``: of x and of each layer's output; ``sizes``: the samples of each window."""

    layers: tuple[int, ...]
    widths: tuple[int, ...]
    minibatches: int
    sizes: tuple[int, ...]
    optimizer: str
    options: dict[str, Any]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layers = tuple(draw(st.lists(st.integers(1, 2), min_size=1, max_size=5)))
    widths = tuple(draw(st.integers(1, 5)) for _ in range(sum(layers) + 1))
    weights = draw(st.sampled_from(["stash", "stash", "vertical-sync", "latest", "2bw"]))
    options: dict[str, Any] = {"weights": weights}
    replicas = [1] * len(layers)
    least = 1  # samples in a minibatch
    if weights == "2bw":
        least = draw(st.integers(warm_ups(replicas)[0], 6))
        options["micro_batches"] = least
    elif draw(st.booleans()):
        options["depth"] = draw(st.integers(1, 7))
    elif draw(st.booleans()):
        if weights == "vertical-sync":
            replicas = [draw(st.integers(1, 8 // len(layers)))] * len(layers)
        else:
            replicas = draw(st.lists(st.integers(1, 4), min_size=len(layers), max_size=len(layers)))
        while sum(replicas) > 8:
            replicas[replicas.index(max(replicas))] -= 1
        options["replicas"] = replicas
    group = math.lcm(*replicas)
    minibatches = group * draw(st.integers(1, max(1, 10 // group)))
    size = st.integers(minibatches * least, minibatches * (least + 2))
    sizes = tuple(draw(st.lists(size, min_size=1, max_size=2)))
    return Case(layers, widths, minibatches, sizes, draw(st.sampled_from(sorted(OPTIMIZERS))), options)


@pytest.mark.timeout(1200)  # Hypothesis may spend five minutes to make a failure small
@pytest.mark.parametrize("examples", [4, pytest.param(0, id="many")])
def test_random_pipelines(examples: int) -> None:
    """Stages, widths, replicas, depths, windows, weights and optimizers at random."""

    @settings(max_examples=examples or settings.default.max_examples)
    @given(cases())
    def check(case: Case) -> None:
        network = dense(case.layers, case.widths)
        batches = [network.batch(size, i) for i, size in enumerate(case.sizes)]
        compare(network, OPTIMIZERS[case.optimizer], case.minibatches, *batches, **case.options)

    check()
