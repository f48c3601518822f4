"""The reasons why a pipelined step computes something else than a step on one device; most models have none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dapple_tf.drawing.table import format_table

_WIDTH = 120  # characters of a line of the table

Inexact = Literal["error", "warn", "allow"]
"""The reaction to a model whose step would differ from one device's: raise an error, warn, or train silently."""

BatchLoss = bool | Literal["auto"]
"""Whether the part of a loss that combines samples runs once, on the whole batch; "auto": only if it must."""

BatchNorm = Literal["micro-batch", "deferred", "sync"]
"""The samples whose statistics batch norm takes in training mode.

"micro-batch": it normalises each replica's samples of a micro-batch by themselves, and keeps moving statistics of each
micro-batch in turn. "deferred": moving statistics of the whole batch, once. "sync": it normalises all samples of a
micro-batch together, over the replicas of a stage.
"""


@dataclass(frozen=True)
class Inexactness:
    """A reason for which a step over micro-batches differs from a step on one device.

    ``layer``: the layer or op that causes it; ``why``: what it does; ``remedy``: what the user can do. ``documented``:
    a training step is allowed to differ for this reason (batch norm in training mode, draws without a seed); any other
    reason is an error unless the user allows it. ``uncut``: the step differs also where one micro-batch is the whole
    batch, unless it is traced for that. ``node``: the name of the op in the captured graph, "" where it is ``layer``.
    """

    layer: str
    why: str
    remedy: str
    documented: bool = False
    uncut: bool = False
    node: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.layer}: {self.why}. {self.remedy}"


@dataclass(frozen=True)
class Tried:
    """An op of ``layer`` that no rule describes, and what it ``gives``, as an experiment on drawn values found."""

    layer: str
    op: str
    gives: str


@dataclass(frozen=True)
class Exactness:
    """All reasons for which a step differs from one device's; its ``str`` is a table, or says that there are none.

    ``windows``: the reasons are those of each minibatch of an asynchronous window, with the weights that it uses.
    ``tried``: ops of which only an experiment tells how they treat samples; ``str`` lists them too.
    """

    reasons: tuple[Inexactness, ...] = ()
    windows: bool = False
    tried: tuple[Tried, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether a step equals one device's: there is no reason."""
        return not self.reasons

    @property
    def undocumented(self) -> tuple[Inexactness, ...]:
        """The reasons that are errors unless the user allows them."""
        return tuple(reason for reason in self.reasons if not reason.documented)

    @property
    def exact_uncut(self) -> bool:
        """Whether a step of one micro-batch on one replica equals one device's: batch norm is no reason there."""
        return not self.undocumented and not self.of_minibatches.reasons and not self.tried

    @property
    def of_minibatches(self) -> Exactness:
        """The reasons that also hold for the minibatches of an asynchronous window, each computed whole."""
        return Exactness(tuple(reason for reason in self.reasons if reason.uncut))

    @property
    def documented(self) -> str:
        """The documented reasons, each with its layers and its remedy, in one line; "" where there are none."""
        layers: dict[tuple[str, str], list[str]] = {}
        for reason in self.reasons:
            if reason.documented:
                layers.setdefault((reason.why, reason.remedy), []).append(reason.layer)
        return "; ".join(f"{_shortened(names)} {why}: {remedy}" for (why, remedy), names in layers.items())

    @property
    def note(self) -> str:
        """The ops that were tried and what they give, in one line; "" where there are none."""
        if not self.tried:
            return ""
        layers: dict[tuple[str, str], list[str]] = {}
        for tried in self.tried:
            layers.setdefault((tried.op, tried.gives), []).append(tried.layer)
        found = [f"{op} ({_shortened(names)}) gives {gives}" for (op, gives), names in layers.items()]
        return (
            f"found by experiment, since no rule describes these ops: {', '.join(found)}; the loss of the "
            "first step is compared with that of the whole batch"
        )

    def to_json(self) -> list[dict[str, Any]]:
        """Return the reasons as JSON objects."""
        return [
            {key: value for key, value in asdict(reason).items() if key not in ("uncut", "node")}
            for reason in self.reasons
        ]

    def __str__(self) -> str:
        return "\n".join(filter(None, (self._table(), self.note)))

    def _table(self) -> str:
        if not self.reasons and self.windows:
            return (
                "exact, each minibatch by itself: its loss, gradients and state equal those of one device that has the "
                "weights which the minibatch uses, some of them a few updates old"
            )
        if not self.reasons:
            return "exact: loss, gradients, variables and state equal those of one device"
        rows: Sequence[Sequence[str]] = [(reason.layer, reason.why, reason.remedy) for reason in self.reasons]
        return "\n".join(format_table(("layer", "why the step differs", "remedy"), rows, left=3, width=_WIDTH))


def _shortened(names: Sequence[str]) -> str:
    first, *others = names
    return f"{first} and {len(others)} more" if others else first
