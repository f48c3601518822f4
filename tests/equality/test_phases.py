"""Training steps of several phases, and others of ``examples/steps/``, compute what one device computes."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path
from typing import Any

import keras
import networkx as nx
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import CaptureError, PartitionError, PlanError, StepError, UsageError
from dapple_tf.graph_passes.analysis.variable_use import variable_uses, written_by
from dapple_tf.graph_passes.ir.names import STAGE_OPS, nodes_of, of_phase
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.timeline.trace_file import read_recording
from tests.equality.test_training_steps import assert_equal, assert_trains_as_one_device
from tests.equality.training_steps import mlp, mse, regression, tokens, values_of, word_model
from tests.paths import ROOT

pytestmark = pytest.mark.usefixtures("float64")

STEPS = {
    path.stem: path for path in sorted((ROOT / "examples" / "steps").glob("*.py")) if path.stem != "beside_one_device"
}
PHASES = {
    "actor_critic": 2,
    "adversarial": 1,
    "cyclegan": 1,
    "dcgan": 1,
    "distillation": 1,
    "gan": 2,
    "gradnorm": 1,
    "masked_lm": 1,
    "pcgrad": 1,
    "sam": 2,
    "vae": 1,
    "wgan": 3,
    "wgan_gp": 3,
}


def check(name: str, **options: Any) -> None:
    example = runpy.run_path(str(STEPS[name]))
    step = assert_trains_as_one_device(example["make"], example["batches"](), **options)
    assert len(step.phases) == PHASES[name]


@pytest.mark.parametrize("name", STEPS)
def test_one_stage_and_one_micro_batch_train_as_one_device(name: str) -> None:
    check(name, stages=1, micro_batches=1)


@pytest.mark.parametrize("name", STEPS)
def test_three_stages_and_a_micro_batch_for_each_sample_train_as_one_device(name: str) -> None:
    check(name, stages=3, micro_batches=12)


@pytest.mark.parametrize("name", STEPS)
def test_replicas_train_as_one_device(name: str) -> None:
    check(name, stages=2, replicas=[2, 1], micro_batches=3)


def batch() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    return tf.constant(rng.normal(size=(12, 4))), tf.constant(rng.normal(size=(12, 1)))


def check_step(make: Any, **options: Any) -> Any:
    return assert_trains_as_one_device(make, [batch()] * 3, **({"stages": 2, "micro_batches": 3} | options))


def restored_weights() -> Any:
    """The weights of before are put back after the second gradient; rows of the first forward are used at the end."""
    model, optimizer, error = mlp(), keras.optimizers.Adam(0.02), keras.metrics.MeanAbsoluteError()

    def train_step(x: Any, y: Any) -> Any:
        variables = model.trainable_variables
        before = [tf.identity(variable.value) for variable in variables]
        with tf.GradientTape() as tape:
            found = model(x, training=True)
            loss = mse(y, found)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.2 * gradient)
        with tf.GradientTape() as tape:
            ahead = mse(y, model(x, training=True))
        gradients = tape.gradient(ahead, variables)
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        rows = found + tf.cast(ahead, found.dtype)
        error.update_state(y, rows)
        return loss, ahead, rows, error.result()

    return train_step, [model, optimizer, error]


def weighed_by_the_first_loss() -> Any:
    """The second loss is weighed by the first one's gradient, by its value, and by a running mean."""
    model, optimizer, mean = mlp(), keras.optimizers.SGD(0.1), tf.Variable(1.0, dtype=tf.float64, trainable=False)

    def train_step(x: Any, y: Any) -> Any:
        variables = model.trainable_variables
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        gradients = tape.gradient(loss, variables)
        weight = loss / (1 + tf.linalg.global_norm(gradients))
        mean.assign(0.9 * mean + 0.1 * weight)
        with tf.GradientTape() as tape:
            other = tf.reduce_mean(tf.abs(model(x, training=True))) * weight * mean
        more = tape.gradient(other, variables)
        optimizer.apply_gradients(zip([g + h for g, h in zip(gradients, more, strict=True)], variables, strict=True))
        return loss, other, mean

    return train_step, [model, optimizer, mean]


