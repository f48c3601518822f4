"""What ``dapple.pipeline`` refuses, with which message, and the state of variables after a failed step."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import (
    BatchError,
    CaptureError,
    DappleWarning,
    DeviceError,
    LossError,
    PartitionError,
    PlanError,
    ScheduleError,
    StepError,
    UsageError,
)
from dapple_tf.profiler.cluster import config
from tests.dapple_tf.builders import X, chain, make_plan, step_of

Loss = Callable[..., tf.Tensor]


@pytest.fixture(scope="module")
def loss() -> Any:
    return chain(3)[1]


def matrix(name: str = "w") -> tf.Variable:
    return tf.Variable(tf.ones((4, 4)) / 4, name=name)


# --- options


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"stages": 99},
            PartitionError,
            r"99 stages are wanted, .* 4 places only \(5 layers\): ask for at most 5 stages",
        ),
        ({"stages": 0}, PlanError, "stages=0: there must be at least one"),
        ({"stages": ["d9"]}, PartitionError, "no layer is called 'd9'; the nearest are 'd2', 'd1', 'd0'"),
        ({"stages": ["d2", "d1"]}, PlanError, "'d1' does not come after 'd2' in the model"),
        ({"stages": ["d1", "d1"]}, PlanError, "'d1' is given twice: name each layer that starts a stage once"),
        ({"stages": ["d1", "net/d1"]}, PlanError, "'net/d1' and 'd1' are the same layer: name each layer"),
        ({"stages": "d1"}, PlanError, "stages='d1': give a number, a list of layer names, or 'auto'"),
        ({"replicas": [1]}, PlanError, r"replicas=\[1\] names 1 stage, but there are 2"),
        ({"replicas": [2, 0]}, PlanError, "every stage needs at least one device"),
        (
            {"replicas": [8, 1]},
            PlanError,
            "need 9 devices, but there are 8: ask for fewer, or make more with dapple.init",
        ),
        ({"replicas": 2}, PlanError, "replicas=2: give one whole number for each stage"),
        ({"replicas": [5, 1]}, PlanError, "gives some only 4 samples, too few for 5 replicas: use fewer micro-batches"),
        ({"micro_batches": 9}, PlanError, "micro_batches=9 is more than the 8 samples of the batch: use at most 8"),
        ({"micro_batches": 0}, PlanError, "micro_batches=0: it must be at least 1"),
        ({"devices": ["CPU:0"]}, PlanError, r"2 stages with replicas \[1, 1\] need 2 devices, but there are 1"),
        ({"devices": ["CPU:0", "CPU:8"]}, DeviceError, "there is no device 'CPU:8'; there are /device:CPU:0, "),
        ({"devices": "CPU:0"}, DeviceError, "devices='CPU:0': give a list of names or indices"),
        ({"schedule": "zigzag"}, ScheduleError, "no schedule is called 'zigzag'; there are gpipe, dapple-a"),
        ({"schedule": "dapple-a:4"}, ScheduleError, "'dapple-a:4' is not a schedule such as"),
        ({"schedule": "dapple-a:D=0"}, ScheduleError, "D=0: a stage must hold at least one micro-batch"),
        ({"schedule": "gpipe:D=1"}, ScheduleError, "gpipe holds all M=2 micro-batches, but D=1: use dapple-a"),
        (
            {"recompute": "every"},
            PlanError,
            r"recompute='every': give True \('all'\) or False \('none'\), one flag for",
        ),
        ({"recompute": [True, "layer_0"]}, PlanError, r"recompute=\[True, 'layer_0'\]: give True"),
        ({"recompute": [True] * 3}, PlanError, r"recompute=\[True, True, True\] is for 3 stages, but there are 2"),
        ({"recompute": ["nosuch"]}, PartitionError, "no layer is called 'nosuch'; the nearest are "),
        ({"cluster": "cluster.yaml"}, PlanError, r"cluster is a str: read a file with dapple.Cluster.load\(path\)"),
        (
            {"cluster": config("a", 2), "schedule": "gpipe"},
            PlanError,
            "a cluster is used for planning, but everything is given: leave the cluster out",
        ),
        (
            {"cluster": config("a", 9), "stages": "auto"},
            PlanError,
            "the cluster has 9 devices, but this process has 8: make more with dapple.init",
        ),
        (
            {"plan": make_plan((0, 4, (0,))), "stages": 2},
            PlanError,
            "give a plan, or stages and replicas, not both",
        ),
        (
            {"plan": make_plan((0, 4, (0,))), "stages": "auto", "recompute": True},
            PlanError,
            "give a plan, or recompute, not both: a plan's field recompute says",
        ),
        (
            {"plan": make_plan((0, 4, (0,)), global_batch_size=64, micro_batches=16)},
            PlanError,
            "for batches of 64 samples, and the first batch has 8, too few for it .*: begin with a batch of 64",
        ),
        ({"optimizer": "sdg"}, PlanError, "optimizer='sdg' is not known to Keras"),
        (
            {"plan": "plan.json"},
            PlanError,
            r"plan is a str: read a file with dapple.Plan.load\(path\)",
        ),
    ],
)
def test_impossible_options_are_refused(
    loss: Loss, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        step_of(loss, **options)(X)


@pytest.fixture
def started_as_one_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of a launcher, in a process that has not called ``dapple.init`` as its rank."""
    for name in ("SIZE", "LOCAL_SIZE"):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", "2")


