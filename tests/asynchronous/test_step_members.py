"""Members of an asynchronous step besides the call: each is exact, or is refused before any variable changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import ExactnessError, PlanError, StepError, UsageError
from dapple_tf.profiler.cluster import Cluster
from tests.asynchronous.networks import Network, batch_norms, dense, keras_stack, normal
from tests.asynchronous.reference import Differentiated, Reference, copies
from tests.asynchronous.test_equals_reference import OPTIMIZERS, close, compare

MINIBATCHES = 4


def make_step(network: Network, **options: Any) -> Any:
    """Return the step of a network in windows of four minibatches, with Adam."""
    given = {"optimizer": keras.optimizers.Adam(0.01), "stages": list(network.starts), "minibatches": MINIBATCHES}
    return dapple.pipeline(network.loss_fn, mode="async", **{**given, **options})


@pytest.fixture(scope="module")
def built() -> tuple[Network, Any]:
    """A network of two stages and its step, built for windows of 8 samples; tests may train them."""
    network = dense([1, 1])
    return network, make_step(network, example_batch=network.batch(8))


def assert_refused(error: type[Exception], said: str, network: Network, work: Callable[[], Any]) -> None:
    """Assert that ``work`` raises such an error and leaves the variables of the network as they are."""
    before = copies(network.variables)
    with pytest.raises(error, match=said):
        work()
    for variable, value in zip(network.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


# --- other ways to run a step


@pytest.mark.parametrize("member", ["run_exposed", "expose", "build_exposed"])
@pytest.mark.parametrize("trained", [False, True])
def test_a_window_has_no_gradients_to_show(member: str, trained: bool, built: tuple[Network, Any]) -> None:
    network, step = built
    batch = network.batch(8)
    if trained:
        step(*batch)
    else:
        step = make_step(network)
    said = "gradients.*mode='async'.*each minibatch.*mode='sync'"
    assert_refused(UsageError, said, network, lambda: getattr(step, member)(*batch))


@pytest.mark.parametrize("member", ["__call__", "build"])
def test_a_window_cannot_check_its_numbers(member: str) -> None:
    network = dense([1, 1])
    step, (x, y) = make_step(network), network.batch(8)
    step.check_numerics = True
    assert_refused(UsageError, r"check_numerics.*step\.losses", network, lambda: getattr(step, member)(x * np.nan, y))
    step.check_numerics = False
    step(x, y)


def test_in_one_process_all_rows_are_local_and_needed(built: tuple[Network, Any]) -> None:
    network, step = built
    batch = network.batch(9)
    step(*batch)
    assert step.needs.rows() == {"0": ((0, 9),), "1": ((0, 9),)}
    assert step.needs.rows(5) == {"0": ((0, 5),), "1": ((0, 5),)}
    loss = step(*batch, local=True)
    close("mean loss", loss.numpy(), np.mean(step.losses))


def test_a_sharded_data_set_has_whole_windows_in_one_process(built: tuple[Network, Any]) -> None:
    network, step = built
    x, y = network.batch(20)
    found = [
        [rows.numpy() for rows in batch] for batch in dapple.shard(tf.data.Dataset.from_tensor_slices((x, y)), step)
    ]
    assert [len(rows) for rows, _ in found] == [8, 8, 4]
    np.testing.assert_array_equal(np.concatenate([rows for rows, _ in found]), x)


def test_a_recorded_window_trains_as_any_other() -> None:
    network, same = dense([1, 1]), dense([1, 1])
    step, recorded, batch = make_step(network), make_step(same), network.batch(8)
    wanted = [step(*batch).numpy() for _ in range(2)]
    assert [recorded.record(*batch).numpy() for _ in range(2)] == wanted
    np.testing.assert_array_equal(recorded.losses, step.losses)
    for one, other in zip(network.variables, same.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    ran = sorted(str(event.action) for event in recorded.timeline.events)
    assert ran == sorted(f"{stage}{kind}{m}" for stage in range(2) for kind in "FB" for m in range(MINIBATCHES))


def test_the_text_of_the_graph_names_minibatches_versions_and_the_reasons_of_the_order() -> None:
    network = dense([1, 1])
    step = make_step(network, example_batch=network.batch(8))
    for words in (
        "%minibatch3/batch = minibatch(",
        "'version: it uses version 2 of the weights'",
        "'order: 1F3 after the update before it'",
        "%minibatch3/stage1/update = update(",
    ):
        assert words in step.text, step.text
    assert max(map(len, step.text.splitlines())) < 1000
    assert list(step.build_times) == ["trace", "layers", "profile", "differentiate", "passes", "emit"]


# --- runs forward


@pytest.mark.parametrize("size", [1, 3, 8, 9])
@pytest.mark.parametrize("before", [False, True])
def test_a_batch_of_any_size_runs_forward(size: int, before: bool) -> None:
    network = dense([1, 1])
    step = make_step(network)
    if not before:
        step(*network.batch(8))
    batch = network.batch(size, seed=5)
    close("loss", step.forward(*batch).numpy(), network.loss_fn(*batch).numpy())
    close("outputs", *(run(*batch).numpy() for run in (step.forward_of(network.loss_fn), network.loss_fn)))


def of_roots(network: Network) -> Network:
    """Return a network whose loss is the root of that of ``network``: minibatches do not add up to a batch."""
    return Network(lambda x, y: tf.sqrt(network.loss_fn(x, y)), network.stages, network.starts, network.batch)


def test_a_loss_that_combines_samples_trains_by_minibatches_and_runs_forward_on_the_whole_batch() -> None:
    network = of_roots(dense([1, 1]))
    step = compare(network, OPTIMIZERS["adam"], MINIBATCHES, network.batch(9))
    assert not step.exactness.reasons
    batch = network.batch(9)
    close("loss", step.forward(*batch).numpy(), network.loss_fn(*batch).numpy())


def test_a_loss_that_combines_samples_cannot_run_forward_over_replicas() -> None:
    network = of_roots(dense([1, 1]))
    step = make_step(network, replicas=[2, 1])
    step(*network.batch(8))
    assert_refused(ExactnessError, "would not equal", network, lambda: step.forward(*network.batch(8)))


def test_batch_norm_runs_forward_on_the_whole_batch() -> None:
    network = batch_norms()
    step, batch = make_step(network), network.batch(12)
    step(*batch)
    state = copies(network.state)
    found = step.forward(*batch).numpy()
    written = copies(network.state)
    for variable, value in zip(network.state, state, strict=True):
        variable.assign(value)
    close("loss", found, network.loss_fn(*batch).numpy())
    for variable, value in zip(network.state, written, strict=True):
        close(variable.name, value, variable.numpy())


# --- variables


def test_weights_and_slots_live_on_their_stage_and_are_released() -> None:
    network = dense([1, 1])
    before = [variable.device for variable in network.variables]
    step, batch = make_step(network), network.batch(8)
    step(*batch)
    places = {name: variable.device[-5:] for name, variable in step.variables.items()}
    assert {place for name, place in places.items() if "w0" in name} == {"CPU:0"}
    assert {place for name, place in places.items() if "w1" in name} == {"CPU:1"}
    assert sum("w1" in name for name in places) == 3  # the weights, and Adam's two slots
    step.release()
    assert [variable.device for variable in network.variables] == before
    assert {variable.device[-5:] for variable in step.variables.values()} == {before[0][-5:]}
    close("loss", step(*batch).numpy(), np.mean(step.losses))


def test_two_windows_of_other_lengths_and_stages_and_a_synchronous_step_share_an_optimizer() -> None:
    network = dense([1, 2])
    before, batches = copies(network.variables), [network.batch(8, seed) for seed in range(4)]
    whole = Differentiated(network.loss_fn, [[v for stage in network.stages for v in stage]])
    reference = Reference(Differentiated(network.loss_fn, network.stages), OPTIMIZERS["adam, cosine"])
    wanted = reference.window(batches[0], 4).losses
    # A window of one stage has no staleness: its reference is one stage of all variables, with the optimizers so far.
    alone = Reference(whole, OPTIMIZERS["adam, cosine"])
    alone.continue_from(reference)
    wanted += alone.window(batches[1], 2).losses
    wanted.append(alone.synchronous_step(batches[2]))
    reference.continue_from(alone)
    wanted += reference.window(batches[3], 4).losses
    after = copies(network.variables)

    for variable, value in zip(network.variables, before, strict=True):
        variable.assign(value)
    optimizer = OPTIMIZERS["adam, cosine"]()
    stages = make_step(network, optimizer=optimizer)
    one = make_step(network, optimizer=optimizer, stages=1, minibatches=2)
    plain = dapple.pipeline(network.loss_fn, optimizer=optimizer, stages=2, micro_batches=2)
    stages(*batches[0])
    found = [*stages.losses.numpy()]
    one(*batches[1])
    found += [*one.losses.numpy(), plain(*batches[2]).numpy()]
    stages(*batches[3])
    found += [*stages.losses.numpy()]
    close("losses", np.array(found), np.array(wanted))
    for variable, value in zip(network.variables, after, strict=True):
        close(variable.name, variable.numpy(), value)
    assert int(optimizer.iterations.numpy()) == 4 + 2 + 1 + 4


# --- options


@pytest.mark.parametrize(
    ("option", "weights"),
    [
        ("jit_compile", "stash"),
        ("recompute", "stash"),
        *(("jit_compile", weights) for weights in ("vertical-sync", "latest", "2bw")),
        *(("recompute", weights) for weights in ("vertical-sync", "2bw")),
    ],
)
def test_compiled_and_recomputed_windows_are_exact(option: str, weights: str) -> None:
    network = dense([1, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # XLA must compile every stage function, the updates too
        compare(network, OPTIMIZERS["adam"], 5, network.batch(13), weights=weights, **{option: True})


def test_weights_that_are_not_stashed_cannot_be_used_to_recompute() -> None:
    """Backward would compute with the newest weights what it takes from forward else."""
    network = dense([1, 2])
    with pytest.raises(PlanError, match="weights='latest' with recompute"):
        make_step(network, weights="latest", recompute=True)
    plan = make_step(network, recompute=True, example_batch=network.batch(8)).plan
    with pytest.raises(PlanError, match="weights='latest' with recompute"):
        make_step(network, weights="latest", stages="auto", plan=plan)


def test_a_decorated_loss_trains_in_windows() -> None:
    network = dense([1, 1])

    @dapple.pipeline(optimizer=keras.optimizers.Adam(0.01), stages=["layer1"], mode="async", minibatches=4)
    def step(x: Any, y: Any) -> Any:
        return network.loss_fn(x, y)

    batch, before = network.batch(8), copies(network.variables)
    step(*batch)
    found = step.losses.numpy()
    for variable, value in zip(network.variables, before, strict=True):
        variable.assign(value)
    reference = Reference(network.model("stash"), lambda: keras.optimizers.Adam(0.01))
    close("losses", found, np.array(reference.window(batch, 4).losses))


@pytest.mark.parametrize("fit", [True, False])
def test_a_keras_model_trains_in_windows(fit: bool) -> None:
    """A batch of ``fit`` is a window: the loss that Keras shows is the mean of its minibatches' losses."""
    network = keras_stack()
    before, (x, y) = copies(network.variables), network.batch(20)
    windows = [(x[:8], y[:8]), (x[8:16], y[8:16]), (x[16:], y[16:])]
    wanted = Reference(_mean_squares(network), OPTIMIZERS["adam"])
    means = [np.mean(wanted.window(window, MINIBATCHES).losses) for window in windows]
    after = copies(network.variables)
    for variable, value in zip(network.variables, before, strict=True):
        variable.assign(value)

    model = network.loss_fn.__closure__[0].cell_contents  # type: ignore[attr-defined]  # a function has it
    model.compile(OPTIMIZERS["adam"](), "mse")
    dapple.keras.pipeline(model, stages=list(network.starts), mode="async", minibatches=MINIBATCHES)
    if fit:
        history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
        assert history["loss"][0] == pytest.approx(np.average(means, weights=[8, 8, 4]), rel=1e-6)
    else:
        model.reset_metrics()
        for window, mean in zip(windows, means, strict=True):
            assert model.train_on_batch(*window) == pytest.approx(mean, rel=1e-6)
            model.reset_metrics()
    for variable, value in zip(network.variables, after, strict=True):
        np.testing.assert_allclose(variable.numpy(), value, rtol=1e-6, atol=1e-7)  # Keras computes losses in float32
    np.testing.assert_allclose(model.predict(x[:3], verbose=0), model(x[:3]), rtol=1e-6)
    assert int(model.optimizer.iterations.numpy()) == 3 * MINIBATCHES
    with pytest.raises(PlanError, match=r"a window of 2 samples is cut into 4 minibatches.*drop_remainder"):
        model.fit(x[:10], y[:10], batch_size=8, shuffle=False, verbose=0)