def updated_between() -> Any:
    """One forward, two gradients, and an update between them: the second one is that of the forward all the same."""
    model, one, other = mlp(), keras.optimizers.Adam(0.02), keras.optimizers.SGD(0.1)

    def train_step(x: Any, y: Any) -> Any:
        variables = model.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            found = model(x, training=True)
            first, second = mse(y, found), tf.reduce_mean(tf.abs(found))
        one.apply_gradients(zip(tape.gradient(first, variables), variables, strict=True))
        other.apply_gradients(zip(tape.gradient(second, variables), variables, strict=True))
        return first, second

    return train_step, [model, one, other]


def functions_of_the_step() -> Any:
    """Critic and generator are trained by tf.functions that the step calls."""
    generator, critic = (
        mlp(2),
        keras.Sequential([keras.Input([2]), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)]),
    )
    of_generator, of_critic = keras.optimizers.Adam(0.02), keras.optimizers.Adam(0.02)

    @tf.function
    def train_critic(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            real = critic(tf.concat([y, -y], 1))
            loss = mse(tf.ones_like(y), real) + mse(tf.zeros_like(y), critic(generator(x)))
        variables = critic.trainable_variables
        of_critic.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    @tf.function
    def train_generator(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(critic(generator(x)) - 1))
        variables = generator.trainable_variables
        of_generator.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    @tf.function
    def train_step(x: Any, y: Any) -> Any:
        return train_critic(x, y), train_generator(x)

    return train_step, [generator, critic, of_generator, of_critic]


@pytest.mark.parametrize("make", [restored_weights, weighed_by_the_first_loss, functions_of_the_step])
def test_values_are_handed_over_to_later_phases(make: Any) -> None:
    assert len(check_step(make).phases) == 2


# --- targets that take no rows: TensorFlow takes their gradients after those of the batch


def penalty_after_the_update() -> Any:
    """The new weights are made smaller by a tape of their own."""
    model, optimizer, decay = mlp(), keras.optimizers.Adam(0.02), keras.optimizers.SGD(0.01, momentum=0.9)

    def train_step(x: Any, y: Any) -> Any:
        variables = model.trainable_variables
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        with tf.GradientTape() as tape:
            penalty = tf.add_n([tf.reduce_sum(tf.square(variable)) for variable in variables])
        decay.apply_gradients(zip(tape.gradient(penalty, variables), variables, strict=True))
        return loss, penalty

    return train_step, [model, optimizer, decay]


def multiplier_of_a_constraint() -> Any:
    """The multiplier is trained by the mean that the forward has found, once the weights have changed."""
    model, optimizer, ascent = mlp(2), keras.optimizers.Adam(0.02), keras.optimizers.Adam(0.1)
    multiplier = tf.Variable(0.3, dtype=tf.float64)

    def train_step(x: Any, y: Any) -> Any:
        variables = model.trainable_variables
        with tf.GradientTape() as tape:
            found, costs = tf.split(model(x, training=True), 2, axis=1)
            cost = tf.reduce_mean(costs)
            loss = mse(y, found) + tf.stop_gradient(tf.nn.softplus(multiplier)) * cost
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 1.0)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        with tf.GradientTape() as tape:
            dual = -tf.nn.softplus(multiplier) * (tf.stop_gradient(cost) - 0.05)
        ascent.apply_gradients([(tape.gradient(dual, multiplier), multiplier)])
        return {"loss": loss, "cost": cost, "dual": dual}

    return train_step, [model, optimizer, ascent, multiplier]


def learned_rate() -> Any:
    """The learning rate is trained by the product of this step's gradients and those of the step before."""
    model, rate = mlp(), tf.Variable(0.1, dtype=tf.float64)
    before = [tf.Variable(tf.zeros_like(variable), trainable=False) for variable in model.trainable_variables]

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        with tf.GradientTape() as tape:
            products = [tf.reduce_sum(g * old) for g, old in zip(gradients, before, strict=True)]
            gain = -rate * tf.add_n(products)
        rate.assign_sub(0.001 * tape.gradient(gain, rate))
        for variable, gradient, old in zip(model.trainable_variables, gradients, before, strict=True):
            variable.assign_sub(rate * gradient)
            old.assign(gradient)
        return loss, gain

    return train_step, [model, rate, *before]