_NO_INIT = (
    r"this process was started as one of 2 ranks, but dapple\.init\(\) was not called .*: call dapple\.init\(\) at"
)


@pytest.mark.usefixtures("started_as_one_of_two")
def test_too_few_devices_without_init_in_a_job_are_explained(loss: Loss) -> None:
    with pytest.raises(PlanError, match=rf"need 2 devices, but there are 1: {_NO_INIT}"):
        step_of(loss, devices=["CPU:0"])(X)


@pytest.mark.usefixtures("started_as_one_of_two")
def test_training_alone_in_a_job_is_a_warning(loss: Loss) -> None:
    with pytest.warns(DappleWarning, match=f"^{_NO_INIT}"):
        step_of(loss, stages=1)(X)


def test_a_later_batch_of_a_wrong_width_fails_as_the_first_would(loss: Loss) -> None:
    """As in a second ``fit``, whose function leaves lengths unknown that have changed."""
    step, wrong = step_of(tf.function(loss, reduce_retracing=True)), np.zeros((8, 3), np.float32)
    step(X)
    with pytest.raises(CaptureError, match=r"(?s)cannot be traced: .*incompatible with the layer: expected axis -1"):
        step(wrong)


@pytest.mark.parametrize(("batch", "error"), [((X,), LossError), ((X, X), CaptureError)])
def test_a_keras_model_in_place_of_a_loss_function_is_explained(batch: tuple[Any, ...], error: type[Exception]) -> None:
    model, _ = chain(3)
    with pytest.raises(error, match=r"It is a Keras model, and a loss function is needed, .*dapple\.keras\.pipeline"):
        step_of(model)(*batch)


def test_errors_have_one_base_and_are_value_or_runtime_errors() -> None:
    names = [name for name in dapple.errors.__all__ if name not in ("DappleError", "DappleWarning")]
    kinds = [getattr(dapple.errors, name) for name in names]
    assert len(kinds) == 22
    assert all(issubclass(kind, dapple.errors.DappleError) for kind in kinds)
    assert all(issubclass(kind, ValueError | RuntimeError) for kind in kinds)


