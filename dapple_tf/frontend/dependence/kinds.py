"""The kinds of dependence of a tensor on the batch.

Let v be a tensor's value on the whole batch of N samples, and v_m its value on micro-batch m, which has the samples
[a, b). Its kind says how the values of the micro-batches make up the whole batch's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Form(Enum):
    """The rule by which the values v_m of the micro-batches give the value v of the whole batch."""

    SHARED = "shared"
    """v_m = v, provided that what is marked ``once`` is computed once, on the whole batch."""
    ROWS = "rows"
    """v is the concatenation of the v_m along an axis, or along one of its factors: see ``outer`` in ``Kind``."""
    SUM = "sum"
    """v is the sum of the v_m."""
    MEAN = "mean"
    """v is the mean of the v_m, weighted by their numbers of samples."""
    ROW_BOUNDS = "row bounds"
    """A micro-batch's first and end row and the batch size, and what is computed of these alone, such as its weight."""
    SIZE = "size"
    """Integers computed from the shapes of rows; they serve as shapes, ranges and indices of the micro-batch."""
    LIST = "list"
    """A TensorList whose elements are of the kind ``element``."""
    COUPLED = "coupled"
    """None of these: samples were combined in another way."""


@dataclass(frozen=True)
class Kind:
    """The kind of one tensor.

    ``trained``: its value depends on a trained variable. ``once`` (shared): it depends on the batch or on variables
    that forward writes, so it must be computed once a step.

    Rows: ``axis`` is the axis with the batch; its length is ``outer`` x N x ``inner``, in row-major order. Where data
    choose the rows (``tf.boolean_mask``) the length is unknown, and ``origin`` names the mask that chose them.
    ``slope``: the whole batch has v_m + slope x a at these rows. It is not zero for *positions* of rows, such as
    ``tf.range(tf.shape(x)[0])``: the micro-batch counts from 0, the whole batch from a. One number for each entry of
    the last axis where these differ.

    ``mixed`` (sum): terms that do not depend on samples, or are means, must be weighted before it is a sum.

    Coupled: ``node`` combined the samples, ``why`` says how; ``documented``: a step is allowed to differ for this
    reason; ``undecided``: no rule says what the op does with samples, so an experiment may (see ``undecided``).
    """

    form: Form
    trained: bool = False
    once: bool = False
    axis: int = 0
    outer: int = 1
    inner: int = 1
    origin: str = ""
    slope: tuple[int, ...] = ()
    mixed: bool = False
    node: str = ""
    why: str = ""
    documented: bool = False
    undecided: bool = False
    element: Kind | None = None

    @property
    def shared(self) -> bool:
        return self.form is Form.SHARED

    @property
    def rows(self) -> bool:
        return self.form is Form.ROWS

    @property
    def coupled(self) -> bool:
        return self.form is Form.COUPLED

    @property
    def total(self) -> bool:
        """Whether it is a sum or a mean over the batch."""
        return self.form in (Form.SUM, Form.MEAN)

    @property
    def layout(self) -> tuple[int, int, str]:
        """Order and choice of the rows: tensors of equal layout hold the same samples at the same positions."""
        return self.outer, self.inner, self.origin

    def at(self, axis: int) -> Kind:
        """Return these rows on another axis."""
        return dataclasses.replace(self, axis=axis)

    def plain(self) -> Kind:
        """Return the kind of these rows where their values are no positions of rows."""
        return dataclasses.replace(self, slope=())

    def sloped(self, slope: Sequence[int]) -> Kind:
        """Return the kind of these rows where their values are positions of this slope; plain where it is zero."""
        return dataclasses.replace(self, slope=tuple(slope) if any(slope) else ())


def only_rows(kinds: Sequence[Kind]) -> list[Kind]:
    """Return the kinds that are rows."""
    return [kind for kind in kinds if kind.rows]


def same_order(kinds: Sequence[Kind]) -> bool:
    """Return whether those that are rows hold the samples in the same order; equal rows fit any order."""
    return len({kind.layout for kind in kinds if kind.rows and kind.outer}) <= 1


def first_rows(kinds: Sequence[Kind]) -> Kind:
    """Return the first of those that are rows in an order; equal rows, where there are no others, have none."""
    found = only_rows(kinds)
    return next((kind for kind in found if kind.outer), found[0])


CONSTANT = Kind(Form.SHARED)
SIZE = Kind(Form.SIZE)


def shared(*, trained: bool = False, once: bool = False) -> Kind:
    """Return the kind of a value that all micro-batches share."""
    return Kind(Form.SHARED, trained=trained, once=once)


def rows(axis: int = 0, outer: int = 1, inner: int = 1, *, trained: bool = False) -> Kind:
    """Return the kind of a tensor of rows."""
    return Kind(Form.ROWS, trained=trained, axis=axis, outer=outer, inner=inner)


def coupled(node: str, why: str, *, trained: bool = False, documented: bool = False) -> Kind:
    """Return the kind of a tensor in which ``node`` combined samples."""
    return Kind(Form.COUPLED, trained=trained, node=node, why=why, documented=documented)
