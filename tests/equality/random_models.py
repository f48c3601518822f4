"""Random small models as data: a list of operations on a growing pool of tensors, which ``build`` makes a loss of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from tests.equality.one_device import Problem

WIDTH, ROWS, TIME = 4, 7, 3

# Kinds of tensors: floats [batch, WIDTH], floats [TIME, batch, WIDTH], integers [batch], booleans [batch, WIDTH].
FLOAT, STEPS, INT, BOOL = "float", "steps", "int", "bool"
ARGUMENTS = (FLOAT, FLOAT, INT, BOOL)


@dataclass(frozen=True)
class Op:
    """One operation; ``inputs`` index the pool, which starts with the arguments."""

    kind: str
    inputs: tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """``seed``: of the weights; ``regularized``: the loss has a term of the weights alone."""

    ops: tuple[Op, ...]
    seed: int
    aux: bool
    regularized: bool

    def layer(self, index: int) -> str:
        """Return the name of operation ``index``, with which a stage may start."""
        return f"keras{index}" if self.ops[index].kind == "keras_dense" else f"op{index}"


class Weights:
    """Creates variables by name; operations that use the same name share a variable (tied weights)."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.by_name: dict[str, Any] = {}

    def get(self, name: str, *shape: int, trainable: bool = True) -> tf.Variable:
        if name not in self.by_name:
            value = self.random.normal(size=shape) * 0.5
            self.by_name[name] = tf.Variable(value, name=name, trainable=trainable)
        return self.by_name[name]

    def keras_dense(self, name: str) -> keras.layers.Layer:
        layer = keras.layers.Dense(WIDTH, "tanh", dtype="float64", name=name)
        layer.build((None, WIDTH))
        layer.set_weights([self.random.normal(size=weight.shape) * 0.5 for weight in layer.weights])
        self.by_name |= {variable.path: variable for variable in layer.variables}
        return layer


# --- operations: (weights, name) -> a function of the input tensors; variables are made outside of the trace


def _dense(w: Weights, name: str) -> Callable[..., Any]:
    kernel, bias = w.get(f"{name}_kernel", WIDTH, WIDTH), w.get(f"{name}_bias", WIDTH)
    return lambda a: tf.tanh(a @ kernel + bias)


def _keras_dense(w: Weights, name: str) -> Callable[..., Any]:
    return w.keras_dense(name)


def _tied(w: Weights, name: str) -> Callable[..., Any]:
    kernel = w.get("tied", WIDTH, WIDTH)
    return lambda a: tf.tanh(a @ kernel)


def _tied_transposed(w: Weights, name: str) -> Callable[..., Any]:
    kernel = w.get("tied", WIDTH, WIDTH)
    return lambda a: tf.tanh(tf.matmul(a, kernel, transpose_b=True))


def _elementwise(w: Weights, name: str) -> Callable[..., Any]:
    return lambda a: tf.nn.gelu(a) + 0.5 * a


def _add(w: Weights, name: str) -> Callable[..., Any]:
    return lambda a, b: a + b


def _multiply(w: Weights, name: str) -> Callable[..., Any]:
    return lambda a, b: tf.tanh(a * b)


def _concat_dense(w: Weights, name: str) -> Callable[..., Any]:
    kernel = w.get(f"{name}_kernel", 2 * WIDTH, WIDTH)
    return lambda a, b: tf.tanh(tf.concat([a, b], 1) @ kernel)


def _halves(w: Weights, name: str) -> Callable[..., Any]:
    def run(a: Any) -> Any:
        left, right = tf.split(a, 2, axis=1)  # one op with two outputs
        return tf.concat([right, left * 0.5], 1)

    return run


def _normalize(w: Weights, name: str) -> Callable[..., Any]:
    scale = w.get(f"{name}_scale", WIDTH)

    def run(a: Any) -> Any:
        mean, variance = tf.nn.moments(a, [1], keepdims=True)
        return scale * (a - mean) * tf.math.rsqrt(variance + 1.0)

    return run


def _embedding(w: Weights, name: str) -> Callable[..., Any]:
    table = w.get(f"{name}_table", ROWS, WIDTH)
    return lambda ids: tf.nn.embedding_lookup(table, ids)


def _tied_embedding(w: Weights, name: str) -> Callable[..., Any]:
    table = w.get("tied_table", ROWS, WIDTH)
    return lambda ids: tf.gather(table, ids)


def _tied_head(w: Weights, name: str) -> Callable[..., Any]:
    table = w.get("tied_table", ROWS, WIDTH)
    return lambda a: tf.nn.softmax(tf.matmul(a, table, transpose_b=True)) @ table


def _integer(w: Weights, name: str) -> Callable[..., Any]:
    return lambda ids: (ids * 3 + 1) % ROWS


def _largest(w: Weights, name: str) -> Callable[..., Any]:
    return lambda a: tf.argmax(a, 1, output_type=tf.int32)