def _mean_squares(network: Network) -> Differentiated:
    """Return the model with Keras's "mse": the mean over samples and outputs, not the sum over outputs."""
    return Differentiated(lambda x, y: network.loss_fn(x, y) / y.shape[-1], network.stages)


# --- other batches


@pytest.mark.parametrize(
    ("options", "least"), [({}, 4), ({"replicas": [2, 1]}, 4), ({"weights": "2bw", "micro_batches": 2}, 8)]
)
def test_a_later_window_may_be_smaller_but_not_without_a_sample_for_each_minibatch(
    options: dict[str, Any], least: int
) -> None:
    """A minibatch without samples once had a loss of NaN, and trained on it."""
    network = dense([1, 1])
    step = make_step(network, **options)
    step(*network.batch(20))
    losses = step.losses
    for size in (least - 1, 1):
        said = f"a window of {size} samples? is cut into {least} .*larger window"
        for run in (step, step.record, step.build):
            assert_refused(PlanError, said, network, lambda run=run, size=size: run(*network.batch(size)))
    assert step.losses is losses
    compared = {"weights": "stash", **options}
    compare(dense([1, 1]), OPTIMIZERS["adam"], MINIBATCHES, network.batch(20), network.batch(least), **compared)


def test_a_first_window_that_is_too_small_is_told_before_anything_is_traced() -> None:
    def loss_fn(x: Any, y: Any) -> Any:
        raise AssertionError("traced")

    x, y = dense([1]).batch(3)
    with pytest.raises(PlanError, match="a window of 3 samples is cut into 4 minibatches"):
        dapple.pipeline(loss_fn, optimizer=keras.optimizers.SGD(), stages=1, mode="async", minibatches=4)(x, y)


