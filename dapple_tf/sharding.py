"""Share the update of a replicated stage out to its replicas (ZeRO, stage 1: Rajbhandari et al. 2020, section 5.1).

Each variable has one replica that keeps its slots: the other replicas send their gradients of it there, that replica
updates it, and all others get its new value as the next step starts. A step moves the bytes of an AllReduce, which is a
reduction followed by a distribution. Variables are not cut, so whatever an optimizer computes from a whole variable
(clipping by its norm, trust ratios, factored slots) is exact. In return the shares are only as even as the sizes of the
variables allow: a variable larger than all others together has a replica of its own. To be cut by rows it would need an
optimizer that is known to work element by element.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from dapple_tf import variable_values
from dapple_tf.errors import PlanError
from dapple_tf.frontend.optimizer_update import TracedUpdate
from dapple_tf.graph_passes.ir.graph import Effect


@dataclass(frozen=True)
class Sharding:
    """The ``replicas`` of each stage, and the replica of each variable in ``known``, by identity of the variable."""

    replicas: tuple[int, ...]
    known: Mapping[int, int]


def share_update(
    update: TracedUpdate,
    owner: Mapping[str, int],
    readers: Mapping[str, int],
    state: frozenset[str],
    sharding: Sharding,
) -> dict[str, int]:
    """Return the replica that updates each variable of the model that ``update`` writes, of stages with replicas.

    ``owner``, ``readers``: the stages of variables, as for ``cut_updates``. ``state``: the variables that forward
    writes. Raises PlanError where the update writes one of these.
    """
    writes = (node.strings("writes") for node in update.graph.nodes if node.effect is Effect.WRITE)
    written = set(itertools.chain.from_iterable(writes))
    found: dict[str, int] = {}
    for stage, replicas in enumerate(sharding.replicas):
        if replicas == 1:
            continue
        own = [name for name, of in owner.items() if of == stage and name in written]
        if both := sorted(state.intersection(own)):
            raise PlanError(
                f"shard_optimizer=True: forward writes {both[0]!r} on all {replicas} replicas of stage {stage}, and "
                "the optimizer updates it, which one replica would do alone: leave shard_optimizer out, or give this "
                "stage one replica"
            )
        sizes = {name: variable_values.variable_bytes(update.variables[name]) for name in own}
        known = {name: sharding.known[key] for name in own if (key := id(update.variables[name])) in sharding.known}
        found |= share_out(sizes, replicas, known)
        found |= {name: 0 for name, of in readers.items() if of == stage}
    return found


def share_out(sizes: Mapping[str, int], replicas: int, known: Mapping[str, int]) -> dict[str, int]:
    """Return a replica for each variable, so that the bytes of all replicas are as equal as a simple rule makes them.

    The largest variable goes first, each to the replica with the fewest bytes (Graham 1969: at most 4/3 of the best).
    ``sizes``: bytes by variable. ``known``: variables that have a replica already.
    """
    found = {name: known[name] for name in sizes if name in known}
    held = [0] * replicas
    for name, replica in found.items():
        held[replica] += sizes[name]
    for name in sorted((name for name in sizes if name not in found), key=lambda name: -sizes[name]):
        found[name] = held.index(min(held))
        held[found[name]] += sizes[name]
    return {name: found[name] for name in sizes}