def _compare(w: Weights, name: str) -> Callable[..., Any]:
    return lambda a: a > 0.05


def _either(w: Weights, name: str) -> Callable[..., Any]:
    return lambda p, q: tf.math.logical_xor(p, q)


def _where(w: Weights, name: str) -> Callable[..., Any]:
    return lambda p, a, b: tf.where(p, a, 0.5 * b)


def _to_steps(w: Weights, name: str) -> Callable[..., Any]:
    return lambda a: tf.stack([a, 0.5 * a, tf.tanh(a)], 0)


def _steps_dense(w: Weights, name: str) -> Callable[..., Any]:
    kernel = w.get(f"{name}_kernel", WIDTH, WIDTH)
    return lambda s: tf.tanh(tf.einsum("tbi,ij->tbj", s, kernel))


def _scan(w: Weights, name: str) -> Callable[..., Any]:
    kernel = w.get(f"{name}_kernel", WIDTH, WIDTH)
    return lambda s: tf.scan(lambda state, now: tf.tanh(state @ kernel + now), s)


def _from_steps(w: Weights, name: str) -> Callable[..., Any]:
    return lambda s: tf.reduce_mean(s, 0)


def _while(w: Weights, name: str) -> Callable[..., Any]:
    kernel = w.get(f"{name}_kernel", WIDTH, WIDTH)

    def run(a: Any) -> Any:
        return tf.while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, tf.tanh(v @ kernel)), [0, a])[1]

    return run


def _cond(w: Weights, name: str) -> Callable[..., Any]:
    kernel, switch = w.get(f"{name}_kernel", WIDTH, WIDTH), w.get(f"{name}_switch", trainable=False)
    return lambda a: tf.cond(switch > 0.0, lambda: tf.tanh(a @ kernel), lambda: a @ (0.5 * kernel))


def _custom_gradient(w: Weights, name: str) -> Callable[..., Any]:
    @tf.custom_gradient
    def run(a: Any) -> Any:
        result = tf.tanh(a)
        return (
            result,
            lambda upstream: 0.5 * upstream * (1 - result * result),
        )  # half of tanh's

    return run


def _recomputed(w: Weights, name: str) -> Callable[..., Any]:
    kernel = w.get(f"{name}_kernel", WIDTH, WIDTH)
    return tf.recompute_grad(lambda a: tf.tanh(tf.tanh(a @ kernel) @ kernel))


def _nested(w: Weights, name: str) -> Callable[..., Any]:
    kernel = w.get(f"{name}_kernel", WIDTH, WIDTH)
    return tf.function(lambda a: tf.tanh(a @ kernel))


def _nested_pair(w: Weights, name: str) -> Callable[..., Any]:
    kernel = w.get(f"{name}_kernel", WIDTH, WIDTH)
    return tf.function(lambda a, p: (tf.where(p, a @ kernel, a), tf.logical_not(p)))


def _stop_gradient(w: Weights, name: str) -> Callable[..., Any]:
    return lambda a, b: tf.stop_gradient(tf.tanh(a)) * b


def _reshape(w: Weights, name: str) -> Callable[..., Any]:
    kernel = w.get(f"{name}_kernel", 2, 2)

    def run(a: Any) -> Any:
        pairs = tf.reshape(a, [tf.shape(a)[0], 2, 2]) @ kernel  # the batch's size is itself a tensor
        return tf.reshape(pairs, [-1, WIDTH])

    return run


def _frozen(w: Weights, name: str) -> Callable[..., Any]:
    kernel = w.get(f"{name}_kernel", WIDTH, WIDTH, trainable=False)
    return lambda a: tf.tanh(a @ kernel)


