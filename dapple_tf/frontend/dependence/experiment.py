"""Find out by experiment how a function's results depend on samples: the last resort for ops without a rule.

The function is run on drawn values: several numbers of samples, ties, extreme values. Its result has a row for each
sample if a part of the samples gives that part of the rows, and the other rows stay bit-equal where one sample is
changed. It is a sum or a mean if the results of the parts add up to it, or average to it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from dapple_tf.frontend.dependence.kinds import Form, Kind, rows

Function = Callable[[Sequence[Any]], Sequence[Any] | None]
"""Returns NumPy results for NumPy operands; None where it cannot be run on these values."""

Prepare = Callable[[Sequence[Any]], Sequence[Any] | None]
"""Computes the operands that are the same for all parts, from the other operands of all samples."""

_SAMPLES = 4
_UNKNOWN_LENGTH = 3
_LEAST_DRAWS = 2  # of those on which the function can run
_MANY_ENTRIES, _MOST_ENTRIES = 2**18, 2**24  # of all operands, for a sample: more draws would take seconds
_WORDS = np.array([b"a", b"b c", b"the cat", b"", b"7", b"-2.5", b"a b a", b"Zq,x!"], object)
# Parts may be computed by other vector instructions than the whole, and so be rounded otherwise.
_TOLERANCE = {"float64": 1e-9, "complex128": 1e-9, "float16": 3e-2, "bfloat16": 1e-1}


@dataclass(frozen=True)
class Operand:
    """An operand of the function.

    ``axis``: the axis with the batch, of which each sample has ``inner`` entries; None for a value that all samples
    share. ``dims``: its lengths, None where one is not known (that of the batch axis does not matter). ``value``: of a
    shared operand, where it is known. ``size``: (c, d) of an operand that is c x number of samples + d. ``once``: it is
    computed once, from all samples, by the ``Prepare`` of the experiment. ``example``: rows of a user's batch, one for
    each sample on axis 0, four or more.
    """

    dtype: str
    dims: tuple[int | None, ...]
    axis: int | None = None
    inner: int = 1
    value: Any = field(default=None, compare=False)
    size: tuple[Any, Any] | None = field(default=None, compare=False)
    once: bool = False
    example: Any = field(default=None, compare=False)

    @property
    def entries(self) -> int:
        """The number of entries to draw: for a sample, or of a value that all samples share."""
        if self.value is not None or self.size is not None or self.once:
            return 0
        lengths = [_UNKNOWN_LENGTH if dim is None else dim for axis, dim in enumerate(self.dims) if axis != self.axis]
        return math.prod(lengths) * (1 if self.axis is None else self.inner)


@dataclass(frozen=True)
class Limits:
    """Properties of a function that its results on a few samples do not show.

    ``loops``: it has loops, which may run as many rounds as a value says, so none is large. ``scales``: magnitudes of
    its constants and variables, beyond which it may do something else. ``samples``: it may treat the samples after this
    number in another way. ``length``: results of a fixed shape may leave out what comes after this number of samples.
    """

    loops: bool = False
    scales: tuple[float, ...] = ()
    samples: int = 0
    length: int = 0


def decide(
    function: Function, prepare: Prepare, operands: Sequence[Operand], outputs: int, limits: Limits
) -> list[Kind | None]:
    """Return the kind of each of the function's ``outputs`` results, None where it is not rows, a sum or a mean."""
    trials = []
    draws = _MODERATE if limits.loops else _DRAWS
    entries = sum(operand.entries for operand in operands)
    if entries > _MOST_ENTRIES:
        return [None] * outputs
    if entries > _MANY_ENTRIES:
        draws = draws[:_LEAST_DRAWS]
    if limits.scales:
        draws = (*draws, *[_style(partial(_at_scales, limits.scales), 5)] * _LEAST_DRAWS)
    for style in range(len(draws)):
        trial = _Trial(function, prepare, operands, draws, style)
        if trial.joins_fail:
            return [None] * outputs
        if trial.whole is not None:
            trials.append(trial)
        if trials and not any(_shape_of_rows(trials[0], i) is not None for i in range(outputs)):
            return [None] * outputs  # lengths that depend on data: no further draw can help
    found = [_decide_output(trials, i) for i in range(outputs)]
    most = max([limits.samples, *(limits.length for kind in found if kind and not kind.rows)])
    if any(found) and most >= _SAMPLES:
        if (most + 2) * entries > _MOST_ENTRIES:
            return [None] * outputs
        trial = _Trial(function, prepare, operands, draws, 0, most + 2)
        whole = trial.whole is not None
        found = [kind if kind and whole and _has_kind(trial, i, kind) else None for i, kind in enumerate(found)]
    return found