def weights_of_two_losses() -> Any:
    """GradNorm: the weights of two losses are trained by the norms of their gradients."""
    model, weights = mlp(2), tf.Variable([1.0, 1.0], dtype=tf.float64)
    optimizer, of_weights = keras.optimizers.Adam(0.02), keras.optimizers.SGD(0.1)

    def train_step(x: Any, y: Any) -> Any:
        variables = model.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            one, other = tf.split(model(x, training=True), 2, axis=1)
            losses = mse(y, one), tf.reduce_mean(tf.abs(y - other))
        gradients = [tape.gradient(loss, variables) for loss in losses]
        norms = tf.stack([tf.linalg.global_norm(of_loss) for of_loss in gradients])
        with tf.GradientTape() as tape:
            unequal = tf.reduce_sum(tf.abs(weights * norms - tf.stop_gradient(tf.reduce_mean(weights * norms))))
        of_weights.apply_gradients([(tape.gradient(unequal, weights), weights)])
        combined = [weights[0] * g + weights[1] * h for g, h in zip(*gradients, strict=True)]
        optimizer.apply_gradients(zip(combined, variables, strict=True))
        return (*losses, unequal)

    return train_step, [model, optimizer, of_weights, weights]


def weight_of_the_second_loss() -> Any:
    """Between two losses the weight of the second one is trained by the first one."""
    model, optimizer, weight = mlp(), keras.optimizers.SGD(0.1), tf.Variable(1.0, dtype=tf.float64)

    def train_step(x: Any, y: Any) -> Any:
        variables = model.trainable_variables
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        with tf.GradientTape() as tape:
            distance = tf.square(weight - tf.stop_gradient(loss))
        weight.assign_sub(0.1 * tape.gradient(distance, weight))
        with tf.GradientTape() as tape:
            second = weight * tf.reduce_mean(tf.abs(model(x, training=True) - y))
        optimizer.apply_gradients(zip(tape.gradient(second, variables), variables, strict=True))
        return loss, distance, second

    return train_step, [model, optimizer, weight]


@pytest.mark.parametrize(
    ("make", "phases"),
    [
        (penalty_after_the_update, 1),
        (multiplier_of_a_constraint, 1),
        (learned_rate, 1),
        (weights_of_two_losses, 1),
        (weight_of_the_second_loss, 2),
    ],
)
def test_gradients_that_need_no_rows_are_taken_after_those_of_the_batch(make: Any, phases: int) -> None:
    assert len(check_step(make).phases) == phases


def test_a_step_all_of_whose_gradients_need_no_rows_is_refused() -> None:
    model = mlp()

    def train_step(x: Any, y: Any) -> Any:
        for factor in 1.0, 2.0:
            with tf.GradientTape() as tape:
                penalty = factor * tf.add_n([tf.reduce_sum(tf.square(v)) for v in model.trainable_variables])
            for variable, gradient in zip(
                model.trainable_variables, tape.gradient(penalty, model.trainable_variables), strict=True
            ):
                variable.assign_sub(0.1 * gradient)

    with pytest.raises(PartitionError, match="computes nothing from its arguments"):
        dapple.train_step(train_step, stages=2, micro_batches=3)(*batch())


# --- several targets of one forward


def a_sum_and_a_mean() -> Any:
    """One loss is a sum over samples, the other a mean to which the first one is added; both train all variables."""
    model, optimizer = mlp(), keras.optimizers.Adam(0.02)

    def train_step(x: Any, y: Any) -> Any:
        variables = model.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            found = model(x, training=True)
            total = tf.reduce_sum(tf.abs(found))
            mean = mse(y, found) + 0.1 * total + 0.01 * tf.add_n([tf.nn.l2_loss(v.value) for v in variables])
        of_mean, of_total = tape.gradient(mean, variables), tape.gradient(total, variables)
        norms = [tf.linalg.global_norm(gradients) for gradients in (of_mean, of_total)]
        optimizer.apply_gradients(
            zip([g / norms[0] - h / norms[1] for g, h in zip(of_mean, of_total, strict=True)], variables, strict=True)
        )
        return mean, total, norms

    return train_step, [model, optimizer]


