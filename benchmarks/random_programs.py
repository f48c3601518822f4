"""Random programs of several ops, loops, draws, embeddings, conditions and writes: equal to one device, or refused.

``python -m benchmarks random_programs [--seed S] [--programs N] [--pipelines P]``: N programs are checked without
stages (see ``op_programs.pipelines.check_parts``), and P others, which also write variables, as pipelines by
``dapple.verify``.
"""

from __future__ import annotations

import argparse
import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.progress import Progress

import dapple_tf as dapple
from benchmarks.census import OpClass, classify_op
from benchmarks.common import Row, print_table
from benchmarks.op_programs.applications import apply_op
from benchmarks.op_programs.check import SAMPLES, Found, Outcome
from benchmarks.op_programs.pipelines import check_parts
from benchmarks.op_programs.program import as_float, make_batch
from benchmarks.op_programs.sources import FEATURES, SEED, Choices, Pool
from dapple_tf.errors import CaptureError, DappleWarning, ExactnessError, LossError

SEEDS, PROGRAMS, PIPELINES = 1, 10_000, 100
_NUMBERS = 80  # decisions of a program
_TRIES = 6  # ops that are tried for a program; those that do not fit its tensors are left out
_FAILURES = (ValueError, TypeError, LookupError, NotImplementedError, tf.errors.OpError, OverflowError)


@dataclass(frozen=True)
class Composition:
    """A random program. ``numbers`` decide its steps and their operands; ``writes``: it may write variables."""

    numbers: tuple[int, ...]
    writes: bool = False

    def loss(self) -> tuple[Callable[..., Any], tuple[tf.Variable, tf.Variable]]:
        """Return the loss, a function of x [N, 24] and ids [N], and the variables that it trains."""
        w = tf.Variable(np.linspace(-1.0, 1.5, FEATURES), dtype=tf.float64, name="w")
        v = tf.Variable(1.25, dtype=tf.float64, name="v")
        state = tf.Variable(tf.zeros([4], tf.float64), trainable=False, name="state")

        def loss_fn(x: Any, ids: Any) -> Any:
            pool = Pool(x, ids, w, Choices(self.numbers))
            with tf.name_scope("first"):
                pool.earlier.append(pool.plain(2))
            for _ in range(2 + pool.choices.number(_TRIES)):
                name = pool.choices.of(list(STEPS)) if pool.choices.number(2) else pool.choices.of(ruled_ops())
                with contextlib.suppress(*_FAILURES):
                    found = STEPS[name](pool) if name in STEPS else apply_op(name, pool)
                    pool.earlier += [value for value in tf.nest.flatten(found) if tf.is_tensor(value)]
            with tf.name_scope("last"):
                if self.writes:
                    pool.choices.of(_WRITES)(pool, state)
                result = pool.choices.of(pool.earlier[-2:][::-1])
                return pool.choices.of(_ENDS)(pool, as_float(result), v) + 0.1 * tf.reduce_mean(tf.square(x * w))

        return loss_fn, (w, v)


@cache
def ruled_ops() -> tuple[str, ...]:
    """Return the public ops that have a rule, without FFTs, which of an empty tensor end the process, and the clock."""
    names = (name for name in dir(tf.raw_ops) if name[0].isupper() and "FFT" not in name and name != "Timestamp")
    classes = ((name, classify_op(name)) for name in names)
    return tuple(name for name, found in classes if found is not None and found[0] is OpClass.RULED)


# --- steps that are more than one op


def _steps(pool: Pool) -> Any:
    """Return a series [N, 3, 4]."""
    return pool.plain(3)


def _rounds(pool: Pool) -> Any:
    def body(i: Any, h: Any) -> tuple[Any, Any]:
        return i + 1, tf.tanh(h) + pool.x[:, :4]

    return tf.while_loop(lambda i, _: i < 3, body, (0, pool.plain(2)))[1]


def _scan(pool: Pool) -> Any:
    series = tf.transpose(_steps(pool), [1, 0, 2])
    return tf.scan(lambda state, step: tf.tanh(state * 0.5 + step), series, tf.zeros_like(series[0]))