def confirm(function: Function, prepare: Prepare, operands: Sequence[Operand], wanted: Sequence[Kind]) -> bool:
    """Return whether the function's results, such as gradients, are of these kinds: rows or sums."""
    trials = [_Trial(function, prepare, operands, _MODERATE, style) for style in range(len(_MODERATE))]
    if any(trial.joins_fail for trial in trials):
        return False
    trials = [trial for trial in trials if trial.whole is not None]
    return bool(trials) and all(_has_kind(trial, i, kind) for trial in trials for i, kind in enumerate(wanted))


class _Trial:
    """The function's results on values of one style: of all samples, of parts, and with one sample changed."""

    def __init__(
        self,
        function: Function,
        prepare: Prepare,
        operands: Sequence[Operand],
        draws: Sequence[_Draw],
        style: int,
        samples: int = _SAMPLES,
    ) -> None:
        self.samples = samples
        self._function = function
        self._operands = operands
        rng = np.random.default_rng(style)
        drawn = [operand for operand in operands if not operand.once]
        own = [_values(operand, draws[style], rng, samples) for operand in drawn]
        self._other = [_values(operand, draws[int(rng.integers(len(draws)))], rng, samples) for operand in drawn]
        parts = [_part(operand, value, 0, samples) for operand, value in zip(drawn, own, strict=True)]
        once = prepare(parts)
        self._values = [*own, *(once or ())]
        self._other += once or ()
        self.whole = None if once is None else self._run(self._values, 0, samples)
        self._parts: dict[tuple[int, int], Sequence[Any] | None] = {(0, samples): self.whole}

    @property
    def joins_fail(self) -> bool:
        """Whether the function runs on each sample by itself, but not on all together."""
        return self.whole is None and all(self.part(i, i + 1) is not None for i in range(self.samples))

    @property
    def splits(self) -> Sequence[Sequence[tuple[int, int]]]:
        """Ways to cut the samples into parts."""
        end = self.samples
        cuts: list[tuple[int, ...]] = [(0, 1, end), (0, end // 2, end), (0, end - 1, end)]
        if end == _SAMPLES:
            cuts.append(tuple(range(end + 1)))
        return [list(itertools.pairwise(cut)) for cut in cuts]

    def part(self, first: int, end: int) -> Sequence[Any] | None:
        """Return the results of the samples from ``first`` to ``end``."""
        if (first, end) not in self._parts:
            self._parts[first, end] = self._run(self._values, first, end)
        return self._parts[first, end]

    def changed(self, sample: int) -> Sequence[Any] | None:
        """Return the results with other entries of one sample."""
        values = [
            _replace_sample(operand, value, other, sample)
            for operand, value, other in zip(self._operands, self._values, self._other, strict=True)
        ]
        return self._run(values, 0, self.samples)

    def again(self) -> Sequence[Any] | None:
        """Return the results of a second run on the same values."""
        return self._run(self._values, 0, self.samples)

    def _run(self, values: Sequence[Any], first: int, end: int) -> Sequence[Any] | None:
        return self._function(
            [_part(operand, value, first, end) for operand, value in zip(self._operands, values, strict=True)]
        )


def _decide_output(trials: Sequence[_Trial], output: int) -> Kind | None:
    shapes = {_shape_of_rows(trial, output) for trial in trials}
    if len(trials) < _LEAST_DRAWS or len(shapes) != 1 or not _says_something(trials, output):
        return None
    (found,) = shapes
    if found is None or any(not _equal(_result(t.whole, output), _result(t.again(), output)) for t in trials):
        return None
    axis, inner = found
    candidates = [rows(axis, 1, inner)] if axis >= 0 else [Kind(Form.SUM), Kind(Form.MEAN)]
    return next((kind for kind in candidates if all(_has_kind(trial, output, kind) for trial in trials)), None)


def _has_kind(trial: _Trial, output: int, kind: Kind) -> bool:
    if kind.rows:
        return _is_rows(trial, output, kind.axis, kind.inner)
    return _adds_up(trial, output, kind.form)


def _result(results: Sequence[Any] | None, output: int) -> Any:
    return None if results is None else results[output]


def _shape_of_rows(trial: _Trial, output: int) -> tuple[int, int] | None:
    """Return the axis that grows with the number of samples, and its entries a sample; (-1, 0) where none does.

    None where lengths depend on the data, or several axes grow.
    """
    shapes = []
    for samples in range(1, _SAMPLES + 1):
        result = _result(trial.part(0, samples), output)
        if result is None:
            return None
        shapes.append(np.shape(result))
    if len({len(shape) for shape in shapes}) > 1:
        return None
    growing = [axis for axis in range(len(shapes[0])) if len({shape[axis] for shape in shapes}) > 1]
    if not growing:
        return (-1, 0)
    inner = shapes[0][growing[0]]
    proportional = all(shape[growing[0]] == inner * (i + 1) for i, shape in enumerate(shapes))
    return (growing[0], inner) if len(growing) == 1 and proportional and inner else None


def _says_something(trials: Sequence[_Trial], output: int) -> bool:
    """Return whether the results of different values differ, so that equal results are evidence."""
    first, *others = [trial.whole[output] for trial in trials if trial.whole is not None]
    return any(np.shape(first) != np.shape(other) or not _equal(first, other) for other in others)


def _is_rows(trial: _Trial, output: int, axis: int, inner: int) -> bool:
    def entries(result: Any, first: int, end: int) -> Any:
        return result[_index(result, axis, inner, first, end)]

    whole = _result(trial.whole, output)
    for first, end in itertools.chain.from_iterable(trial.splits):
        part = _result(trial.part(first, end), output)
        wanted = entries(whole, first, end)
        if part is None or np.shape(part) != np.shape(wanted) or not _close(part, wanted, whole):
            return False
    for sample in range(_SAMPLES):
        other = _result(trial.changed(sample), output)
        for first, end in ((0, sample), (sample + 1, trial.samples)):
            if other is not None and not _equal(entries(other, first, end), entries(whole, first, end)):
                return False
    return True


def _adds_up(trial: _Trial, output: int, form: Form) -> bool:
    whole = _result(trial.whole, output)
    if np.asarray(whole).dtype.kind not in ("fciu" if form is Form.SUM else "fc"):
        return False
    for split in trial.splits:
        parts = [_result(trial.part(*ends), output) for ends in split]
        if any(part is None or np.shape(part) != np.shape(whole) for part in parts):
            return False
        weights = [1.0 if form is Form.SUM else (end - first) / trial.samples for first, end in split]
        with np.errstate(all="ignore"):
            total = sum(np.asarray(part) * weight for part, weight in zip(parts, weights, strict=True))
        if not _close(total, whole, whole):
            return False
    return True


def _equal(one: Any, other: Any) -> bool:
    if other is None or np.shape(one) != np.shape(other):
        return False
    one, other = np.asarray(one), np.asarray(other)
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))


