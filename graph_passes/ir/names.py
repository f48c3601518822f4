"""Names of nodes of the call level, sets of their ops, and the numbers of replicas and micro-batches of their graph."""

from __future__ import annotations

import re
from typing import NamedTuple

from dapple_tf.graph_passes.ir.graph import Attr, Graph, Node
from dapple_tf.graph_passes.ir.ops import OpName

BATCH_SIZE_NAME = "batch/size"
"""The name of the node whose output is the number of samples in the batch."""

MICRO_BATCH = "micro_batch"
"""The attribute that holds the number of a node's micro-batch."""

SHARED_STATISTICS = "batch_statistics"
"""The last part of the names of a call that computes statistics on one replica for its stage, and of its function."""

OWNED = "owned"
"""The last part of the name of a function that computes nothing: its inputs are variables that its stage owns."""


_MINIBATCH = "minibatch"
_ROUND = "round"
_OF_TARGET = re.compile(r"target\d+>")


class Site(NamedTuple):
    """A replica of a stage. Replica 0 also stands for the whole stage, if all its replicas do the same."""

    stage: int
    replica: int = 0

    def __str__(self) -> str:
        return f"stage {self.stage}" + (f", replica {self.replica}" if self.replica else "")

    @property
    def attrs(self) -> dict[str, Attr]:
        """The attributes stage and replica of a node that runs on this site."""
        return {"replica": self.replica, "stage": self.stage}

    def at(self, what: str) -> str:
        """Return the name of a node or function of this site: ``stage0/update``, or ``stage0/replica1/update``."""
        return at(self.stage, self.replica or None, what=what)


def site_of(node: Node) -> Site:
    """Return the site of a node that has the attributes stage and replica."""
    return Site(node.integer("stage"), node.integer("replica"))


def at(stage: int, replica: int | None = None, micro_batch: int | None = None, what: str = "") -> str:
    """Return a node's name, such as ``stage1/replica0/mb3/forward``; parts that are None are left out."""
    parts = [f"stage{stage}"]
    if replica is not None:
        parts.append(f"replica{replica}")
    if micro_batch is not None:
        parts.append(f"mb{micro_batch}")
    return "/".join([*parts, what] if what else parts)


def of_replica(name: str, replica: int, own: int = 0) -> str:
    """Return a node's name with ``replica`` in place of its ``own`` replica."""
    return name.replace(f"/replica{own}/", f"/replica{replica}/")


def of_minibatch(minibatch: int, name: str) -> str:
    """Return the name that a node without a micro-batch has for one of the minibatches of a window."""
    return f"{_MINIBATCH}{minibatch}/{name}"


def find_minibatch(name: str) -> int | None:
    """Return the minibatch in a name made by ``of_minibatch``; None for other names."""
    return _number_after(_MINIBATCH, name)


def of_round(number: int, name: str) -> str:
    """Return the name that a function or a call of the update has in one of the update's rounds, counted from 0.

    In round 0 the name is unchanged. See ``analysis.update_rounds``.
    """
    return f"{_ROUND}{number}/{name}" if number else name


def find_round(name: str) -> int:
    """Return the round in a name made by ``of_round``; 0 for other names."""
    return _number_after(_ROUND, name) or 0


def _number_after(prefix: str, name: str) -> int | None:
    """Return n of a name ``<prefix>n/...``; None for other names."""
    first, _, rest = name.partition("/")
    number = first.removeprefix(prefix)
    return int(number) if rest and first.startswith(prefix) and number.isdecimal() else None


def of_phase(number: int, name: str) -> str:
    """Return the name by which later phases of a step refer to a node of phase ``number``, counted from 0."""
    return f"phase{number + 1}/{name}"


def of_target(target: int, name: str) -> str:
    """Return the name of the gradient of one of several targets with respect to the variable or the tensor ``name``.

    Targets are counted from 0, whose gradient has the name of the variable itself. If target 0 does not depend on the
    variable, the gradient of the first target that does has this name.
    """
    return f"target{target}>{name}" if target else name


def without_target(name: str) -> str:
    """Return the name of the variable or the tensor from the name of its gradient (see ``of_target``)."""
    return _OF_TARGET.sub("", name, count=1) if _OF_TARGET.match(name) else name


def nodes_of(graph: Graph, *ops: OpName) -> tuple[Node, ...]:
    """Return the nodes that have one of these ops, in order."""
    return tuple(node for node in graph.nodes if node.op in ops)


BACKWARD_OPS = OpName.BACKWARD, OpName.INPUTS, OpName.WEIGHTS
"""The ops of a stage's backward on a micro-batch: one for the whole backward, and one for each half if it is split."""

WRITING_OPS = OpName.RUN_ONCE, OpName.FORWARD, OpName.LOSS_HEAD
"""The ops whose calls may write variables in forward, such as batch norm's statistics and counters."""

STAGE_OPS = (*WRITING_OPS, OpName.PARTIALS, OpName.PART, *BACKWARD_OPS)
"""The ops that call a stage's forward or backward or a part of it, with the copies of variables on their replica."""


_COLLECTIVES = frozenset({OpName.EXCHANGE, OpName.ALLREDUCE, OpName.MERGE_STATE, OpName.BARRIER})


def is_collective(node: Node) -> bool:
    """Return whether a node of a rank's graph communicates with other ranks."""
    return node.op in _COLLECTIVES and node.has("ranks")


def weight_gradient_op(graph: Graph, stage: int, micro_batch: int) -> OpName:
    """Return the op whose call computes the gradients of a stage's variables: ``weights`` if the backward is split."""
    return OpName.WEIGHTS if at(stage, 0, micro_batch, OpName.WEIGHTS) in graph.by_name else OpName.BACKWARD


def of_any_micro_batch(node: Node) -> str:
    """Return a node's name with ``*`` in place of the number of its micro-batch."""
    number = node.integer(MICRO_BATCH)
    return node.name.replace(f"/mb{number}/", "/mb*/")


def replica_counts(graph: Graph) -> tuple[int, ...]:
    """Return the number of replicas of each stage, from the forward calls."""
    counts: dict[int, int] = {}
    for node in nodes_of(graph, OpName.FORWARD):
        stage = node.integer("stage")
        counts[stage] = max(counts.get(stage, 0), node.integer("replica") + 1)
    return tuple(counts[stage] for stage in sorted(counts))


def replica_shares(graph: Graph, stage: int) -> tuple[int, ...]:
    """Return the shares of rows of a stage's replicas, from its forward calls; empty if the shares are equal."""
    forwards = (node for node in nodes_of(graph, OpName.FORWARD) if node.integer("stage") == stage)
    return next((node.integers("shares") for node in forwards if node.has("shares")), ())


def share_attributes(shares: tuple[int, ...], name: str = "shares") -> dict[str, Attr]:
    """Return the attribute with the shares of rows of replicas; no attribute if the shares are equal."""
    return {name: shares} if shares else {}


def micro_batch_count(graph: Graph) -> int:
    """Return M, the number of micro-batches, from the forward calls."""
    return max(node.integer("micro_batch") for node in nodes_of(graph, OpName.FORWARD)) + 1


def cut_attributes(graph: Graph) -> dict[str, Attr]:
    """Return the attributes for how the batch is cut: M, and ``sizes`` if the micro-batches have unequal sizes."""
    found: dict[str, Attr] = {"micro_batches": micro_batch_count(graph)}
    sizes = next((node.integers("sizes") for node in nodes_of(graph, OpName.SLICE) if node.has("sizes")), None)
    return found if sizes is None else {**found, "sizes": sizes}