def _recurrent(pool: Pool) -> Any:
    series, kernel = _steps(pool), tf.reshape(pool.w[:16], [4, 4])
    state = tf.zeros(tf.stack([pool.size, 4]), tf.float64)
    for t in range(3):
        state = tf.tanh(series[:, t] + state @ kernel)
    return state


def _embedding(pool: Pool) -> Any:
    table = tf.reshape(pool.w, [6, 4])
    return pool.choices.of(
        (
            lambda: tf.gather(table, pool.ids),
            lambda: tf.nn.embedding_lookup(table, tf.stack([pool.ids, pool.ids + 1], 1)),
        )
    )()


def _attention(pool: Pool) -> Any:
    series = _steps(pool)
    scores = tf.matmul(series, series, transpose_b=True) / 2.0
    return tf.matmul(tf.nn.softmax(scores), series)


def _condition(pool: Pool) -> Any:
    value = pool.plain(2)
    decides = pool.choices.of((tf.reduce_mean(pool.x) > 0.0, pool.size > 4, tf.reduce_max(pool.ids) > 2))
    return tf.cond(decides, lambda: tf.sin(value), lambda: value * 0.5)


def _nested(pool: Pool) -> Any:
    return tf.function(lambda h: tf.nn.softplus(h) - tf.reduce_mean(h, -1, keepdims=True), autograph=False)(
        pool.floats()
    )


def _normal(pool: Pool) -> Any:
    return tf.random.stateless_normal(tf.shape(value := pool.floats()), SEED, dtype=tf.float64) * value


def _dropout(pool: Pool) -> Any:
    return tf.nn.experimental.stateless_dropout(pool.floats(), 0.4, seed=SEED)


def _map(pool: Pool) -> Any:
    return pool.choices.of(
        (
            lambda: tf.map_fn(lambda row: tf.cumsum(row), pool.plain(2)),
            lambda: tf.vectorized_map(lambda row: row * tf.reduce_max(row), pool.plain(2)),
        )
    )()


def _layer_norm(pool: Pool) -> Any:
    value = pool.floats()
    mean, variance = tf.nn.moments(value, -1, keepdims=True)
    return (value - mean) * tf.math.rsqrt(variance + 1e-3)


STEPS: Mapping[str, Callable[[Pool], Any]] = {
    "rounds of a loop": _rounds,
    "scan over time": _scan,
    "unrolled over time": _recurrent,
    "embedding": _embedding,
    "attention": _attention,
    "condition": _condition,
    "nested function": _nested,
    "normal draw": _normal,
    "dropout": _dropout,
    "map over samples": _map,
    "layer norm": _layer_norm,
}
_WRITES: Sequence[Callable[[Pool, Any], Any]] = (
    lambda pool, state: state.assign_add(tf.reduce_sum(pool.plain(2), 0)),
    lambda pool, state: state.assign_add(tf.ones([4], tf.float64)),
    lambda pool, state: state.assign(0.9 * state + 0.1 * tf.reduce_mean(pool.x[:, :4], 0)),
    lambda pool, state: state.assign_add(tf.reduce_mean(pool.plain(2), 0)),
)
_ENDS: Sequence[Callable[[Pool, Any, Any], Any]] = (
    lambda pool, value, v: tf.reduce_mean(tf.sin(value) * v),
    lambda pool, value, v: tf.reduce_sum(tf.sin(value * v)) / tf.cast(pool.size, tf.float64),
    lambda pool, value, v: tf.reduce_sum(tf.sin(value * v)),
    lambda pool, value, v: tf.reduce_sum(tf.sin(value)) * v / tf.reduce_sum(tf.cast(pool.ids > 0, tf.float64) + 0.5),
    lambda pool, value, v: tf.reduce_mean(tf.reduce_max(value * v, -1)),
    lambda pool, value, v: tf.reduce_mean(tf.sin(value)) * v,
)