def test_windows_of_other_inner_shapes_are_traced_anew() -> None:
    scale, matrix = tf.Variable(normal(1, 4, 1), name="scale"), tf.Variable(normal(4, 4, 2) * 0.6, name="matrix")

    def loss_fn(x: Any, y: Any) -> Any:
        with tf.name_scope("layer0"):
            x = tf.tanh(tf.reduce_mean(x[:, :, None] * scale, 1))
        with tf.name_scope("layer1"):
            return tf.reduce_mean(tf.square(tf.tanh(x @ matrix) - y))

    network = Network(
        loss_fn, [[scale], [matrix]], ["layer1"], lambda size, width: (normal(size, width, 1), normal(size, 4, 2))
    )
    compare(network, OPTIMIZERS["adam"], MINIBATCHES, network.batch(9, 3), network.batch(8, 5))


# --- plans


def test_the_plan_of_windows_needs_mode_async_and_says_how_long_they_are() -> None:
    network = dense([1, 1])
    batch = network.batch(9)
    plan = make_step(network, weights="vertical-sync", example_batch=batch).plan
    options: dict[str, Any] = {"optimizer": keras.optimizers.Adam(0.01), "plan": plan}
    with pytest.raises(PlanError, match="asynchronous windows of 4 minibatches: give mode='async'"):
        dapple.pipeline(network.loss_fn, **options)
    step = dapple.pipeline(network.loss_fn, mode="async", example_batch=batch, **options)
    assert step.plan == plan
    other = dapple.pipeline(network.loss_fn, mode="async", minibatches=3, example_batch=batch, **options)
    assert (other.plan.window.minibatches, other.plan.window.weights) == (3, "vertical-sync")