def test_an_ambiguous_layer_name_is_refused_with_the_candidates() -> None:
    halves = [
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="a")], name=name) for name in ("left", "right")
    ]
    model = keras.Sequential([keras.Input((4,)), *halves], name="net")

    def loss(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(model(x))

    message = "layer name 'a' is ambiguous: it may be net/left/a, net/right/a. Write the longer name."
    with pytest.raises(PartitionError, match=message):
        step_of(loss, stages=["a"])(X)
    assert step_of(loss, stages=["right/a"])(X).shape == ()


def test_an_optimizer_built_for_other_variables_is_refused(loss: Loss) -> None:
    optimizer = keras.optimizers.Adam()
    optimizer.build([keras.Variable([1.0])])
    with pytest.raises(PlanError, match="Adam cannot update these variables: Unknown variable: "):
        step_of(loss, optimizer=optimizer)(X)


def test_an_optimizer_that_updates_variables_of_two_stages_in_one_op_is_refused() -> None:
    class OneOpOptimizer(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            mean = tf.add_n([tf.reduce_mean(grad) for grad in grads])
            handles = [variable.handle for variable in trainable_variables]

            @tf.function
            def update() -> None:
                for handle in handles:
                    tf.raw_ops.AssignSubVariableOp(resource=handle, value=mean)

            update()

    first, second = tf.Variable(1.0), tf.Variable(2.0)
    message = r"op .* \(StatefulPartitionedCall\) updates variables of stage 0 and stage 1 at once, .* by itself"
    with pytest.raises(PartitionError, match=message):
        step_of(lambda x: tf.reduce_mean(tf.tanh(x * first) * second), optimizer=OneOpOptimizer(), stages=["mul_1"])(X)


# --- plans


def test_a_plan_for_another_model_is_refused(loss: Loss) -> None:
    with pytest.raises(
        PlanError, match=r"the plan is for 3 layers, but loss has 5: it was made for .* options of it: give .* by --set"
    ):
        step_of(loss, plan=make_plan((0, 1, (0,)), (2, 2, (1,))))(X)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"micro_batches": 16}, PlanError, "micro_batches=16 is more than the 8 samples of the batch"),
        ({"schedule": "zigzag"}, ScheduleError, "no schedule is called 'zigzag'"),
        ({"recompute": (3, 5)}, PlanError, r"recompute\[1\] is layer 5, but the layers are 0 to 4"),
    ],
)
def test_an_impossible_plan_is_refused(
    loss: Loss, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        step_of(loss, plan=make_plan((0, 1, (0,)), (2, 4, (1,)), **changes))(X)


def test_a_plan_for_another_batch_is_carried_out_with_one_warning(loss: Loss) -> None:
    step = step_of(loss, plan=make_plan((0, 1, (0,)), (2, 4, (1,)), global_batch_size=32, micro_batch_size=8))
    with pytest.warns(DappleWarning, match="the plan was made for a batch of 32 samples, and the first") as caught:
        step(X)
    step(X[:4])
    (warning,) = caught
    assert "the first batch has 8: its micro-batches have other sizes than planned" in str(warning.message)
    assert "dapple plan --global-batch-size 8, or dapple.plan(..., global_batch_size=8)" in str(warning.message)


def test_a_plan_for_more_devices_is_refused(loss: Loss) -> None:
    with pytest.raises(PlanError, match="the plan uses devices 0,11, but there are only 8, from 0: make more with"):
        step_of(loss, plan=make_plan((0, 1, (0,)), (2, 4, (11,))))(X)


# --- boundaries


def test_a_string_tensor_cannot_cross_a_stage_boundary() -> None:
    w, scale = matrix(), matrix("scale")

    def loss(x: tf.Tensor) -> tf.Tensor:
        text = tf.strings.as_string(x @ w)
        return tf.reduce_mean(tf.strings.to_number(text) * scale[0])

    message = (
        "no stage can start at layer 'StringToNumber': %AsString:0 crosses here, and a string tensor cannot leave its "
        "device. Possible nearby: 'AsString', "
    )
    with pytest.raises(PartitionError, match=message):
        step_of(loss, stages=["StringToNumber"])(X)


def test_a_stage_cannot_start_where_no_tensor_crosses() -> None:
    w, count = matrix(), tf.Variable(0.0, trainable=False, name="count")

    def loss(x: tf.Tensor) -> tf.Tensor:
        count.assign_add(tf.reduce_sum(x @ w))
        return tf.reduce_mean(tf.tanh(x @ w))

    with pytest.raises(PartitionError, match="no stage can start at layer 'matmul_1': no tensor crosses here, so the"):
        step_of(loss, stages=["matmul_1"])(X)


def test_a_variable_cannot_be_written_by_two_stages() -> None:
    w, count = matrix(), tf.Variable(0.0, trainable=False, name="count")

    def loss(x: tf.Tensor) -> tf.Tensor:
        y = tf.tanh(x @ w)
        y += count.assign_add(tf.reduce_mean(y))
        return tf.reduce_mean(tf.exp(y)) * count.assign_add(tf.reduce_mean(y))

    with pytest.raises(PartitionError, match="'Exp': forward writes variable 'count' and uses it on both sides"):
        step_of(loss, stages=["Exp"], inexact="allow")(X)


def test_a_boundary_without_a_batch_axis_cannot_be_split_over_unequal_replicas() -> None:
    w, scale = matrix(), matrix("scale")

    def loss(x: tf.Tensor) -> tf.Tensor:
        y = tf.tanh(x @ w)
        return tf.reduce_mean(tf.exp(tf.matmul(y, y, transpose_a=True)) * scale)

    message = (
        r"whose replica counts differ \(\(2, 1\)\) or their shares, but it has no single batch axis .*: cut elsewhere, "
        "or give both stages equal replicas and shares"
    )
    with pytest.raises(PartitionError, match=message):
        step_of(loss, stages=["Exp"], replicas=[2, 1], inexact="allow")(X)
    with pytest.warns(DappleWarning, match="does not equal one device's"):
        assert step_of(loss, stages=["Exp"], inexact="warn")(X).shape == ()


def test_a_boundary_without_a_gradient_warns_of_what_is_not_trained() -> None:
    w, scale = matrix(), tf.Variable(2.0, name="scale")

    def loss(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.cast(tf.argmax(x @ w, -1), tf.float32) * scale + 1.0)

    with pytest.warns(DappleWarning, match="no gradient reaches w: .* it will not be trained") as caught:
        step_of(loss)(X)
    assert [warning.filename for warning in caught] == [__file__], "it points at the user's line"


def batch_norm_step(**options: Any) -> Any:
    norms = [keras.layers.BatchNormalization(name=name) for name in ("one", "two")]
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(4), *norms, keras.layers.Dense(1)])

    def loss(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(model(x, training=True)))

    return dapple.pipeline(loss, **{"optimizer": keras.optimizers.SGD(0.1), "stages": 2, "micro_batches": 2} | options)