def tapes_that_record_different_parts() -> Any:
    """The first tape does not record the first layer, whose variables the second tape trains."""
    model, optimizer = mlp(), keras.optimizers.SGD(0.1)
    first, *others = model.layers
    dropout = keras.layers.Dropout(0.3, seed=5)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as whole:
            hidden = dropout(first(x), training=True)
            with tf.GradientTape() as part:
                for layer in others:
                    hidden = layer(hidden)
                one, other = mse(y, hidden), tf.reduce_mean(tf.abs(hidden))
        upper = [variable for layer in others for variable in layer.trainable_variables]
        of_part = part.gradient(one, upper)
        of_whole = whole.gradient(other, [*first.trainable_variables, *upper])
        optimizer.apply_gradients(zip(of_whole, [*first.trainable_variables, *upper], strict=True))
        optimizer.apply_gradients(zip(of_part, upper, strict=True))
        return one, other

    return train_step, [model, optimizer, dropout.seed_generator.state]


def accumulated_over_two_forwards() -> Any:
    """Gradients of two forwards with dropout, the second of which comes after the first gradients."""
    model, optimizer = mlp(), keras.optimizers.Adam(0.02)
    dropout = keras.layers.Dropout(0.3, seed=5)

    def train_step(x: Any, y: Any) -> Any:
        losses, gradients = [], []
        for scale in (1.0, 0.5):
            with tf.GradientTape() as tape:
                losses.append(mse(y, model(dropout(scale * x, training=True))))
            gradients.append(tape.gradient(losses[-1], model.trainable_variables))
        added = [g + h for g, h in zip(*gradients, strict=True)]
        optimizer.apply_gradients(zip(added, model.trainable_variables, strict=True))
        return losses

    return train_step, [model, optimizer, dropout.seed_generator.state]


ONE_FORWARD = [
    updated_between,
    a_sum_and_a_mean,
    tapes_that_record_different_parts,
    accumulated_over_two_forwards,
]


@pytest.mark.parametrize("make", ONE_FORWARD)
def test_targets_that_need_no_others_gradients_are_of_one_phase(make: Any) -> None:
    step = check_step(make)
    assert len(step.phases) == 1
    with pytest.raises(UsageError, match="let the step return those"):
        step.run_exposed(*batch())


def test_a_target_that_is_exact_alone_has_a_phase_of_its_own() -> None:
    """The first loss combines what the second one trains, which is exact only where it is not trained."""
    step = check_step(normalised_by_the_batch)
    assert len(step.phases) == 2