def test_a_synchronous_plan_can_be_run_in_windows() -> None:
    network = dense([1, 1])
    batch = network.batch(9)
    optimizer = keras.optimizers.Adam(0.01)
    sync = dapple.pipeline(
        network.loss_fn, optimizer=optimizer, stages=["layer1"], example_batch=batch, micro_batches=2
    )
    step = make_step(network, stages="auto", plan=sync.plan)
    step(*batch)
    assert (step.plan.stages, step.plan.window.minibatches) == (sync.plan.stages, MINIBATCHES)


def test_a_cluster_is_refused_where_the_stages_are_given() -> None:
    network = dense([1, 1])
    with pytest.raises(PlanError, match="a cluster is used for planning, but everything is given"):
        make_step(network, cluster=Cluster.load("config-a:2"))


# --- a window that fails


@pytest.mark.parametrize("minibatch", [0, 5])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_window_that_fails_says_in_which_minibatch_and_whether_variables_have_changed(
    minibatch: int, stage: int
) -> None:
    network = dense([1, 1])

    def loss_fn(x: Any, y: Any) -> Any:
        with tf.name_scope("layer0"):
            hidden = tf.tanh(x @ network.variables[0])
            if stage == 0:
                hidden = tf.debugging.check_numerics(hidden, "bad hidden")
        with tf.name_scope("layer1"):
            hidden = tf.tanh(hidden @ network.variables[1])
            if stage == 1:
                hidden = tf.debugging.check_numerics(hidden, "bad output")
        return tf.reduce_mean(tf.square(hidden - y))

    optimizer = keras.optimizers.Adam(0.01)
    step = dapple.pipeline(loss_fn, optimizer=optimizer, stages=["layer1"], mode="async", minibatches=8)
    x, y = network.batch(16)
    step(x, y)
    before, losses = copies(network.variables), step.losses
    bad = x.numpy()
    bad[2 * minibatch] = np.nan
    with pytest.raises(StepError) as caught:
        step(bad, y)
    message = str(caught.value)
    if minibatch:
        assert message.startswith(
            "SOME VARIABLES HAVE CHANGED, by the minibatches of the window before the one that failed: go back to the "
            "last checkpoint. "
        )
    else:
        assert message.startswith("All variables are as they were before the step. ")
    assert f"stage {stage}, replica 0, minibatch {minibatch}, forward: " in message
    assert "Tensor had NaN values" in message
    assert step.losses is losses
    assert int(optimizer.iterations.numpy()) == 8
    changed = [np.any(v.numpy() != old) for v, old in zip(network.variables, before, strict=True)]
    assert any(changed) == (minibatch == 5)
    for variable, value in zip(network.variables, before, strict=True):
        assert np.all(np.isfinite(variable.numpy()))
        variable.assign(value)
    step(x, y)
    assert int(optimizer.iterations.numpy()) == 16