def verify_pipeline(program: Composition, micro_batches: int) -> Found:
    """Return whether a pipeline of the program equals one device, by ``dapple.verify``."""
    batch = make_batch(SAMPLES)
    specs = [tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in batch]
    # One trace for the pipeline and for one device: with known shapes other ops would fit, and the program be another.
    loss_fn, variables = program.loss()
    loss_fn = tf.function(loss_fn, autograph=False, input_signature=specs)

    def differentiate(*arguments: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_fn(*arguments)
        return tape.gradient(loss, variables, unconnected_gradients="zero")

    try:
        tf.function(differentiate, autograph=False)(*batch)
    except _FAILURES as error:
        return Found(Outcome.INVALID, str(error)[:200])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DappleWarning)
            report = dapple.verify(
                loss_fn,
                batch=batch,
                optimizer=keras.optimizers.SGD(0.01),
                stages=["last"],
                micro_batches=micro_batches,
            )
    except (ExactnessError, CaptureError, LossError) as error:
        return Found(Outcome.REFUSED, " ".join(str(error).split()))
    except Exception as error:  # whatever it is, it is a fault to report
        return Found(Outcome.ERROR, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    if not np.isfinite(report.max_gradient_error):
        return Found(Outcome.INVALID, "not finite")
    return Found(Outcome.EQUAL) if report.ok else Found(Outcome.WRONG, str(report))


def check_programs(seed: int, programs: int, pipelines: int) -> Iterator[tuple[str, Composition, Found]]:
    """Yield how each program was checked, the program, and what was found; progress is shown on stderr."""
    random = np.random.default_rng(seed)

    def draw(*, writes: bool) -> Composition:
        return Composition(tuple(int(number) for number in random.integers(0, 1000, _NUMBERS)), writes)

    tf.get_logger().setLevel("ERROR")  # it warns of one trace for each program
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("programs", total=programs + pipelines)
        for kind, wanted in (("analysis", programs), ("pipeline", pipelines)):
            done = 0
            while done < wanted:
                program = draw(writes=kind == "pipeline")
                found = check_parts(program) if kind == "analysis" else verify_pipeline(program, (2, 3, 6)[done % 3])
                if found.outcome is not Outcome.INVALID:
                    done += 1
                    progress.advance(task)
                    yield kind, program, found


_REASONS: Mapping[str, str] = {
    "no sum or mean over samples": "samples are combined",
    "statistic of the whole batch": "one op gives samples and a statistic",
    "writes": "a write that depends on samples",
    "documented": "hidden draws",
    "cannot be traced": "cannot be traced",
}


def _reason(found: Found) -> str:
    return next((name for words, name in _REASONS.items() if words in found.why), "another reason")


def run(seed: int = SEEDS, programs: int = PROGRAMS, pipelines: int = PIPELINES) -> Iterator[Row]:
    """Yield a row for each way of checking: how many programs were equal, refused, wrong."""
    counts: dict[str, Counter[str]] = {"analysis": Counter(), "pipeline": Counter()}
    reasons: Counter[str] = Counter()
    for kind, program, found in check_programs(seed, programs, pipelines):
        counts[kind][found.outcome.value] += 1
        if found.outcome is Outcome.REFUSED:
            reasons[_reason(found)] += 1
        if found.outcome in (Outcome.WRONG, Outcome.ERROR):
            yield Row(f"{kind}: {program}", "equal", f"{found.outcome.value}: {found.why}", ok=False)
    for kind, found_counts in counts.items():
        bad = found_counts[Outcome.WRONG.value] + found_counts[Outcome.ERROR.value]
        measured = ", ".join(f"{count} {name}" for name, count in found_counts.most_common())
        yield Row(f"{kind}, seed {seed}: programs", "0 wrong", measured, bad == 0)
    yield Row("refused, by reason", "", ", ".join(f"{count} {why}" for why, count in reasons.most_common(8)), ok=True)


def main(arguments: Sequence[str]) -> int:
    """Check programs, and print a table; return 1 where one is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks random_programs", description=__doc__)
    parser.add_argument("--seed", type=int, default=SEEDS)
    parser.add_argument("--programs", type=int, default=PROGRAMS, help="checked without stages")
    parser.add_argument("--pipelines", type=int, default=PIPELINES, help="checked as pipelines")
    options = parser.parse_args(arguments)
    return 1 if print_table(run(options.seed, options.programs, options.pipelines)) else 0