def _close(one: Any, other: Any, whole: Any) -> bool:
    one, other, whole = np.asarray(one), np.asarray(other), np.asarray(whole)
    tolerance = _TOLERANCE.get(whole.dtype.name, 1e-4)
    if whole.dtype.kind not in "fc" and whole.dtype.name not in _TOLERANCE:
        return bool(np.array_equal(one, other))
    with np.errstate(all="ignore"):
        finite = np.abs(whole[np.isfinite(whole)])
        allowed = tolerance * float(finite.max(initial=0.0))
        return bool(np.allclose(one, other, rtol=tolerance, atol=allowed, equal_nan=True))


# --- values of operands

_Draw = Callable[[Any, str, tuple[int, ...]], Any]
"""Returns values of a dtype and shape; its first argument draws random numbers."""


def _values(operand: Operand, draw: _Draw, rng: Any, samples: int) -> Any:
    """Return the operand's value for all samples; a size is computed where the number of samples is known."""
    if operand.value is not None or operand.size is not None:
        return operand.value
    shape = [_UNKNOWN_LENGTH if dim is None else dim for dim in operand.dims]
    if operand.axis is None:
        return draw(rng, operand.dtype, tuple(shape))
    shape[operand.axis] = operand.inner * samples
    if draw is _example and operand.example is not None:
        return operand.example[rng.permutation(len(operand.example))[:samples]]
    return draw(rng, operand.dtype, tuple(shape))