def test_layers_that_train_otherwise_are_named_once_at_the_users_line() -> None:
    step, batch = batch_norm_step(), tf.random.stateless_normal([8, 4], [1, 2])
    with pytest.warns(DappleWarning, match="does not train as on one device: .*one and 1 more normalises") as caught:
        step(batch)
    assert [warning.filename for warning in caught] == [__file__]
    assert "\n" not in str(caught[0].message)
    assert "batch_norm='sync'" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(batch)
        step(batch[:4])


@pytest.mark.parametrize("options", [{"micro_batches": 1}, {"inexact": "allow"}])
def test_nothing_is_said_where_nothing_differs_or_the_user_allows_it(options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch_norm_step(**options)(tf.random.stateless_normal([8, 4], [1, 2]))


def test_a_warning_of_the_loss_points_at_the_users_line() -> None:
    w = matrix()
    step = step_of(lambda x: tf.reduce_sum(x @ w), stages=1)
    with pytest.warns(DappleWarning, match="is a sum over the batch") as caught:
        step(X + 2)
    assert [warning.filename for warning in caught] == [__file__]


# --- the function and the batch


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda x, w: x @ w, LossError, r"has shape \(None, 4\), not \(\)"),
        (lambda x, w: tf.cast(tf.reduce_mean(x @ w), tf.int32), LossError, "is int32, not a float"),
        (lambda x, w: tf.reduce_mean(x), CaptureError, "uses no trainable variable, so there is nothing to train"),
        (lambda x, w: tf.reduce_sum(w * w), PartitionError, "computes nothing from its arguments"),
        (lambda x, w: tf.reduce_sum(x @ w) / x.shape[0], CaptureError, r"let it use tf.shape\(x\)\[0\]"),
    ],
)
def test_a_function_that_is_not_a_mean_loss_is_refused(
    make: Callable[..., Any], error: type[Exception], message: str
) -> None:
    w = matrix()
    with pytest.raises(error, match=message):
        step_of(lambda x: make(x, w))(X)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((), "takes at least one argument"),
        ((3,), "the batch has no tensors: at least one argument must be an array or tensor of the samples"),
        ((None,), "the batch has no tensors"),
        ((tf.constant(3.0),), "argument 0 is a scalar"),
        ((X, tf.constant("text")), "argument 1 is a scalar"),
        ((X, [1, 2]), r"argument 1 is a list of numbers \(1\[0\] is 1\): give an array or a tensor of the samples"),
        ((X, {"words": ("one",)}), r"argument 1 is a dict of strings \(1.* is 'one'\): give an array or a tensor"),
        ((X, X[:3]), "not batched alike on axis 0: argument 0: 8, argument 1: 3"),
        ((X[:0],), "the batch is empty"),
    ],
)
def test_arguments_that_are_not_one_batch_are_refused(loss: Loss, batch: tuple[Any, ...], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        step_of(loss)(*batch)


def test_with_an_example_batch_options_are_refused_at_once(loss: Loss) -> None:
    with pytest.raises(PartitionError, match="no layer is called 'd9'"):
        step_of(loss, stages=["d9"], example_batch=(X,))


def test_a_step_can_be_used_after_a_refused_batch(loss: Loss) -> None:
    step = step_of(loss)
    with pytest.raises(PlanError, match="more than the 1 sample of"):
        step(X[:1])
    with pytest.raises(BatchError):
        step(X[:0])
    assert step(X).shape == ()


# --- calls in the wrong order


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda step: step.plan, "there is no plan before the first batch: call the step, or give example_batch"),
        (lambda step: step.text, "nothing has been built: call the step with a batch first"),
        (lambda step: step.graph_def, "nothing has been built: call the step with a batch first"),
        (lambda step: step.timeline, r"no step was recorded: call step.record with a batch first"),
    ],
)
def test_properties_before_the_first_batch_raise(loss: Loss, use: Callable[[Any], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        use(step_of(loss))


def test_a_step_inside_a_tf_function_is_refused(loss: Loss) -> None:
    step = step_of(loss, example_batch=(X,))
    with pytest.raises(UsageError, match=r"a whole training step: call it outside of any tf\.function"):
        tf.function(lambda x: step(x), autograph=False)(X)


# --- a step that fails


def test_a_failed_forward_leaves_all_variables_as_they_were() -> None:
    w, count = matrix(), tf.Variable(0.0, trainable=False, name="count")

    def loss(x: tf.Tensor) -> tf.Tensor:
        count.assign_add(1.0)
        tf.debugging.assert_greater(x, -5.0, message="too small")
        return tf.reduce_mean(tf.tanh(tf.tanh(x @ w) @ w))

    step = step_of(loss, optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
    step(X)
    before = (w.numpy(), count.numpy())
    bad = X.copy()
    bad[-1] = -9  # in the last micro-batch: the first has run by then
    with pytest.raises(StepError, match=r"^All variables are as they were before the step\. The step failed: "):
        step(bad)
    np.testing.assert_array_equal(w.numpy(), before[0])
    assert count.numpy() == before[1]
    step(X)
    assert np.any(w.numpy() != before[0]), "and training can go on"


class Fragile(keras.optimizers.SGD):
    """Fails in the update of the variable called "second", once that of "first" is done."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if "second" in variable.name:
            with tf.control_dependencies([tf.debugging.Assert(self.iterations < 1, ["no more"])]):
                gradient = tf.identity(gradient)
        super().update_step(gradient, variable, learning_rate)


def test_a_failed_update_says_that_variables_have_changed() -> None:
    first, second = matrix("first"), matrix("second")
    optimizer = Fragile(0.1)
    step = step_of(lambda x: tf.reduce_mean(tf.tanh(tf.tanh(x @ first) @ second)), optimizer=optimizer)
    step(X)
    with pytest.raises(
        StepError, match=r"^SOME VARIABLES HAVE CHANGED, others may not have: go back to the last checkpoint"
    ):
        step(X)


def test_steps_may_be_called_from_another_thread(loss: Loss) -> None:
    step, found = step_of(loss), []
    thread = threading.Thread(target=lambda: found.append(float(step(X))))
    thread.start()
    thread.join()
    assert len(found) == 1


# --- accepted


NAMES = ("Mean", "Tanh", "Mul", "sub", "optimizer", "input")


def test_variables_may_be_called_like_ops_or_like_parts_of_the_graph() -> None:
    assert_equal_to_one_device([matrix(name) for name in NAMES])


@pytest.mark.parametrize("name", NAMES)
def test_one_variable_may_be_called_like_an_op_or_a_part_of_the_graph(name: str) -> None:
    assert_equal_to_one_device([matrix(name), matrix("other")])


def assert_equal_to_one_device(matrices: Sequence[tf.Variable]) -> None:
    def loss(x: tf.Tensor) -> tf.Tensor:
        for weights in matrices:
            x = tf.tanh(x @ weights)
        return tf.reduce_mean(x)

    batch = (X + 2,)  # not symmetric: gradients that cancel would be all rounding error
    report = dapple.verify(
        loss, optimizer=keras.optimizers.Adam(0.1), batch=batch, stages=2, micro_batches=2, schedule="dapple-a"
    )
    assert report.ok, str(report)


def test_a_function_with_an_input_signature_is_trained() -> None:
    w = matrix()
    loss = tf.function(lambda x: tf.reduce_mean(tf.tanh(x @ w)), input_signature=[tf.TensorSpec((None, None))])
    step = step_of(loss)
    assert float(step(X)) > float(step(X)) > float(step(X))
