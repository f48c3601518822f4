"""Names of call-level nodes, sets of their ops, and the numbers of replicas and micro-batches of a pipelined graph."""

from __future__ import annotations

import re
from typing import NamedTuple

from dapple_tf.graph_passes.ir.graph import Attr, Graph, Node
from dapple_tf.graph_passes.ir.ops import OpName

BATCH_SIZE_NAME = "batch/size"
"""The name of the node that gives the number of samples in the batch."""

MICRO_BATCH = "micro_batch"
"""The attribute of a node that has the number of its micro-batch."""

SHARED_STATISTICS = "batch_statistics"
"""The last part of the name of a call, and of its function, by which one replica computes statistics for its stage."""

OWNED = "owned"
"""The last part of the name of a function that computes nothing, and takes the variables that its stage owns."""


_MINIBATCH = "minibatch"
_ROUND = "round"
_OF_TARGET = re.compile(r"target\d+>")


class Site(NamedTuple):
    """A replica of a stage. Replica 0 also stands for the whole stage, where all its replicas do the same."""

    stage: int
    replica: int = 0

    def __str__(self) -> str:
        return f"stage {self.stage}" + (f", replica {self.replica}" if self.replica else "")

    @property
    def attrs(self) -> dict[str, Attr]:
        """The attributes of a node that runs there."""
        return {"replica": self.replica, "stage": self.stage}

    def at(self, what: str) -> str:
        """Return the name of a node or function of the step: ``stage0/update``, ``stage0/replica1/update``."""
        return at(self.stage, self.replica or None, what=what)


def site_of(node: Node) -> Site:
    """Return the stage and the replica of a node that has them."""
    return Site(node.integer("stage"), node.integer("replica"))


def at(stage: int, replica: int | None = None, micro_batch: int | None = None, what: str = "") -> str:
    """Return the name of a node from its place: ``stage1/replica0/mb3/forward``, without parts that are None."""
    parts = [f"stage{stage}"]
    if replica is not None:
        parts.append(f"replica{replica}")
    if micro_batch is not None:
        parts.append(f"mb{micro_batch}")
    return "/".join([*parts, what] if what else parts)


def of_replica(name: str, replica: int, own: int = 0) -> str:
    """Return the name of the node that does on ``replica`` what the node ``name`` does on its ``own`` replica."""
    return name.replace(f"/replica{own}/", f"/replica{replica}/")


def of_minibatch(minibatch: int, name: str) -> str:
    """Return the name that a node of a minibatch has in a window of several, if it belongs to no micro-batch."""
    return f"{_MINIBATCH}{minibatch}/{name}"


def find_minibatch(name: str) -> int | None:
    """Return the minibatch of a name that ``of_minibatch`` returned; None for other names."""
    return _number_after(_MINIBATCH, name)


def of_round(number: int, name: str) -> str:
    """Return ``name``, of a function or a call of the update, as it is called in a round of the update (from 0).

    In round 0 the name is unchanged. See ``analysis.update_rounds``.
    """
    return f"{_ROUND}{number}/{name}" if number else name


def find_round(name: str) -> int:
    """Return the round of a name that ``of_round`` returned; 0 for other names."""
    return _number_after(_ROUND, name) or 0


def _number_after(prefix: str, name: str) -> int | None:
    """Return n of a name ``<prefix>n/...``; None for other names."""
    first, _, rest = name.partition("/")
    number = first.removeprefix(prefix)
    return int(number) if rest and first.startswith(prefix) and number.isdecimal() else None


def of_phase(number: int, name: str) -> str:
    """Return the name by which later phases of a step refer to the node ``name`` of phase ``number`` (from 0)."""
    return f"phase{number + 1}/{name}"


def of_target(target: int, name: str) -> str:
    """Return the name of the gradient of a variable or a tensor by one of several targets, counted from 0.

    The gradient of a variable by the first target that has one is called like the variable.
    """
    return f"target{target}>{name}" if target else name


def without_target(name: str) -> str:
    """Return the name of the variable or the tensor whose gradient has this name."""
    return _OF_TARGET.sub("", name, count=1) if _OF_TARGET.match(name) else name


def nodes_of(graph: Graph, *ops: OpName) -> tuple[Node, ...]:
    """Return the nodes that have one of these ops, in order."""
    return tuple(node for node in graph.nodes if node.op in ops)


BACKWARD_OPS = OpName.BACKWARD, OpName.INPUTS, OpName.WEIGHTS
"""The ops of a micro-batch's backward on a stage: the whole, or its two parts."""

WRITING_OPS = OpName.RUN_ONCE, OpName.FORWARD, OpName.LOSS_HEAD
"""The ops whose calls may write what a model's forward writes, such as batch norm's statistics and counters."""

STAGE_OPS = (*WRITING_OPS, OpName.PARTIALS, OpName.PART, *BACKWARD_OPS)
"""The ops that call a part of a stage's forward or backward: each uses its replica's copies of variables."""


_COLLECTIVES = frozenset({OpName.EXCHANGE, OpName.ALLREDUCE, OpName.MERGE_STATE, OpName.BARRIER})


def is_collective(node: Node) -> bool:
    """Return whether a node of a rank's graph communicates with other ranks."""
    return node.op in _COLLECTIVES and node.has("ranks")


def weight_gradient_op(graph: Graph, stage: int, micro_batch: int) -> OpName:
    """Return the op whose call gives the gradients of a stage's variables: ``weights`` where the backward is split."""
    return OpName.WEIGHTS if at(stage, 0, micro_batch, OpName.WEIGHTS) in graph.by_name else OpName.BACKWARD


def of_any_micro_batch(node: Node) -> str:
    """Return the name of a node that has a micro-batch, with ``*`` in place of its number."""
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
    """Return how the replicas of a stage share rows, from its forward calls; empty where the shares are equal."""
    forwards = (node for node in nodes_of(graph, OpName.FORWARD) if node.integer("stage") == stage)
    return next((node.integers("shares") for node in forwards if node.has("shares")), ())


def share_attributes(shares: tuple[int, ...], name: str = "shares") -> dict[str, Attr]:
    """Return the attribute that says how replicas share rows; none where the shares are equal."""
    return {name: shares} if shares else {}


def micro_batch_count(graph: Graph) -> int:
    """Return M, the number of micro-batches, from the forward calls."""
    return max(node.integer("micro_batch") for node in nodes_of(graph, OpName.FORWARD)) + 1


def cut_attributes(graph: Graph) -> dict[str, Attr]:
    """Return the attributes that say how the batch is cut: M, and ``sizes`` where the slices have them."""
    found: dict[str, Attr] = {"micro_batches": micro_batch_count(graph)}
    sizes = next((node.integers("sizes") for node in nodes_of(graph, OpName.SLICE) if node.has("sizes")), None)
    return found if sizes is None else {**found, "sizes": sizes}