def _part(operand: Operand, value: Any, first: int, end: int) -> Any:
    if operand.size is not None:
        scale, offset = operand.size
        return np.asarray(scale * (end - first) + offset).astype(operand.dtype)
    if operand.axis is None:
        return value
    return value[_index(value, operand.axis, operand.inner, first, end)]


def _index(value: Any, axis: int, inner: int, first: int, end: int) -> tuple[slice, ...]:
    """Return the index of the entries of the samples from ``first`` to ``end``; each has ``inner`` on ``axis``."""
    own = slice(first * inner, end * inner)
    return tuple(own if i == axis else slice(None) for i in range(np.ndim(value)))


def _replace_sample(operand: Operand, value: Any, other: Any, sample: int) -> Any:
    if operand.axis is None:
        return value
    index, result = _index(value, operand.axis, operand.inner, sample, sample + 1), np.array(value)
    result[index] = other[index]
    return result


def _style(floats: Callable[[Any, tuple[int, ...]], Any], largest: int, smallest: int = 0) -> _Draw:
    """Return a draw of floats by ``floats``, of integers from ``smallest`` to ``largest``, of booleans and words."""

    def draw(rng: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        if dtype == "string":
            return _WORDS[rng.integers(0, len(_WORDS), shape)]
        if dtype == "bool":
            return rng.integers(0, 2, shape).astype(bool)
        if "int" in dtype:
            limits = np.iinfo(dtype)
            return rng.integers(max(smallest, limits.min), min(largest, limits.max) + 1, shape).astype(dtype)
        values = floats(rng, shape)
        return values + 1j * floats(rng, shape) if dtype.startswith("complex") else values

    return draw


def _positive_definite(rng: Any, shape: tuple[int, ...]) -> Any:
    """Return positive definite matrices where the last two axes are equal, else positive numbers."""
    values = rng.normal(size=shape)
    if len(shape) < 2 or shape[-1] != shape[-2]:
        return np.abs(values) + 0.1
    return values @ np.swapaxes(values, -1, -2) / shape[-1] + np.eye(shape[-1])


def _probabilities(rng: Any, shape: tuple[int, ...]) -> Any:
    values = rng.uniform(0.05, 1.0, shape)
    return values / values.sum(-1, keepdims=True) if shape else values


def _sorted(rng: Any, shape: tuple[int, ...]) -> Any:
    values = rng.normal(size=shape)
    return np.sort(values, -1) if shape else values


def _extreme(rng: Any, shape: tuple[int, ...]) -> Any:
    return rng.normal(size=shape) * rng.choice([0.0, 1e-6, 1.0, 1e4, 1e12], shape)


def _at_scales(scales: Sequence[float], rng: Any, shape: tuple[int, ...]) -> Any:
    """Return numbers; some are beyond a scale, and some are not."""
    return rng.normal(size=shape) * rng.choice([0.1, 1.0, *(4 * scale for scale in scales)], shape)


def _example(rng: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return draws for operands without a known example."""
    return _MODERATE[0](rng, dtype, shape)


_MODERATE: tuple[_Draw, ...] = (
    _style(lambda rng, shape: rng.normal(size=shape), 1),
    _style(_positive_definite, 2),
    _style(_probabilities, 3),
    _style(lambda rng, shape: rng.integers(-1, 2, shape).astype(np.float64), 3),  # ties
    _style(_sorted, 5),
    _example,
)
_DRAWS = (*_MODERATE, _style(_extreme, 300, -1), _example)