def normalised_by_the_batch() -> Any:
    model, head = mlp(3), keras.Sequential([keras.Input([3]), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            hidden = model(x)
            one = mse(y, head(hidden / tf.sqrt(tf.reduce_mean(tf.square(hidden)))))
            other = tf.reduce_mean(tf.abs(hidden))
        of_head = tape.gradient(one, head.trainable_variables)
        of_model = tape.gradient(other, model.trainable_variables)
        optimizer.apply_gradients(
            zip([*of_head, *of_model], [*head.trainable_variables, *model.trainable_variables], strict=True)
        )
        return one, other

    return train_step, [model, head, optimizer]


def test_sparse_gradients_by_two_losses_stay_apart() -> None:
    assert_trains_as_one_device(two_losses_of_words, tokens(), stages=2, micro_batches=3)


def two_losses_of_words() -> Any:
    model, optimizer = word_model(), keras.optimizers.Adam(0.02)

    def train_step(x: Any, y: Any) -> Any:
        variables = model.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            logits = model(x, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
            one, other = tf.reduce_mean(losses), tf.reduce_mean(tf.square(logits))
        first, second = tape.gradient(one, variables), tape.gradient(other, variables)
        optimizer.apply_gradients(zip(first, variables, strict=True))
        optimizer.apply_gradients(zip(second, variables, strict=True))
        return one, other

    return train_step, [model, optimizer]


def check_memory_of_phases(report: Any) -> None:
    """A device holds each variable once, what one phase takes, the update before it, and what waits for the next."""
    stages = [[stage.predicted for stage in phase.stages] for phase in report.phases]
    for device, memories in zip(report.devices, zip(*stages, strict=True), strict=True):
        sums = sum(memory.peak for memory in memories)
        assert max(memory.peak for memory in memories) <= device.peak < sums
        first, second = memories
        assert device.in_step == max(first.in_step + second.waiting, first.update + second.in_step)
    assert "all phases" in str(report)
    assert report.to_json()["devices"][0]["peak"] == report.devices[0].peak


def test_phases_are_verified_recorded_and_described(tmp_path: Path) -> None:
    example = runpy.run_path(str(STEPS["gan"]))
    function, objects = example["make"]()
    (first, *_) = example["batches"]()
    report = dapple.verify(function, batch=first, stages=2, micro_batches=3)
    assert report.ok, str(report)
    step = dapple.train_step(function, stages=2, micro_batches=3)
    before = values_of(objects)
    returned = step.record(*first)
    first_phase, second = (phase.timeline for phase in step.phases)
    whole = step.timeline
    assert whole.step_seconds == whole.starts[1] + second.step_seconds
    assert whole.overlap_seconds == pytest.approx(first_phase.step_seconds - whole.starts[1])
    assert whole.starts[1] > 0
    assert 0 < whole.bubble < 1
    assert whole.simulated_seconds is not None
    assert whole.simulated_seconds > 0
    assert "simulated" in whole.summary
    assert str(whole).count("critical path") == 2
    for suffix in ("png", "html", "json"):
        whole.save(tmp_path / f"step.{suffix}")
    (earlier,) = read_recording(tmp_path / "step.json").shown.earlier
    assert earlier.timeline.step_seconds == pytest.approx(first_phase.step_seconds)
    assert earlier.seconds == pytest.approx(whole.starts[1])
    assert [entry["step_seconds"] for entry in whole.to_json()["phases"]] == [
        first_phase.step_seconds,
        second.step_seconds,
    ]
    assert "phase 1 of 2:" in step.summary()
    assert "phase 2 of 2:" in step.summary()
    check_memory_of_phases(step.report)
    assert not any("handed_over" in name for name in step.variables)
    assert any(not np.array_equal(a, b) for a, b in zip(before, values_of(objects), strict=True))
    assert set(returned) == {"critic", "generator", "mean", "made"}
    with pytest.raises(UsageError, match="let the step return those"):
        step.run_exposed(*first)


def joint_graph(step: Any) -> nx.DiGraph[str]:
    """The edges between all nodes of all phases, by the names by which ``follow`` nodes call them."""
    joined: nx.DiGraph[str] = nx.DiGraph()
    for number, phase in enumerate(step.phases):
        for node in phase.graph.nodes:
            name = of_phase(number, node.name)
            joined.add_node(name)
            joined.add_edges_from((of_phase(number, source), name) for source in node.predecessors())
            after = node.strings("after") if node.op == OpName.FOLLOW else ()
            joined.add_edges_from((source, name) for source in after)
    return joined


def uses_of(step: Any) -> list[tuple[int, str, int, bool]]:
    """For each use of a variable: the phase, the node, the variable's identity, and whether it is written."""
    found = []
    for number, phase in enumerate(step.phases):
        variables = phase.planned.model.variables
        for node, names in variable_uses(phase.graph):
            written = set(written_by(phase.graph, node, names))
            found += [(number, of_phase(number, node.name), id(variables[name]), name in written) for name in names]
    return found


@pytest.mark.parametrize("name", ["gan", "sam", "wgan_gp", "actor_critic"])
def test_phases_are_ordered_wherever_they_depend_on_each_other(name: str) -> None:
    """Reads and writes of a variable in two phases have an order, and so have the calls of a device."""
    example = runpy.run_path(str(STEPS[name]))
    (first, *_) = example["batches"]()
    step = dapple.train_step(example["make"]()[0], stages=2, micro_batches=3, example_batch=first)
    joined = joint_graph(step)
    assert nx.is_directed_acyclic_graph(joined)
    before = {name: nx.ancestors(joined, name) for name in joined}
    pairs = 0
    for (i, node, variable, writes), (j, later, same, writes_later) in itertools.product(uses_of(step), repeat=2):
        if i < j and variable == same and (writes or writes_later):
            assert node in before[later], f"{later} may run before {node}"
            pairs += 1
    assert pairs
    calls = [
        (number, of_phase(number, node.name), node.device)
        for number, phase in enumerate(step.phases)
        for node in nodes_of(phase.graph, *STAGE_OPS)
    ]
    for (i, node, device), (j, later, same_device) in itertools.product(calls, repeat=2):
        assert not (i < j and device == same_device) or node in before[later]


def critic_then_generator() -> Any:
    """A generator, then a critic of another stage: the first phase trains the critic, the second the generator."""
    keras.utils.set_random_seed(1)
    generator = keras.Sequential([keras.Input([4]), keras.layers.Dense(3, "tanh", name="g")], name="generator")
    critic = keras.Sequential([keras.Input([3]), keras.layers.Dense(1, name="c")], name="critic")
    optimizers = [keras.optimizers.Adam(0.02) for _ in range(2)]

    def train_step(x: Any, y: Any) -> Any:
        losses = []
        for model, optimizer in zip((critic, generator), optimizers, strict=True):
            with tf.GradientTape() as tape:
                losses.append(mse(y * (len(losses) + 1), critic(generator(x))))
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(losses[-1], variables), variables, strict=True))
        return losses

    return train_step, [generator, critic, *optimizers]


def test_the_generator_begins_while_the_critic_is_trained() -> None:
    """Its first forwards need nothing of what the critic's phase does on other stages."""
    step = check_step(critic_then_generator, stages=["critic/c"])
    joined = joint_graph(step)
    for m in range(2):
        before = nx.ancestors(joined, f"phase2/stage0/replica0/mb{m}/forward")
        assert before.isdisjoint(name for name in joined if "/stage1/" in name)
        assert before.isdisjoint(name for name in joined if "/update" in name)
    assert "phase1/stage1/update" in nx.ancestors(joined, "phase2/stage1/replica0/mb0/forward")


def test_phases_of_many_micro_batches_have_a_loop_each() -> None:
    """A phase waits for nodes in the loop of the one before, and its loop begins after the first calls have waited."""
    rng = np.random.default_rng(0)
    many = rng.normal(size=(40, 4)), rng.normal(size=(40, 1))
    step = assert_trains_as_one_device(critic_then_generator, [many] * 3, stages=["critic/c"], micro_batches=40)
    assert sum(node.op == "While" for node in step.graph_def.node) == 2


def test_a_phase_that_fails_says_that_variables_have_changed() -> None:
    model, optimizer = mlp(), keras.optimizers.SGD(0.1)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mse(y, model(x))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        with tf.GradientTape() as tape:
            other = mse(y, tf.debugging.check_numerics(tf.math.log(model(x) - 1e6), "a logarithm"))
        optimizer.apply(tape.gradient(other, model.trainable_variables), model.trainable_variables)
        return loss

    step = dapple.train_step(train_step, stages=2, micro_batches=3)
    with pytest.raises(
        StepError,
        match=r"SOME VARIABLES HAVE CHANGED, by phase 1 of 2: .* phase 2 of 2, stage 1, [^$]*forward: [^$]*logarithm",
    ):
        step(*batch())


# --- what is refused, at the user's line


def two_times_in_one(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    tape = tf.GradientTape(persistent=True)
    with tape:
        one = mse(y, model(x))
    optimizer.apply(tape.gradient(one, model.trainable_variables), model.trainable_variables)  # here
    with tape:
        other = one + tf.reduce_mean(tf.abs(model(x)))
    optimizer.apply(tape.gradient(other, model.trainable_variables), model.trainable_variables)


def drawn_once(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    noisy = x + tf.random.normal(tf.shape(x), dtype=x.dtype)
    with tf.GradientTape() as tape:
        one = mse(y, model(noisy))
    optimizer.apply(tape.gradient(one, model.trainable_variables), model.trainable_variables)
    with tf.GradientTape() as tape:
        other = tf.reduce_mean(tf.abs(model(noisy)))
    optimizer.apply(tape.gradient(other, model.trainable_variables), model.trainable_variables)  # here


REFUSED = [
    (two_times_in_one, r"before it changes variables here, and through what it computes after that"),
    (drawn_once, r"has a row for each sample and runs once"),
]


@pytest.mark.filterwarnings("ignore:.*does not train as on one device")
@pytest.mark.parametrize(("body", "why"), REFUSED, ids=[body.__name__ for body, _ in REFUSED])
def test_what_phases_cannot_hand_over_is_refused_at_the_users_line(body: Any, why: str) -> None:
    model, optimizer = mlp(), keras.optimizers.SGD(0.1)
    before = values_of([model])
    step = dapple.train_step(lambda x, y: body(model, optimizer, x, y), stages=2, micro_batches=3)
    with pytest.raises(CaptureError, match=why) as caught:
        step(*batch())
    lines = (ROOT / "tests" / "equality" / "test_phases.py").read_text(encoding="utf-8").splitlines()
    start = body.__code__.co_firstlineno
    here = next(i for i, line in enumerate(lines, 1) if "# here" in line and i > start)
    assert f"test_phases.py:{here}" in str(caught.value)
    for ours, theirs in zip(values_of([model]), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_step_that_is_traced_differently_each_time_is_refused() -> None:
    model, optimizer, times = mlp(), keras.optimizers.SGD(0.1), []

    def train_step(x: Any, y: Any) -> Any:
        times.append(len(times))
        with tf.GradientTape() as tape:
            loss = mse(y, model(x))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        with tf.GradientTape() as tape:
            other = tf.reduce_mean(tf.abs(model(x)))
            for _ in times:
                other = other + 1
        optimizer.apply(tape.gradient(other, model.trainable_variables), model.trainable_variables)

    with pytest.raises(CaptureError, match="does other things each time that it is traced"):
        dapple.train_step(train_step, stages=2, micro_batches=3)(*batch())


@pytest.mark.parametrize("counts", [(2, 1, 2), (1, 3, 2)], ids=str)
def test_an_argument_decides_how_many_phases_a_step_has(counts: tuple[int, ...]) -> None:
    """A critic is trained more often than a generator, by a flag, or in some steps more often than in others."""

    def made() -> tuple[Any, list[Any]]:
        models = [mlp() for _ in range(3)]

        def train_step(x: Any, y: Any, count: int) -> Any:
            losses = []
            for model in models[:count]:
                with tf.GradientTape() as tape:
                    losses.append(mse(y, model(x) + sum(losses)))
                for variable, gradient in zip(
                    model.trainable_variables, tape.gradient(losses[-1], model.trainable_variables), strict=True
                ):
                    variable.assign_sub(0.1 * gradient + 0.01 * losses[0])
            return losses

        return train_step, models

    (function, found), (plain, wanted) = made(), made()
    step, whole = dapple.train_step(function, stages=2, micro_batches=3), tf.function(plain)
    for i, (rows, count) in enumerate(zip(regression(len(counts)), counts, strict=True), 1):
        assert_equal(step(*rows, count), whole(*rows, count))
        assert len(step.phases) == count
        assert len(step.variables) == 6 * max(counts[:i])
    assert_equal(step.record(*rows, counts[1]), whole(*rows, counts[1]))
    assert str(step.timeline)
    assert step.summary()
    for ours, theirs in zip(values_of(found), values_of(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_norm": "deferred"},
        {"batch_norm": "sync", "replicas": [2, 1]},
        {"shard_optimizer": True, "replicas": [2, 1]},
    ],
    ids=str,
)
def test_options_that_phases_do_not_have_are_refused(options: Any) -> None:
    function, _ = weighed_by_the_first_loss()
    with pytest.raises(PlanError, match="gradients of several targets, and such steps do not have this option"):
        dapple.train_step(function, **({"stages": 2, "micro_batches": 3} | options))(*batch())


# --- Variables that the losses of several phases change live where the first of them has placed them


def counted_by_two_losses() -> Any:
    """Both losses divide by the counts of classes so far, which the step adds to before each."""
    first, second, optimizer = mlp(1), mlp(1), keras.optimizers.SGD(0.05)
    counts = tf.Variable(tf.ones([2], tf.float64), trainable=False)

    def counted(x: Any, labels: Any) -> Any:
        counts.scatter_add(tf.IndexedSlices(tf.ones_like(x[:, 0]), labels))
        return tf.gather(counts, labels)

    def train_step(x: Any, y: Any) -> Any:
        weights = counted(x, tf.cast(y[:, 0] > 0, tf.int32))
        with tf.GradientTape() as tape:
            one = tf.reduce_mean(tf.square(second(x) - y)[:, 0] / weights)
        of_second = tape.gradient(one, second.trainable_variables)
        optimizer.apply_gradients(zip(of_second, second.trainable_variables, strict=True))
        with tf.GradientTape(persistent=True) as tape:
            predicted = first(x)
            other = mse(y, predicted)
        for loss in (other, None):
            if loss is None:
                weights = counted(x, tf.cast(y[:, 0] > 0, tf.int32))
                with tape:
                    loss = tf.reduce_mean(tf.square(predicted - y)[:, 0] / weights)
            for variable, gradient in zip(
                first.trainable_variables, tape.gradient(loss, first.trainable_variables), strict=True
            ):
                variable.assign_sub(0.1 * gradient)
        return one, other, loss

    return train_step, [first, second, optimizer, counts]


def normalised_critic(*, turned: bool = False) -> Any:
    """A critic with batch norm is called in both phases, ``turned``: after its layers in one, before them in the other.

    Its layers are at other places of the chain of layers in each phase.
    """
    keras.utils.set_random_seed(4)
    dense, normal = keras.layers.Dense, keras.layers.BatchNormalization
    critic = keras.Sequential([keras.Input([4]), dense(4, "tanh"), normal(), dense(4, "tanh"), dense(4)])
    other = keras.Sequential([keras.Input([4]), dense(4, "tanh"), normal(), dense(4, "tanh"), dense(4)])
    generator = keras.Sequential([keras.Input([4]), dense(5, "tanh"), dense(5, "tanh"), dense(4)])
    one, two = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            judged = critic(x, training=True)
            judged = other(judged, training=True) if turned else judged + critic(generator(x), training=True)
            loss = tf.reduce_mean(tf.square(judged))
        one.apply_gradients(
            zip(tape.gradient(loss, critic.trainable_variables), critic.trainable_variables, strict=True)
        )
        with tf.GradientTape() as tape:
            made = other(generator(x, training=True), training=True) if turned else generator(x, training=True)
            fooled = tf.reduce_mean(tf.square(critic(made, training=True) - y))
        two.apply_gradients(
            zip(tape.gradient(fooled, generator.trainable_variables), generator.trainable_variables, strict=True)
        )
        return loss, fooled

    return train_step, [critic, other, generator, one, two]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (counted_by_two_losses, {"stages": 3}),
        (counted_by_two_losses, {"stages": 3, "micro_batches": 12}),
        pytest.param(normalised_critic, {"stages": 3, "micro_batches": 1}, marks=pytest.mark.always),
        (normalised_critic, {"stages": 4, "micro_batches": 1}),
        (normalised_critic, {"stages": 4, "micro_batches": 1, "schedule": "interleaved-1f1b:v=2"}),
    ],
    ids=["counts", "counts, a sample each", "batch norm", "batch norm, four stages", "batch norm, two stages a device"],
)
def test_what_the_losses_of_two_phases_change_is_kept(make: Any, options: Any) -> None:
    assert len(check_step(make, **options).phases) == 2


def test_a_later_loss_that_changes_variables_in_another_order_of_stages_is_refused() -> None:
    function, _ = normalised_critic(turned=True)
    step = dapple.train_step(function, stages=2, micro_batches=1)
    with pytest.raises(
        PlanError,
        match=r"test_phases.py:\d+: variable '.*moving_\w+' lives on device \d, where a loss of the step uses it",
    ):
        step(*batch())