def test_the_micro_batch_of_a_minibatch_that_failed_is_named() -> None:
    network = dense([1, 1])

    def loss_fn(x: Any, y: Any) -> Any:
        return network.loss_fn(x, tf.debugging.check_numerics(y + 0 * x, "bad"))

    step = dapple.pipeline(
        loss_fn, optimizer=keras.optimizers.SGD(0.1), stages=["layer1"], mode="async", minibatches=3, weights="2bw"
    )
    x, y = network.batch(12)
    bad = y.numpy()
    bad[6] = np.nan  # minibatch 1 has rows 4 to 7, in two micro-batches
    with pytest.raises(StepError, match=r"stage \d, replica 0, minibatch 1, micro-batch 1, forward: "):
        step(x, bad)


def test_the_minibatch_whose_check_of_arguments_failed_is_named() -> None:
    """Compute what does not depend on samples in the function that runs once for each minibatch."""
    network = dense([1, 1])

    def loss_fn(x: Any, y: Any) -> Any:
        tf.debugging.assert_less(x, tf.constant(100.0, x.dtype))
        return network.loss_fn(x, y)

    step = dapple.pipeline(loss_fn, optimizer=keras.optimizers.SGD(0.1), stages=["layer1"], mode="async", minibatches=4)
    x, y = network.batch(8)
    wrong = x.numpy()
    wrong[5] = 1000  # minibatch 2 has rows 4 and 5
    with pytest.raises(StepError, match=r"stage \d, replica 0, minibatch 2, run_once: "):
        step(wrong, y)


def test_exactness_is_that_of_each_minibatch() -> None:
    network = dense([1, 1])
    step = dapple.pipeline(
        network.loss_fn, optimizer=keras.optimizers.SGD(0.1), stages=["layer1"], mode="async", minibatches=4
    )
    step(*network.batch(8))
    assert step.exactness.exact
    assert "each minibatch by itself" in str(step.exactness)