# kind -> function that builds it, kinds of its inputs, kinds of its outputs
KINDS: dict[str, tuple[Callable[[Weights, str], Callable[..., Any]], tuple[str, ...], tuple[str, ...]]] = {
    "dense": (_dense, (FLOAT,), (FLOAT,)),
    "keras_dense": (_keras_dense, (FLOAT,), (FLOAT,)),
    "tied": (_tied, (FLOAT,), (FLOAT,)),
    "tied_transposed": (_tied_transposed, (FLOAT,), (FLOAT,)),
    "elementwise": (_elementwise, (FLOAT,), (FLOAT,)),
    "add": (_add, (FLOAT, FLOAT), (FLOAT,)),
    "multiply": (_multiply, (FLOAT, FLOAT), (FLOAT,)),
    "concat_dense": (_concat_dense, (FLOAT, FLOAT), (FLOAT,)),
    "halves": (_halves, (FLOAT,), (FLOAT,)),
    "normalize": (_normalize, (FLOAT,), (FLOAT,)),
    "embedding": (_embedding, (INT,), (FLOAT,)),
    "tied_embedding": (_tied_embedding, (INT,), (FLOAT,)),
    "tied_head": (_tied_head, (FLOAT,), (FLOAT,)),
    "integer": (_integer, (INT,), (INT,)),
    "largest": (_largest, (FLOAT,), (INT,)),
    "compare": (_compare, (FLOAT,), (BOOL,)),
    "either": (_either, (BOOL, BOOL), (BOOL,)),
    "where": (_where, (BOOL, FLOAT, FLOAT), (FLOAT,)),
    "to_steps": (_to_steps, (FLOAT,), (STEPS,)),
    "steps_dense": (_steps_dense, (STEPS,), (STEPS,)),
    "scan": (_scan, (STEPS,), (STEPS,)),
    "from_steps": (_from_steps, (STEPS,), (FLOAT,)),
    "while": (_while, (FLOAT,), (FLOAT,)),
    "cond": (_cond, (FLOAT,), (FLOAT,)),
    "custom_gradient": (_custom_gradient, (FLOAT,), (FLOAT,)),
    "recomputed": (_recomputed, (FLOAT,), (FLOAT,)),
    "nested": (_nested, (FLOAT,), (FLOAT,)),
    "nested_pair": (_nested_pair, (FLOAT, BOOL), (FLOAT, BOOL)),
    "stop_gradient": (_stop_gradient, (FLOAT, FLOAT), (FLOAT,)),
    "reshape": (_reshape, (FLOAT,), (FLOAT,)),
    "frozen": (_frozen, (FLOAT,), (FLOAT,)),
}


@st.composite
def models(draw: st.DrawFn, kinds: Sequence[str]) -> Model:
    """Draw a model with an operation of each of ``kinds`` and up to two others, in any order."""
    others = draw(st.lists(st.sampled_from(list(KINDS)), max_size=2))
    pool, ops = list(ARGUMENTS), []
    queue = ["dense", *draw(st.permutations([*kinds, *others]))]
    while queue:
        name = queue.pop(0)
        _, takes, gives = KINDS[name]
        if not set(takes) <= set(pool):
            queue[:0] = ["to_steps", name]  # the only kind of tensor that is not an argument
            continue
        inputs = []
        for wanted in takes:
            candidates = [i for i, found in enumerate(pool) if found == wanted]
            inputs.append(candidates[-1 - draw(st.integers(0, len(candidates) - 1))])  # small draws give a chain
        ops.append(Op(name, tuple(inputs)))
        pool += gives
    return Model(tuple(ops), draw(st.integers(0, 99)), draw(st.booleans()), draw(st.booleans()))


def build(model: Model, make_optimizer: Callable[[], Any]) -> Problem:
    """Return the model as a loss. Its head takes every tensor that no operation takes, so no operation is dead."""
    weights = Weights(model.seed)
    runs = [KINDS[op.kind][0](weights, model.layer(i)) for i, op in enumerate(model.ops)]
    head = weights.get("head", WIDTH, WIDTH)
    tied = weights.by_name.get("tied", head)

    def loss_fn(x: Any, y: Any, ids: Any, flags: Any) -> Any:
        pool, taken = [x, y, ids, flags], {1}
        for i, (op, run) in enumerate(zip(model.ops, runs, strict=True)):
            taken.update(op.inputs)
            with tf.name_scope(model.layer(i)):
                result = run(*(pool[j] for j in op.inputs))
            pool += result if isinstance(result, (list, tuple)) else [result]
        ends = [_as_float(tensor) for i, tensor in enumerate(pool) if i not in taken]
        prediction = tf.tanh(tf.add_n(ends) @ head) @ head
        loss = tf.reduce_mean(tf.reduce_sum(tf.square(prediction - y), 1))
        if model.regularized:
            loss += 0.1 * tf.reduce_sum(tf.square(tied))
        if not model.aux:
            return loss
        right = tf.reduce_sum(tf.cast(prediction > y, tf.int32))
        return loss, {"prediction": prediction, "mean": tf.reduce_mean(prediction), "right": right}

    return Problem(loss_fn, weights.by_name, make_optimizer)


def _as_float(tensor: Any) -> Any:
    """Return a tensor of any kind as floats [batch, WIDTH]."""
    if tensor.dtype == tf.float64:
        return tf.reduce_sum(tensor, 0) if tensor.shape.rank == 3 else tensor
    value = tf.cast(tensor, tf.float64) / ROWS
    return value if tensor.shape.rank == 2 else tf.tile(value[:, None], [1, WIDTH])


def batch(seed: int, size: int) -> Sequence[Any]:
    """Return arguments for any model."""
    random = np.random.default_rng(seed)
    return (
        tf.constant(random.normal(size=(size, WIDTH))),
        tf.constant(random.normal(size=(size, WIDTH))),
        tf.constant(random.integers(0, ROWS, size), tf.int32),
        tf.constant(random.integers(0, 2, (size, WIDTH)), tf.bool),
    )
