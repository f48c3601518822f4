"""Weight stashing: store versions of a stage's weights, and let each forward and backward use the version meant for it.

A version is stored in one of a ring of *slots* on each replica as soon as the update that makes it is done (PipeDream,
section 3.3). It stays until the last backward that uses it has run; then the slot is free for a later version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.graph_passes.analysis.variable_use import find_variables
from dapple_tf.graph_passes.ir.graph import Graph, Node, make_node
from dapple_tf.graph_passes.ir.names import Site, at, of_minibatch
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract
from dapple_tf.graph_passes.passes.order import call_name
from dapple_tf.graph_passes.passes.windows.update_groups import update_name
from dapple_tf.graph_passes.schedules.schedule import Action
from dapple_tf.graph_passes.schedules.weight_versions import Versions
from dapple_tf.graph_passes.schedules.window import Window


@dataclass(frozen=True)
class UseVersions(BuiltInPass):
    """Store the ``versions`` of the weights ``trained``, and give each call the attribute ``version``, its slot."""

    versions: Versions
    trained: frozenset[str]
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD, OpName.MINIBATCH, OpName.SET_UPDATING}),
        forbids=frozenset({OpName.STORE_VERSION, OpName.TIMESTAMP}),
        may_produce=frozenset({OpName.STORE_VERSION}),
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph in which each replica that needs old weights stores versions, and its calls use them.

        A version is stored after the update that makes it and after the last call that uses what the slot held before;
        the stage's next update comes after it. A stage whose calls all use the newest weights stores none.
        """
        window = self.versions.window
        variables = find_variables(graph)
        stores: list[Node] = []
        calls = dict(graph.by_name)
        for (stage, replica), actions in window.rows.items():
            names = tuple(name for name in variables.used(stage) if name in self.trained)
            slots = self.versions.slots[stage]
            if not slots or not names:
                continue
            last: dict[int, Action] = {}  # by version, the last action that uses it
            for action in actions:
                last[self.versions.used[action]] = action
            held: dict[int, int] = {}  # by slot, the last version that was stored there
            for version in sorted(last):
                slot = version % slots
                name, place = version_name(stage, replica, version), Site(stage, replica).attrs
                store = make_node(name, OpName.STORE_VERSION, **place, variables=names, version=slot)
                if version:
                    store = store.after(
                        update_name(window, stage, version - 1), f"version: made by update {version - 1}"
                    )
                if slot in held:  # earlier versions in this slot were no longer used when this one was stored
                    earlier = held[slot]
                    store = store.after(call_name(last[earlier], replica), f"version: {earlier} is used no more")
                held[slot] = version
                stores.append(store)
                if version < len(window.updates[stage]):
                    update = update_name(window, stage, version)
                    calls[update] = calls[update].after(store.name, f"version: {version} is stored before it changes")
            for action in actions:
                version = self.versions.used[action]
                for name in calls_of(graph, window, action, replica):
                    reason = f"version: it uses version {version} of the weights"
                    call = calls[name].with_attrs(version=version % slots)
                    calls[name] = call.after(version_name(stage, replica, version), reason)
        return graph.replace(nodes=(*calls.values(), *stores)).sorted()


def version_name(stage: int, replica: int, version: int) -> str:
    """Return the name of the node that stores a version of a stage's weights on a replica."""
    return at(stage, replica, what=f"version{version}")


def calls_of(graph: Graph, window: Window, action: Action, replica: int) -> tuple[str, ...]:
    """Return the names of the calls of an action, in order: before a forward, the calls that run once a minibatch.

    Replicas that take minibatches in turn each run these calls for all minibatches of a group, before their own forward
    of the group. So all replicas write the same values, and use the same version of the weights for them.
    """
    stage, m, each = action.stage, action.micro_batch, window.micro_batches
    group = window.updates[stage][window.update_of(stage, m)] if action.kind == "F" and m % each == 0 else ()
    once = (of_minibatch(n // each, at(stage, replica, what=OpName.RUN_ONCE)) for n in group[::each])
    return (*(name for name in once if name in graph.by_name), call_name(action, replica))
